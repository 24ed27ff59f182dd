"""The pool's pages as one tensor: a private null page, then every page of this rank in order, mapped once.

Each block keeps its place for the life of the process, so nothing is mapped or unmapped while requests run.
"""

import ctypes
import mmap
from typing import NamedTuple

import torch

from shared.engine.far_window import FarPlaces, HostFar
from shared.mempool.rank_memory import RankMemory, SlabUser
from shared.vmm.host_calls import MAP_FIXED, map_memory


class PageWindow(NamedTuple):
    """`tensor`: int8 [blocks * page_bytes], valid while `owner` lives; far places behind the pages.

    `slabs`: of a GPU's window. `far`: None without far places.
    """

    tensor: torch.Tensor
    owner: object
    slabs: SlabUser | None = None
    far: FarPlaces | None = None


def device_name(device: torch.device, host_space: str = "") -> str:
    """As in wire.Attach: independent of what each process calls the device. `host_space`: of host memory."""
    if device.type == "cpu":
        return f"cpu:{host_space}" if host_space else "cpu"
    uuid = torch.cuda.get_device_properties(device).uuid
    return f"cuda:{bytes(uuid.bytes).hex()}"


def open_window(memory: RankMemory, device: torch.device, far_places: int = 0) -> PageWindow:
    """Map the null page and all pages, and keep addresses for far places behind them.

    Raises: OSError when the kernel refuses; ResourceError when the GPU's driver does.
    """
    if memory.pages_per_slab:
        from shared.engine.page_window_cuda import open_cuda_window  # needs CUDA's bindings

        tensor, window = open_cuda_window(memory, device, far_places)
        return PageWindow(tensor, window, window, window.far)
    header = memory.header
    size = (header.num_pages + 1) * header.page_bytes
    far_bytes = far_places * header.page_bytes
    owner = mmap.mmap(-1, size + far_bytes)  # private and untouched: only the first page of it stays
    base = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    map_memory(
        base + header.page_bytes, size - header.page_bytes, mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | MAP_FIXED, memory.fd, memory.offset_bytes,
    )  # fmt: skip
    far = HostFar(base + size, header.page_bytes, far_places) if far_places else None
    return PageWindow(torch.frombuffer(owner, dtype=torch.int8), owner, far=far)
