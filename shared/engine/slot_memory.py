"""A pool's pages as an engine with request slots maps them: once for good for writing, and side by side per slot.

`identity` is the window of page_window.py: block i + 1 is page i. `slots` is a second window over the same memory, in
which pages appear, read-only, wherever a request needs them (vAttention 5.2); a native thread maps them in runs.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from shared.engine.page_window import open_window
from shared.mempool.rank_memory import RankMemory
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import ImportedCudaPages
from shared.vmm.interface import Op, PageSource
from shared.vmm.mapper import open_mapper
from shared.vmm.memfd_pages import MemfdPages
from shared.vmm.request_layout import RequestLayout, TokenView
from shared.vmm.slot_commands import Command, Map


class SlotMemory:
    """Both windows of one rank, for the life of the process.

    Raises: OSError, VmmError when kernel or driver refuse; ResourceError when the pool does.
    Cost: host: two mappings. GPU: about 80 us to import and map each handle, one call for access to all.
    """

    identity: torch.Tensor  # int8 [(num_pages + 1) * page_bytes]
    slots: torch.Tensor  # int8, the whole window; a hole faults

    def __init__(self, memory: RankMemory, layout: RequestLayout, device: torch.device) -> None:
        self.layout = layout
        self.num_ops = 0
        opens = self._open_host if device.type == "cpu" else self._open_device
        source = opens(memory, device)
        self._window = source.window(layout.num_indices)
        self._open_slots(source, device)
        self._mapper = open_mapper(self._window)

    def _open_host(self, memory: RankMemory, device: torch.device) -> PageSource:
        identity = open_window(memory, device)
        self.identity, self._owners = identity.tensor, [identity.owner]
        pieces = self.layout.num_pieces
        return MemfdPages(
            memory.header.num_pages * pieces,
            self.layout.piece_bytes,
            fd=os.dup(memory.fd),
            offset_bytes=memory.offset_bytes,
        )

    def _open_device(self, memory: RankMemory, device: torch.device) -> PageSource:
        torch.cuda.current_stream(device)  # the context exists and is current from here on
        pieces, num_pages = self.layout.num_pieces, memory.header.num_pages
        driver = CudaVmmDriver(device.index or 0)
        source = ImportedCudaPages(driver, num_pages * pieces + 1, self.layout.piece_bytes)
        first = 0
        for fds in memory.slab_fds():
            source.add(first, fds)
            first += len(fds)
        self._null = num_pages * pieces  # one piece of private memory stands for all of a null page
        source.make(self._null)
        window = source.window((num_pages + 1) * pieces)
        window.map_pages(0, [self._null] * pieces)
        driver.zero(window.address, self.layout.piece_bytes)
        window.map(pieces, 0, num_pages * pieces)
        self.identity, self._owners = torch.as_tensor(window.span(), device=device), [window]
        return source

    def _open_slots(self, source: PageSource, device: torch.device) -> None:
        window = self._window
        if device.type == "cpu":
            window.map_private(0)
            span: Any = window.span()
            self.slots = torch.frombuffer(span, dtype=torch.int8)
            return
        window.map_pages(0, [self._null], writable=False)
        self.slots = torch.as_tensor(window.span(), device=device)

    def guard(self, num_places: int) -> None:
        """GPU: behind each slot's longest request lies the null page, for kernels that load whole tiles."""
        if not num_places or not hasattr(self, "_null"):
            return
        layout = self.layout
        for piece in range(layout.num_pieces):
            for slot in range(layout.num_slots):
                last = layout.index(piece, (slot + 1) * layout.slot_places)
                self._window.map_pages(last - num_places, [self._null] * num_places, writable=False)

    def view(self, which: torch.Tensor, view: TokenView, dtype: torch.dtype) -> torch.Tensor:
        """A layer in one of the two windows."""
        return which.view(dtype).as_strided(view.shape, view.strides, view.offset)

    def submit(self, commands: Sequence[Command]) -> int:
        """Have them executed in order by the mapper's thread. Returns: the ticket to wait for.

        Raises: VmmError when an earlier one was refused: the window is not what the table says, end the process;
            TooManyMappings.
        """
        ops: list[Op] = []
        layout = self.layout
        for command in commands:
            for piece in range(layout.num_pieces):
                at = layout.index(piece, command.first)
                if isinstance(command, Map):
                    pages = [page * layout.num_pieces + piece for page in command.pages]
                    ops += self._window.plan_map(at, pages, writable=command.writable)
                else:
                    ops += self._window.plan_unmap(at, command.num_places)
        self.num_ops += len(ops)
        return self._mapper.submit(ops) if ops else self._mapper.submitted

    def is_done(self, ticket: int) -> bool:
        """Whether wait() would return at once."""
        return self._mapper.done >= ticket

    def wait(self, ticket: int) -> None:
        """Raises: VmmError when a command was refused or takes too long."""
        self._mapper.wait(ticket)
