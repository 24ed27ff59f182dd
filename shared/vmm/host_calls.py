"""The C library's calls for host memory, as ctypes need them told: every window over host memory makes these."""

import ctypes

MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_NORESERVE = 0x10, 0x100000, 0x4000
FAILED = ctypes.c_void_p(-1).value  # of mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
