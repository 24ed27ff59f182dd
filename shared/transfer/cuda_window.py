"""Map allocations of another process side by side, once, at link-up. The driver's few calls; no torch.

Cost: 79 us an allocation (facts.md), so large ones are better; descriptors are closed as they are imported.
"""

import importlib
import os
from collections.abc import Iterable
from typing import Any

from shared.transfer.errors import PathUnavailable


def load_driver() -> Any:
    """cuda.bindings.driver, initialized. Raises: PathUnavailable."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
        (status,) = driver.cuInit(0)
    except (ImportError, RuntimeError, OSError) as error:
        raise PathUnavailable(f"no CUDA driver: {str(error).splitlines()[0]}") from error
    if int(status) != 0:
        raise PathUnavailable(f"cuInit: {status.name}")
    return driver


class CudaWindow:
    """A reserved range of `num_allocations` times `allocation_bytes`, filled by add(); owned until close().

    The caller has made the device's context current.
    """

    def __init__(
        self, driver: Any, device: int, num_allocations: int, allocation_bytes: int, *, writable: bool = False
    ) -> None:
        """`writable` False: the driver refuses every write through this mapping. Raises: PathUnavailable."""
        self._driver = driver
        self._device = device
        self._allocation_bytes = allocation_bytes
        self._size = num_allocations * allocation_bytes
        self._num_allocations = num_allocations
        self._writable = writable
        self.num_mapped = 0
        self.address = int(self._call("cuMemAddressReserve", self._size, 0, 0, 0))

    def add(self, fds: Iterable[int]) -> None:
        """Import the next allocations, in order; takes over the descriptors. Raises: PathUnavailable."""
        first = self.num_mapped
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        waiting = list(fds)
        try:
            if first + len(waiting) > self._num_allocations:
                raise PathUnavailable(
                    f"{first + len(waiting)} allocations for a window of {self._num_allocations}"
                )
            while waiting:
                handle = self._call("cuMemImportFromShareableHandle", waiting[0], kind)
                os.close(waiting.pop(0))
                at = self.address + self.num_mapped * self._allocation_bytes
                self._call("cuMemMap", at, self._allocation_bytes, 0, handle, 0)
                self._call("cuMemRelease", handle)  # the mapping keeps it
                self.num_mapped += 1
        finally:
            for fd in waiting:
                os.close(fd)
            if self.num_mapped > first:
                self._allow(first, self.num_mapped)

    def _allow(self, first: int, last: int) -> None:
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        flags = driver.CUmemAccess_flags
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if self._writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        length = (last - first) * self._allocation_bytes
        self._call("cuMemSetAccess", self.address + first * self._allocation_bytes, length, [access], 1)

    def boundaries(self) -> range:
        """Where allocations begin: no copy may cross these (CudaCopier.add_boundaries)."""
        return range(self.address, self.address + self._size + 1, self._allocation_bytes)

    def close(self) -> None:
        """Unmap. Nothing may be copying any more."""
        if self.address:
            if self.num_mapped:
                self._call("cuMemUnmap", self.address, self.num_mapped * self._allocation_bytes)
            self._call("cuMemAddressFree", self.address, self._size)
            self.address = 0

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise PathUnavailable(f"{name}: {getattr(status, 'name', status)}")
        return results[0] if results else None
