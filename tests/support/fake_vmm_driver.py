"""CUDA's virtual memory calls over memfds: real bytes at real addresses, the driver's rules, and a record of calls."""

import ctypes
import mmap
import os

from shared.errors import OutOfPages
from shared.vmm.errors import VmmError
from shared.vmm.host_calls import libc

GRANULARITY_BYTES = 64 << 10  # small, so that tests stay quick
_FIXED = 0x10
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
READ_ONLY, READ_WRITE = 1001, 1002


class FakeVmmDriver:
    """`calls` is what was asked of the driver, by CUDA's names. `memory_bytes` is what the device has."""

    granularity_bytes = GRANULARITY_BYTES

    def __init__(self, memory_bytes: int = 1 << 30, refuse_map_number: int = 0) -> None:
        self.calls: list[tuple] = []
        self.memory_bytes = memory_bytes
        self.refuse_map_number = refuse_map_number  # the how-manieth cuMemMap fails; 0: none
        self.handles: dict[int, int] = {}  # handle: descriptor
        self.imported: set[int] = set()
        self.mapped: dict[int, tuple[int, int]] = {}  # address: (size, handle)
        self.reservations: dict[int, int] = {}
        self.next_handle = 1
        self.used_bytes = 0
        self.registered: set[int] = set()
        self.registers_read_only = True

    def make_current(self):
        self.calls.append(("cuCtxSetCurrent",))

    def memory_info(self):
        return self.memory_bytes - self.used_bytes, self.memory_bytes

    def create(self, size_bytes):
        self.calls.append(("cuMemCreate", size_bytes))
        if self.used_bytes + size_bytes > self.memory_bytes:
            raise OutOfPages("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        assert size_bytes % GRANULARITY_BYTES == 0
        fd = os.memfd_create("fake-gpu-page")
        os.ftruncate(fd, size_bytes)
        self.used_bytes += size_bytes
        return self._new(fd)

    def _new(self, fd):
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.handles[handle] = fd
        return handle

    def release(self, handle):
        self.calls.append(("cuMemRelease", handle))
        fd = self.handles.pop(handle)
        if handle not in self.imported:
            self.used_bytes -= os.fstat(fd).st_size
        os.close(fd)

    def export_fd(self, handle):
        if handle in self.imported:
            raise VmmError("cuMemExportToShareableHandle: CUDA_ERROR_INVALID_VALUE")
        return os.dup(self.handles[handle])

    def import_fd(self, fd):
        self.calls.append(("cuMemImportFromShareableHandle",))
        try:
            own = os.dup(fd)
        except OSError as error:
            raise VmmError("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE") from error
        handle = self._new(own)
        self.imported.add(handle)
        return handle

    def reserve(self, size_bytes, hint=0):
        self.calls.append(("cuMemAddressReserve", size_bytes))
        address = libc.mmap(hint or None, size_bytes, 0, _ANONYMOUS, -1, 0)
        self.reservations[address] = size_bytes
        return address

    def free_reservation(self, address, size_bytes):
        self.calls.append(("cuMemAddressFree", size_bytes))
        assert not any(address <= at < address + size_bytes for at in self.mapped), (
            "something is still mapped"
        )
        assert self.reservations.pop(address) == size_bytes
        libc.munmap(address, size_bytes)

    def map(self, address, size_bytes, handle):
        self.calls.append(("cuMemMap", address, size_bytes, handle))
        if sum(call[0] == "cuMemMap" for call in self.calls) == self.refuse_map_number:
            raise VmmError("cuMemMap: CUDA_ERROR_UNKNOWN")
        if address in self.mapped or os.fstat(self.handles[handle]).st_size != size_bytes:
            raise VmmError("cuMemMap: CUDA_ERROR_INVALID_VALUE")
        self._mmap(address, size_bytes, 0, os.dup(self.handles[handle]))
        self.mapped[address] = (size_bytes, handle)

    def _mmap(self, address, size_bytes, protection, fd):
        flags = mmap.MAP_SHARED | _FIXED if fd >= 0 else _ANONYMOUS | _FIXED
        at = libc.mmap(address, size_bytes, protection, flags, fd, 0)
        assert at == address, ctypes.get_errno()
        if fd >= 0:
            os.close(fd)

    def access_address(self, writable):
        return READ_WRITE if writable else READ_ONLY

    def set_access(self, address, size_bytes, access):
        self.calls.append(("cuMemSetAccess", address, size_bytes, access))
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == READ_WRITE else 0)
        for at, (size, _) in self._inside(address, size_bytes, "cuMemSetAccess"):
            assert _libc_mprotect(at, size, protection) == 0

    def unmap(self, address, size_bytes):
        self.calls.append(("cuMemUnmap", address, size_bytes))
        for at, (size, _) in self._inside(address, size_bytes, "cuMemUnmap"):
            self._mmap(at, size, 0, -1)
            del self.mapped[at]

    def _inside(self, address, size_bytes, name):
        inside = [(at, one) for at, one in self.mapped.items() if address <= at < address + size_bytes]
        if sum(size for _, (size, _) in inside) != size_bytes:  # holes, or half a handle
            raise VmmError(f"{name}: CUDA_ERROR_INVALID_VALUE")
        return inside

    def zero(self, address, size_bytes):
        ctypes.memset(address, 0, size_bytes)

    def register_host(self, address, size_bytes, *, writable):
        self.calls.append(("cuMemHostRegister", address, size_bytes, writable))
        if not writable and not self.registers_read_only:
            raise VmmError("cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED")
        assert address not in self.registered, "registered twice"
        self.registered.add(address)

    def unregister_host(self, address):
        self.calls.append(("cuMemHostUnregister", address))
        self.registered.remove(address)

    def entry_points(self):
        return {}

    def close(self):
        for fd in self.handles.values():
            os.close(fd)
        self.handles = {}

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


_libc_mprotect = ctypes.CDLL(None).mprotect
_libc_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
