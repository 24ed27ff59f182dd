"""Pages on a GPU: allocations of physical memory that this process owns and never maps.

Each slab is one `cuMemCreate` handle, exportable as a file descriptor. It lives as long as this process, a
descriptor or somebody's mapping of it does. Nothing here needs torch.
"""

import os
from typing import Any

from shared.errors import ResourceError

GRANULARITY_BYTES = 2 << 20


class DeviceSlabs:
    """Owns `num_slabs` slabs on one GPU until close().

    Args: device: "cuda:" and the GPU's UUID in hex without dashes.
    Raises: ResourceError when there is no such GPU or not enough memory on it.
    Cost: about 10 us a slab, and one CUDA context (about 0.5 GiB of GPU memory) for the first.
    """

    def __init__(self, device: str, num_slabs: int, slab_bytes: int) -> None:
        self.device, self.slab_bytes = device, slab_bytes
        self._driver = _driver()
        self._index = self._find(device)
        driver = self._driver
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, self._index)
        self._call(driver.cuCtxSetCurrent, self._context)
        kinds = driver.CUmemAllocationHandleType
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(self._index)
        prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._fd_kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._property = prop
        self._handles: list[Any] = []  # None: given back to the system
        try:
            for _ in range(num_slabs):
                self._handles.append(self._call(driver.cuMemCreate, slab_bytes, prop, 0))
        except ResourceError:
            self.close()
            raise

    def export(self, slab: int) -> int:
        """A file descriptor of one slab, the caller's to close. Raises: ResourceError for an absent one.

        Cost: about 0.1 ms.
        """
        if self._handles[slab] is None:
            raise ResourceError(f"slab {slab} has no memory now")
        return self._export(self._handles[slab])

    def _export(self, handle: Any) -> int:
        return int(self._call(self._driver.cuMemExportToShareableHandle, handle, self._fd_kind, 0))

    def is_present(self, slab: int) -> bool:
        """Whether it has memory: none after close()."""
        return bool(self._handles) and self._handles[slab] is not None

    def release(self, slab: int) -> None:
        """Give it back to the system, once nobody else maps it or has a descriptor. Any thread. Cost: 10 us."""
        handle, self._handles[slab] = self._handles[slab], None
        if handle is not None:
            self._call(self._driver.cuMemRelease, handle)

    def restore(self, slab: int) -> None:
        """Memory again for an absent one. Any thread. Raises: ResourceError when there is none."""
        if self._handles[slab] is None:
            self._handles[slab] = self._call(self._driver.cuMemCreate, self.slab_bytes, self._property, 0)

    def make_descriptor(self) -> int:
        """A new allocation that lives by this descriptor alone, the caller's. Raises: ResourceError."""
        handle = self._call(self._driver.cuMemCreate, self.slab_bytes, self._property, 0)
        try:
            return self._export(handle)
        finally:
            self._call(self._driver.cuMemRelease, handle)

    def close(self) -> None:
        """Release every slab that nobody else holds."""
        for slab in range(len(self._handles)):
            self.release(slab)
        self._handles = []

    def _find(self, device: str) -> Any:
        for number in range(int(self._call(self._driver.cuDeviceGetCount))):
            found = self._call(self._driver.cuDeviceGet, number)
            uuid = self._call(self._driver.cuDeviceGetUuid, found)
            if device == f"cuda:{bytes(uuid.bytes).hex()}":
                return found
        raise ResourceError(f"no GPU {device} is visible to the mempool")

    def _call(self, function: Any, *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if int(status) != 0:
            raise ResourceError(f"{function.__name__}: {status.name}")
        return results[0] if len(results) == 1 else results


class KeptSlabs:
    """Slabs that an earlier mempool made, by their descriptors alone: no CUDA context is needed to hand them on.

    Args: fds: -1 for slabs that have no memory.
    """

    def __init__(self, fds: list[int], device: str, slab_bytes: int) -> None:
        self._fds = fds
        self._device, self._slab_bytes = device, slab_bytes
        self._maker: DeviceSlabs | None = None  # of new ones

    def export(self, slab: int) -> int:
        """As DeviceSlabs.export()."""
        if self._fds[slab] < 0:
            raise ResourceError(f"slab {slab} has no memory now")
        return os.dup(self._fds[slab])

    def is_present(self, slab: int) -> bool:
        """Whether it has memory: none after close()."""
        return bool(self._fds) and self._fds[slab] >= 0

    def release(self, slab: int) -> None:
        """As DeviceSlabs.release()."""
        fd, self._fds[slab] = self._fds[slab], -1
        if fd >= 0:
            os.close(fd)

    def restore(self, slab: int) -> None:
        """As DeviceSlabs.restore(). Cost: a CUDA context for the first."""
        if self._fds[slab] < 0:
            if self._maker is None:
                self._maker = DeviceSlabs(self._device, 0, self._slab_bytes)
            self._fds[slab] = self._maker.make_descriptor()

    def close(self) -> None:
        """Let go of all of them."""
        for slab in range(len(self._fds)):
            self.release(slab)
        self._fds = []


def _driver() -> Any:
    """Raises: ResourceError without CUDA's driver or its bindings."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        (status,) = driver.cuInit(0)
    except (ImportError, RuntimeError) as error:
        raise ResourceError(f"this mempool cannot own GPU pages: {error}") from error
    if int(status) != 0:
        raise ResourceError(f"this mempool cannot own GPU pages: cuInit: {status.name}")
    return driver
