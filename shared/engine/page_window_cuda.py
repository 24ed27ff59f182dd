"""The pool's slabs of one GPU mapped side by side behind a private null page; see page_window.py.

Descriptors are closed as soon as they are imported: only mempool and keeper hold them for longer.
"""

import os
from typing import Any

import torch
from cuda.bindings import driver

from shared.errors import ResourceError
from shared.mempool.rank_memory import RankMemory

GRANULARITY_BYTES = 2 << 20


class _Span:
    """Memory as torch takes it over without copying."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }


class CudaWindow:
    """One reservation: the null page ends where the first slab begins. Mapped for the life of the process.

    Raises: ResourceError when the driver refuses.
    Cost: about 80 us a slab to import and map, one call for access to all of it.
    """

    def __init__(self, memory: RankMemory, device: torch.device) -> None:
        header = memory.header
        slab_bytes = memory.pages_per_slab * header.page_bytes
        null_bytes = -(-header.page_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        num_slabs = header.num_pages // memory.pages_per_slab
        size = null_bytes + num_slabs * slab_bytes
        base = int(_call(driver.cuMemAddressReserve, size, 0, 0, 0))
        null = _call(driver.cuMemCreate, null_bytes, _own_memory(device), 0)
        self._map(base, null_bytes, null)
        at = base + null_bytes
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        for fds in memory.slab_fds():
            for fd in fds:
                slab = _call(driver.cuMemImportFromShareableHandle, fd, kind)
                os.close(fd)
                self._map(at, slab_bytes, slab)
                at += slab_bytes
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index or 0
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(driver.cuMemSetAccess, base, size, [access], 1)
        self.address = base + null_bytes - header.page_bytes
        self.size_bytes = (header.num_pages + 1) * header.page_bytes

    @staticmethod
    def _map(address: int, size_bytes: int, handle: Any) -> None:
        _call(driver.cuMemMap, address, size_bytes, 0, handle, 0)
        _call(driver.cuMemRelease, handle)  # the mapping keeps it


def _own_memory(device: torch.device) -> Any:
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device.index or 0
    return prop


def _call(function: Any, *arguments: Any) -> Any:
    status, *results = function(*arguments)
    if int(status) != 0:
        raise ResourceError(f"{function.__name__}: {status.name}")
    return results[0] if results else None


def open_cuda_window(memory: RankMemory, device: torch.device) -> tuple[torch.Tensor, object]:
    """(int8 tensor over the window, its owner). Call with the device's context current."""
    torch.cuda.current_stream(device)  # the context exists and is current from here on
    window = CudaWindow(memory, device)
    span = _Span(window.address, window.size_bytes, window)
    tensor = torch.as_tensor(span, device=device)
    tensor[: memory.header.page_bytes].zero_()
    return tensor, window
