"""The C library's calls for host memory, as ctypes need them told: every window over host memory makes these."""

import ctypes
import os

MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_NORESERVE = 0x10, 0x100000, 0x4000
FAILED = ctypes.c_void_p(-1).value  # of mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def map_memory(
    address: int | None, num_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0
) -> int:
    """mmap. Where it is mapped. Raises: OSError; nothing has changed then."""
    at = libc.mmap(address, num_bytes, protection, flags, fd, offset)
    if at == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(at)
