"""CUDA's calls for virtual memory, on plain integers, behind an interface that a fake can stand for.

Importing this needs no driver. The device's primary context is retained, so that torch in the same process uses the
same one; a process without torch has it too.
"""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from shared.errors import OutOfPages
from shared.vmm.errors import VmmError, VmmUnavailable
from shared.vmm.interface import OP_CUDA_ACCESS, OP_CUDA_MAP, OP_CUDA_UNMAP

_ENTRY_POINTS = {
    OP_CUDA_MAP: ("cuMemMap", 10020),
    OP_CUDA_ACCESS: ("cuMemSetAccess", 10020),
    OP_CUDA_UNMAP: ("cuMemUnmap", 10020),
}


class VmmDriver(Protocol):
    """Handles, addresses and descriptors are integers. A refused call raises VmmError (OutOfPages for no memory)."""

    @property
    def granularity_bytes(self) -> int:
        """Handles, addresses and mappings are multiples of this."""
        ...

    def make_current(self) -> None:
        """Bind the device's primary context to the calling thread."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device, all processes counted."""
        ...

    def create(self, size_bytes: int) -> int:
        """cuMemCreate: physical memory, exportable as a descriptor; the handle is the caller's to release."""
        ...

    def release(self, handle: int) -> None:
        """cuMemRelease: the memory goes with its last mapping and descriptor."""
        ...

    def export_fd(self, handle: int) -> int:
        """A descriptor, the caller's to close. Imported handles cannot be exported again: forward descriptors."""
        ...

    def import_fd(self, fd: int) -> int:
        """A handle; the descriptor stays open and is still the caller's."""
        ...

    def reserve(self, size_bytes: int, hint: int = 0) -> int:
        """cuMemAddressReserve, at `hint` if the driver can and likes to."""
        ...

    def free_reservation(self, address: int, size_bytes: int) -> None:
        """cuMemAddressFree; nothing is mapped there any more."""
        ...

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """cuMemMap of a whole handle; no access yet."""
        ...

    def access_address(self, writable: bool) -> int:
        """Address of a CUmemAccessDesc for this device, alive as long as the driver object."""
        ...

    def set_access(self, address: int, size_bytes: int, access: int) -> None:
        """cuMemSetAccess with one of access_address()'s, over whole mapped handles without holes."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """cuMemUnmap of whole mapped handles without holes. Does not wait for kernels: the caller has."""
        ...

    def zero(self, address: int, size_bytes: int) -> None:
        """Write zeros and wait until they are there."""
        ...

    def register_host(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """cuMemHostRegister: this process's memory there is page-locked; this device reads it at the same address."""
        ...

    def unregister_host(self, address: int) -> None:
        """cuMemHostUnregister. Does not wait for kernels: the caller has."""
        ...

    def entry_points(self) -> dict[int, int]:
        """Addresses of the driver's functions by op code, for calls without the GIL."""
        ...

    def close(self) -> None:
        """Let go of the context."""
        ...


