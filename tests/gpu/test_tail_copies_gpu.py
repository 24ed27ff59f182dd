"""Held last blocks on a GPU: copied right, in stream order, without memory; `-s` prints the time beside vLLM's way."""

import pytest
import torch

from shared.engine.tail_copies import copy_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BLOCK_BYTES = 8 << 20
NUM_COPIES = 150
COPIES = [(number, NUM_COPIES + number) for number in range(NUM_COPIES)]


def in_vllms_way(blocks: torch.Tensor) -> None:
    """copy_kv_cache_blocks_inplace of 0.26.0."""
    sources, destinations = torch.tensor(COPIES, device=blocks.device).unbind(dim=1)
    blocks[destinations] = blocks[sources]


def took_ms(work) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_a_burst_of_held_blocks_is_copied_without_memory():
    torch.cuda.empty_cache()
    window = torch.empty((2 * NUM_COPIES, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    layers = [
        window.view(torch.int16)[:, :1024],
        window.view(torch.int16)[:, 1024:],
    ]  # of one storage, as vLLM has them
    for number in range(NUM_COPIES):
        window[number] = number
    window[NUM_COPIES:] = 255
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    mine_ms = [took_ms(lambda: copy_blocks(BLOCK_BYTES, layers, 2 * NUM_COPIES, COPIES)) for _ in range(3)]
    window[:NUM_COPIES] = 77  # behind the copies in the stream
    found = window[NUM_COPIES:, :: BLOCK_BYTES // 4].cpu()
    assert torch.equal(found[:, 0], torch.arange(NUM_COPIES, dtype=torch.uint8))
    assert bool((found == found[:, :1]).all())
    assert torch.cuda.max_memory_reserved() - before <= 2 << 20
    stock_ms = [took_ms(lambda: in_vllms_way(window)) for _ in range(3)]
    grown = torch.cuda.memory_reserved() - before
    print(f"{NUM_COPIES} blocks of 8 MiB: {mine_ms} ms; vLLM's way {stock_ms} ms and {grown >> 20} MiB more")
