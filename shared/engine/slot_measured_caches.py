"""For loadtest/bench_contiguous.py: the same KV in vLLM's blocks, and in slots of mapped pages. A layer is (K, V)."""

import random
from collections.abc import Callable
from typing import Any

import torch

from shared.engine.slot_measured import (
    Batch,
    PagedTriton,
    contiguous_flash3,
    paged_flash3,
    slot_kernel,
)
from shared.kv.layout import CUDA_PAGE_BYTES, HOST_PAGE_BYTES, EngineDescription
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages
from shared.vmm.interface import PageSource
from shared.vmm.memfd_pages import MemfdPages
from shared.vmm.request_layout import request_layout
from shared.vmm.request_slots import RequestSlots
from shared.vmm.request_window import RequestWindow, map_blocks

AHEAD_TOKENS = 256  # mapped behind each request, as slot_settings.py has it on a GPU
Run = Callable[[int], None]  # one layer's attention, by its number


class Shape:
    """Of the model: everything in elements of `dtype`."""

    def __init__(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.num_layers, self.num_heads = num_layers, num_heads
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype

    @property
    def token_bytes(self) -> int:
        """K and V of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedCache:
    """vLLM's own cache: per layer [blocks, tokens, heads, 2 * dim], blocks of a request scattered; or, cross-layer,
    all layers of a block side by side, as in Quire's default layout.
    """

    def __init__(self, raw: torch.Tensor, shape: Shape, block_tokens: int, *, cross_layer: bool) -> None:
        self.shape, self.block_tokens = shape, block_tokens
        blocks = raw.numel() // (shape.token_bytes // shape.dtype.itemsize * block_tokens)
        sizes = (block_tokens, shape.num_kv_heads, 2 * shape.head_dim)
        used = raw[: blocks * shape.num_layers * block_tokens * shape.num_kv_heads * 2 * shape.head_dim]
        if cross_layer:
            self._cache = used.view(blocks, shape.num_layers, *sizes).transpose(0, 1)
        else:
            self._cache = used.view(shape.num_layers, blocks, *sizes)
        self._free = list(range(blocks))
        random.Random(1).shuffle(self._free)
        self._triton: PagedTriton | None = None

    def place(self, query_lens: list[int], seq_lens: list[int]) -> Batch:
        """Requests in scattered blocks."""
        device = self._cache.device
        width = -(-max(seq_lens) // self.block_tokens)
        rows, at = [], 0
        for length in seq_lens:
            count = -(-length // self.block_tokens)
            rows.append(self._free[at : at + count] + [0] * (width - count))
            at += count
        if at > len(self._free):
            raise ValueError(f"{at} blocks of {len(self._free)}")
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        shape = self.shape
        return Batch(query_lens, seq_lens, shape.num_heads, shape.head_dim, shape.dtype, device)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[blocks, tokens, heads, dim]."""
        key, value = self._cache[number].split(self.shape.head_dim, dim=-1)
        return key, value

    def write(self, number: int, request: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """One layer of one request, [tokens, heads, dim]."""
        tokens = torch.arange(key.shape[0], device=key.device)
        blocks = self.table[request].long()[tokens // self.block_tokens]
        for cache, new in zip(self.layer(number), (key, value), strict=True):
            cache[blocks, tokens % self.block_tokens] = new

    def run(self, kernel: str, batch: Batch) -> Run:
        """Raises: ValueError for an unknown kernel."""
        layers = [self.layer(i) for i in range(self.shape.num_layers)]
        if kernel == "flash3":
            return lambda i: paged_flash3(batch, *layers[i], self.table)
        if kernel != "triton":
            raise ValueError(kernel)
        shape = self.shape
        triton = PagedTriton(shape.num_heads, shape.num_kv_heads, shape.head_dim, batch.query.device)
        return lambda i: triton(batch, *layers[i], self.table)

    def close(self) -> None:
        """Nothing to give back: the memory is the caller's."""


class PlainCache(PagedCache):
    """K and V of all requests in plain memory, equal lengths: what a contiguous kernel could reach at best."""

    def __init__(self, raw: torch.Tensor, shape: Shape) -> None:
        super().__init__(raw, shape, 1, cross_layer=False)
        half = raw.numel() // 2
        self._halves = raw[:half], raw[half : 2 * half]

    def place(self, query_lens: list[int], seq_lens: list[int]) -> Batch:
        """Requests one behind the other."""
        shape, device = self.shape, self._cache.device
        self._lengths = seq_lens
        return Batch(query_lens, seq_lens, shape.num_heads, shape.head_dim, shape.dtype, device)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens of all requests, heads, dim]."""
        total, shape = sum(self._lengths), self.shape
        size = total * shape.num_kv_heads * shape.head_dim
        sizes = (total, shape.num_kv_heads, shape.head_dim)
        key, value = (half[number * size : (number + 1) * size].view(sizes) for half in self._halves)
        return key, value

    def write(self, number: int, request: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """One layer of one request."""
        begin = sum(self._lengths[:request])
        for cache, new in zip(self.layer(number), (key, value), strict=True):
            cache[begin : begin + new.shape[0]] = new

    def run(self, kernel: str, batch: Batch) -> Run:
        """FlashAttention-3 only."""
        layers = [self.layer(i) for i in range(self.shape.num_layers)]
        return lambda i: contiguous_flash3(batch, *layers[i])


class SlotCache:
    """Requests in slots over pages of 2 MiB allocations (host: a memfd), scattered pages side by side.

    Cost: a map call for each piece of a page, at place(); nothing at run().
    """

    def __init__(
        self, kind: str, shape: Shape, num_tokens: int, num_slots: int, max_tokens: int, device: torch.device,
        block_tokens: int = 0,
    ) -> None:  # fmt: skip
        on_gpu = device.type == "cuda"
        block_tokens = block_tokens or (1024 if kind == "layer-major" else 64)
        granularity = CUDA_PAGE_BYTES if on_gpu else HOST_PAGE_BYTES
        block_bytes = block_tokens * shape.token_bytes
        description = EngineDescription(
            model="", fingerprint="", dtype="", layout=kind, backend="", num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_tokens=block_tokens,
            block_bytes=block_bytes, max_model_len=max_tokens,
        )  # fmt: skip
        self.shape, self.block_tokens = shape, block_tokens
        self.layout = layout = request_layout(
            description, item_bytes=shape.dtype.itemsize, page_bytes=-(-block_bytes // granularity) * granularity,
            granularity_bytes=granularity, num_slots=num_slots, guard_tokens=AHEAD_TOKENS,
        )  # fmt: skip
        num_pages = -(-num_tokens // block_tokens)
        pieces = num_pages * layout.num_pieces
        self._source: PageSource
        if on_gpu:
            self._source = CudaPages(CudaVmmDriver(device.index or 0), pieces + 1, layout.piece_bytes)
        else:
            self._source = MemfdPages(pieces + 1, layout.piece_bytes)
        self._blocks = self._source.window((num_pages + 1) * layout.num_pieces)
        map_blocks(self._blocks, num_pages, layout.num_pieces, pieces)
        self._window = RequestWindow(self._source, layout, pieces, -(-AHEAD_TOKENS // block_tokens))
        self._table = RequestSlots(num_slots, layout.slot_places)
        self._order = list(range(num_pages))
        random.Random(1).shuffle(self._order)
        self._device = device
        self.blocks = self._tensor(self._blocks.span())
        self._slots = self._tensor(self._window.window.span())
        self._running: list[str] = []
        self.num_mapped = 0

    def _tensor(self, span: Any) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.as_tensor(span, device=self._device).view(self.shape.dtype)
        return torch.frombuffer(span, dtype=self.shape.dtype)

    def fill(self) -> None:
        """Values of ordinary size everywhere."""
        page = self.layout.page_bytes // self.shape.dtype.itemsize
        self.blocks[page:].normal_()

    def place(self, query_lens: list[int], seq_lens: list[int]) -> Batch:
        """Requests in slots; waits until they are mapped."""
        for name in self._running:
            self._table.end(name, 0)
        self._running = []
        at, self._pages = 0, []
        for number, length in enumerate(seq_lens):
            count = -(-(length + AHEAD_TOKENS) // self.block_tokens)
            count = min(count, self.layout.slot_places - -(-AHEAD_TOKENS // self.block_tokens))
            pages = self._order[at : at + count]
            if len(pages) < count:
                raise ValueError(f"{at + count} pages of {len(self._order)}")
            at += count
            name = f"{number}"
            change = self._table.begin(name, pages)
            assert change is not None
            self._window.wait(self._window.submit(change.commands))
            self._running.append(name)
            self._pages.append(pages)
            self.num_mapped += len(pages)
        slots = [self._table.slot_of(name) for name in self._running]
        shape = self.shape
        return Batch(query_lens, seq_lens, shape.num_heads, shape.head_dim, shape.dtype, self._device, slots)

    def write(self, number: int, request: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """One layer of one request, through its blocks."""
        view = self.layout.blocks(number, len(self._order) + 1)
        blocks = self.blocks.as_strided(view.shape, view.strides, view.offset)
        tokens = torch.arange(key.shape[0], device=key.device)
        pages = torch.tensor(self._pages[request], device=key.device) + 1
        where = pages[tokens // self.block_tokens]
        blocks[where, tokens % self.block_tokens] = torch.stack((key, value), dim=1)

    def run(self, kernel: str, batch: Batch) -> Run:
        """Any function of slot_kernels.py."""
        views = [self.layout.slots(i) for i in range(self.shape.num_layers)]
        caches = [self._slots.as_strided(v.shape, v.strides, v.offset) for v in views]
        layers = [(cache[:, :, 0], cache[:, :, 1]) for cache in caches]
        call = batch.slot_call(layers[0][0].shape[1])
        function = slot_kernel(kernel)

        def run(number: int) -> None:
            call.key, call.value = layers[number]
            function(call)

        return run

    def close(self) -> None:
        """Give everything back; no kernel is running."""
        del self.blocks, self._slots
        self._window.close()
        self._blocks.close()
        self._source.close()
