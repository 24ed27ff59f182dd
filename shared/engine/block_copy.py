"""Copies between vLLM's KV cache tensors and page buffers.

A page holds one block as [num_layers, elements per layer and block], each layer's bytes exactly as the
attention backend laid them out (CPU caches are packed per instruction set, so nothing is re-interpreted).
"""

import re
from collections.abc import Sequence

import torch

PageBuffer = memoryview  # writable, block_bytes long


def _layer_number(name: str) -> int:
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if numbers else -1


class BlockCopier:
    """Reads and writes whole blocks of one rank's KV cache.

    Args: kv_caches: layer name -> tensor with blocks as dimension 0, each block contiguous in some order.
    Raises: ValueError on tensors of unequal block count or with non-contiguous blocks.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = sorted(kv_caches, key=lambda name: (_layer_number(name), name))
        seen: set[int] = set()
        self.layers: list[torch.Tensor] = []
        for name in names:
            tensor = kv_caches[name]
            if tensor.data_ptr() in seen:  # layers that share one cache
                continue
            seen.add(tensor.data_ptr())
            stored = _in_storage_order(tensor)
            if not stored[0].is_contiguous():
                raise ValueError(f"{name}: blocks of shape {tuple(tensor.shape)} are not contiguous")
            self.layers.append(stored)
        counts = {t.shape[0] for t in self.layers}
        if len(counts) != 1:
            raise ValueError(f"layers disagree on the number of blocks: {sorted(counts)}")
        self.device = self.layers[0].device
        self.layer_bytes = [t[0].numel() * t.element_size() for t in self.layers]
        self.block_bytes = sum(self.layer_bytes)

    def save(self, blocks: Sequence[int], pages: Sequence[PageBuffer]) -> None:
        """Cache blocks -> pages, in order. Returns when the bytes are in the pages.

        Cost: moves len(blocks) * block_bytes; on CUDA one gather per layer and one copy to the host.
        """
        if not blocks:
            return
        if self.device.type == "cpu":
            for block, page in zip(blocks, pages, strict=True):
                for view, tensor in zip(self._views(page), self.layers, strict=True):
                    view.copy_(_as_bytes(tensor[block]))
            return
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        staged = torch.cat([_rows(t.index_select(0, index)) for t in self.layers], dim=1).cpu()
        for row, page in zip(staged, pages, strict=True):
            torch.frombuffer(page, dtype=torch.uint8)[: self.block_bytes].copy_(row)

    def load_one(self, page: PageBuffer, block: int) -> None:
        """Page -> cache block on the CPU."""
        for view, tensor in zip(self._views(page), self.layers, strict=True):
            _as_bytes(tensor[block]).copy_(view)

    def stage(self, pages: Sequence[PageBuffer]) -> torch.Tensor:
        """Pages -> host tensor uint8 [num_pages, block_bytes], new storage (CUDA path, before upload)."""
        out = torch.empty((len(pages), self.block_bytes), dtype=torch.uint8, pin_memory=True)
        for row, page in zip(out, pages, strict=True):
            row.copy_(torch.frombuffer(page, dtype=torch.uint8)[: self.block_bytes])
        return out

    def upload(self, staged: torch.Tensor, blocks: Sequence[int]) -> None:
        """Host tensor from stage() -> cache blocks. Returns when the device has the bytes."""
        rows = staged.to(self.device, non_blocking=True)
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        start = 0
        for tensor, length in zip(self.layers, self.layer_bytes, strict=True):
            part = rows[:, start : start + length].contiguous().view(tensor.dtype)
            tensor.index_copy_(0, index, part.view(len(blocks), *tensor.shape[1:]))
            start += length
        torch.cuda.current_stream(self.device).synchronize()

    def _views(self, page: PageBuffer) -> list[torch.Tensor]:
        whole = torch.frombuffer(page, dtype=torch.uint8)
        return list(torch.split(whole[: self.block_bytes], self.layer_bytes))


def _in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same cache with each block's dimensions as they lie in memory (backends present permuted views)."""
    order = sorted(range(1, tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(0, *order)


def _as_bytes(block: torch.Tensor) -> torch.Tensor:
    return block.reshape(-1).view(torch.uint8)


def _rows(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.reshape(blocks.shape[0], -1).view(torch.uint8)
