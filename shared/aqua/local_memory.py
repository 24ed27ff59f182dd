"""Addresses for tensors, and this device's pages behind them: mmap over the mempool's memfd, or CUDA's virtual memory.

One reservation holds all tensors. A tensor keeps its places for life, and it lives as long as its views; the pages
behind them come and go. A place without a page faults on any access: a stale view never reads another tensor's bytes.
One of a tensor that was closed faults too, until its places are another's: all places are handed out in turn
(AquaSettings.address_bytes), so that this is rarely soon.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from shared.aqua.own_space import OwnSpace
from shared.errors import OutOfPages
from shared.vmm.interface import PageWindow
from shared.vmm.memfd_pages import MemfdPages


def settled_device(name: str) -> torch.device:
    """PyTorch's device of this name; "cuda" is the GPU that is current now, whichever is later."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def mempool_device(device: torch.device, instance: str) -> str:
    """As in wire.Attach: a GPU by its UUID, host memory by the instance's name."""
    if device.type == "cpu":
        return f"cpu:{instance}"
    return f"cuda:{bytes(torch.cuda.get_device_properties(device).uuid.bytes).hex()}"


def open_window(own: OwnSpace, num_places: int, device: torch.device) -> PageWindow:
    """Raises: VmmError; ResourceError, ClusterError when the mempool does not send a GPU's pages.

    Cost: host: one mapping. GPU: about 80 us a page to import.
    """
    if device.type == "cpu":
        memory = own.memory
        source = MemfdPages(
            own.num_pages, own.page_bytes, fd=os.dup(memory.fd), offset_bytes=memory.offset_bytes
        )
        return source.window(num_places)
    from shared.vmm.cuda_driver import CudaVmmDriver  # needs CUDA's bindings
    from shared.vmm.cuda_pages import ImportedCudaPages

    torch.cuda.current_stream(device)  # the context exists and is current from here on
    imported = ImportedCudaPages(CudaVmmDriver(device.index or 0), own.num_pages, own.page_bytes)
    for first, fds in own.memory.slab_fds():
        imported.add(first, fds)
    own.memory.stay_attached()
    return imported.window(num_places)


class LocalMemory:
    """Places in a window. One thread at a time."""

    def __init__(self, window: PageWindow, device: torch.device) -> None:
        self._window, self._device = window, device
        self._free: list[tuple[int, int]] = [(0, window.num_indices)]  # (first, count), in order, apart
        self._next = 0  # behind what was handed out last

    def take(self, count: int) -> int:
        """First of `count` places side by side: the next ones, or from the beginning again. Raises: OutOfPages."""
        for least in (self._next, 0):
            for at, (begin, size) in enumerate(self._free):
                first, end = max(begin, least), begin + size
                if end - first >= count:
                    self._next = first + count
                    parts = (begin, first - begin), (self._next, end - self._next)
                    self._free[at : at + 1] = [part for part in parts if part[1]]
                    return first
        raise OutOfPages(f"no {count} addresses side by side are left; raise address_bytes")

    def give_back(self, first: int, count: int) -> None:
        """Holes again, for other tensors."""
        runs: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (first, count)]):
            if runs and runs[-1][0] + runs[-1][1] == begin:
                runs[-1] = runs[-1][0], runs[-1][1] + size
            else:
                runs.append((begin, size))
        self._free = runs

    def map(self, first: int, pages: Sequence[int]) -> None:
        """These pages behind the places. Raises: VmmError; then nothing is mapped."""
        self._window.map_pages(first, pages)

    def unmap(self, first: int, count: int) -> None:
        """After all work given to the device is done."""
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        self._window.unmap(first, count)

    def wait(self) -> None:
        """Until all work given to the device is done."""
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def address(self, first: int) -> int:
        """Of a place."""
        return self._window.address + first * self._window.page_bytes

    def view(self, first: int, shape: torch.Size, dtype: torch.dtype, owner: object = None) -> torch.Tensor:
        """The mapped bytes at a place, without a copy; valid until they are unmapped. `owner` lives as long as it."""
        num_bytes = shape.numel() * dtype.itemsize
        span: Any = self._window.span(first * self._window.page_bytes, num_bytes, owner)
        if self._device.type == "cpu":
            flat = torch.frombuffer(span, dtype=torch.uint8)
        else:
            flat = torch.as_tensor(span, device=self._device).view(torch.uint8)
        return flat.view(dtype).view(shape)

    def close(self) -> None:
        """All places are holes for good."""
        self.wait()
        self._window.close()