class CudaVmmDriver:
    """One GPU.

    Args:
        device: its number among those visible, or "cuda:" and its UUID in hex (shared.wire.mempool.Attach).
        context: False leaves the device without one: enough to make, export and import pages (bench_vmm.py tries
            it), not to touch them.
    Raises: VmmUnavailable without the bindings, the driver library or the device.
    Cost: the first context of a process on a GPU takes about 0.3 s and 0.5 GiB of its memory.
    """

    def __init__(self, device: int | str = 0, *, context: bool = True) -> None:
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.driver")
            (status,) = self._cuda.cuInit(0)
        except (ImportError, RuntimeError, OSError) as error:
            raise VmmUnavailable(f"no CUDA driver: {(str(error).splitlines() or [''])[0]}") from error
        if int(status) != 0:
            raise VmmUnavailable(f"cuInit: {status.name}")
        self._context: Any = None
        try:
            self._device = self._find(device)
            if context:
                self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        except VmmError as error:
            raise VmmUnavailable(error.message) from error
        self.make_current()
        self._kind = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._property = self._make_property()
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(self._call("cuMemGetAllocationGranularity", self._property, minimum))
        self._access = {writable: self._make_access(writable) for writable in (False, True)}
        self._by_address = {int(one.getPtr()): one for one in self._access.values()}

    @property
    def granularity_bytes(self) -> int:
        """See VmmDriver."""
        return self._granularity

    def make_current(self) -> None:
        """See VmmDriver. Nothing without a context."""
        if self._context is not None:
            self._call("cuCtxSetCurrent", self._context)

    def memory_info(self) -> tuple[int, int]:
        """See VmmDriver."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def create(self, size_bytes: int) -> int:
        """See VmmDriver. Cost: about 10 us."""
        return int(self._call("cuMemCreate", size_bytes, self._property, 0))

    def release(self, handle: int) -> None:
        """See VmmDriver. Cost: about 10 us."""
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """See VmmDriver. Cost: about 0.1 ms."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._kind, 0))

    def import_fd(self, fd: int) -> int:
        """See VmmDriver."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._kind))

    def reserve(self, size_bytes: int, hint: int = 0) -> int:
        """See VmmDriver."""
        return int(self._call("cuMemAddressReserve", size_bytes, 0, hint, 0))

    def free_reservation(self, address: int, size_bytes: int) -> None:
        """See VmmDriver."""
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """See VmmDriver. Cost: about 1 us; 35 us while kernels run."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def access_address(self, writable: bool) -> int:
        """See VmmDriver."""
        return int(self._access[writable].getPtr())

    def set_access(self, address: int, size_bytes: int, access: int) -> None:
        """See VmmDriver. Cost: about 23 us a handle."""
        self._call("cuMemSetAccess", address, size_bytes, [self._by_address[access]], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        """See VmmDriver. Cost: about 14 us a handle."""
        self._call("cuMemUnmap", address, size_bytes)

    def zero(self, address: int, size_bytes: int) -> None:
        """See VmmDriver."""
        self.make_current()
        self._call("cuMemsetD8", address, 0, size_bytes)
        self._call("cuStreamSynchronize", 0)

    def register_host(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """See VmmDriver. Cost: about 0.1 ms a MiB; page-locked memory of others is not locked twice as fast."""
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        flags |= 0 if writable else self._cuda.CU_MEMHOSTREGISTER_READ_ONLY
        self._call("cuMemHostRegister", address, size_bytes, flags)
        seen = int(self._call("cuMemHostGetDevicePointer", address, 0))
        if seen != address:
            self.unregister_host(address)
            raise VmmError(f"host memory at {address:#x} is at {seen:#x} for the device")

    def unregister_host(self, address: int) -> None:
        """See VmmDriver."""
        self._call("cuMemHostUnregister", address)

    def entry_points(self) -> dict[int, int]:
        """See VmmDriver."""
        return {code: self._address_of(name, version) for code, (name, version) in _ENTRY_POINTS.items()}

    def close(self) -> None:
        """See VmmDriver."""
        if self._context is not None:
            self._context = None
            self._call("cuDevicePrimaryCtxRelease", self._device)

    def _find(self, device: int | str) -> Any:
        if isinstance(device, int):
            return self._call("cuDeviceGet", device)
        for number in range(int(self._call("cuDeviceGetCount"))):
            found = self._call("cuDeviceGet", number)
            uuid = self._call("cuDeviceGetUuid", found)
            if device == f"cuda:{bytes(uuid.bytes).hex()}":
                return found
        raise VmmUnavailable(f"no GPU {device} is visible here")

    def _make_property(self) -> Any:
        cuda = self._cuda
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(self._device)
        prop.requestedHandleTypes = self._kind
        return prop

    def _make_access(self, writable: bool) -> Any:
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._device)
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        return access

    def _address_of(self, name: str, version: int) -> int:
        address, _ = self._call("cuGetProcAddress", name.encode(), version, 0)
        if not int(address):
            raise VmmUnavailable(f"the driver has no {name}")
        return int(address)

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(self._cuda, name)
        status, *results = function(*arguments)
        if int(status) != 0:
            kind = OutOfPages if status.name == "CUDA_ERROR_OUT_OF_MEMORY" else VmmError
            raise kind(f"{name}: {status.name}")
        return results[0] if len(results) == 1 else results
