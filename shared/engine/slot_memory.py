"""A pool's pages as an engine with request slots sees them: once for good for writing, and side by side per slot.

`identity` is the window of page_window.py: block i + 1 is page i. `slots` is a second window over the same memory, in
which pages appear, read-only, wherever a request needs them (vAttention 5.2); a native thread maps them in runs.
"""

import os
from typing import Any

import torch

from shared.engine.page_window import open_window
from shared.mempool.rank_memory import RankMemory
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import ImportedCudaPages
from shared.vmm.memfd_pages import MemfdPages
from shared.vmm.request_layout import RequestLayout, TokenView
from shared.vmm.request_window import RequestWindow, map_blocks


class SlotMemory:
    """Both windows of one rank, for the life of the process.

    Args: guard_tokens: how far behind a request a GPU's kernel may load.
    Raises: OSError, VmmError when kernel or driver refuse; ResourceError when the pool does.
    Cost: host: two mappings. GPU: about 80 us to import and map each handle, one call for access to all.
    """

    identity: torch.Tensor  # int8 [(num_pages + 1) * page_bytes]
    slots: torch.Tensor  # int8, the whole window; a hole faults
    mapper: RequestWindow

    def __init__(
        self, memory: RankMemory, layout: RequestLayout, device: torch.device, guard_tokens: int
    ) -> None:
        if device.type == "cpu":
            self._open_host(memory, layout, device)
        else:
            self._open_device(memory, layout, device, -(-guard_tokens // layout.block_tokens))

    def _open_host(self, memory: RankMemory, layout: RequestLayout, device: torch.device) -> None:
        identity = open_window(memory, device)
        self.identity, self._owner = identity.tensor, identity.owner
        num_pieces = memory.header.num_pages * layout.num_pieces
        source = MemfdPages(
            num_pieces, layout.piece_bytes, fd=os.dup(memory.fd), offset_bytes=memory.offset_bytes
        )
        self.mapper = RequestWindow(source, layout)
        span: Any = self.mapper.window.span()
        self.slots = torch.frombuffer(span, dtype=torch.int8)

    def _open_device(
        self, memory: RankMemory, layout: RequestLayout, device: torch.device, guard_places: int
    ) -> None:
        torch.cuda.current_stream(device)  # the context exists and is current from here on
        pieces, num_pages = layout.num_pieces, memory.header.num_pages
        driver = CudaVmmDriver(device.index or 0)
        source = ImportedCudaPages(driver, num_pages * pieces + 1, layout.piece_bytes)
        for first, fds in memory.slab_fds():
            source.add(first, fds)
        null_piece = num_pages * pieces
        source.make(null_piece)
        blocks = source.window((num_pages + 1) * pieces)
        map_blocks(blocks, num_pages, pieces, null_piece)
        driver.zero(blocks.address, layout.piece_bytes)
        self.identity, self._owner = torch.as_tensor(blocks.span(), device=device), blocks
        self.mapper = RequestWindow(source, layout, null_piece, guard_places)
        self.slots = torch.as_tensor(self.mapper.window.span(), device=device)

    def view(self, which: torch.Tensor, view: TokenView, dtype: torch.dtype) -> torch.Tensor:
        """A layer in one of the two windows."""
        return which.view(dtype).as_strided(view.shape, view.strides, view.offset)
