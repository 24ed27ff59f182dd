"""Held last blocks are copied as vLLM copies blocks, without memory besides the cache.

Real engines copy this way in every test whose prompts end in held blocks (tests/integration/test_exactness*.py).
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.engine import tail_copies

BLOCKS, LAYERS, LAYER_BYTES = 9, 3, 40
BLOCK_BYTES = LAYERS * LAYER_BYTES
FAR_BYTES = 70  # behind the blocks: addresses of far places, no multiple of anything
COPIES = [(2, 7), (4, 1), (2, 8)]


def packed_layers(behind=0):
    """One window, each block's layers behind one another, as page_worker.py lays them out; half floats."""
    window = torch.randint(0, 255, (BLOCKS * BLOCK_BYTES + behind,), dtype=torch.uint8).view(torch.int16)
    items = LAYER_BYTES // 2
    return [window.as_strided((BLOCKS, items), (LAYERS * items, 1), layer * items) for layer in range(LAYERS)]


def separate_layers():
    """A storage a layer, and one that two layers share."""
    first, second = (torch.randn(BLOCKS, 3, 10) for _ in range(2))
    return [first, [second, second.view(BLOCKS, 30)]]


def in_vllms_way(caches):
    """copy_kv_cache_blocks_inplace of 0.26.0, as short as it can be said."""
    for tensor in {t.untyped_storage().data_ptr(): t for t in tree_leaves(caches)}.values():
        blocks = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).view(BLOCKS, -1)
        sources, destinations = torch.tensor(COPIES).unbind(dim=1)
        blocks[destinations] = blocks[sources]


def stored(caches):
    """All bytes."""
    flat = tree_leaves(caches)
    return [bytes(tensor.untyped_storage()) for tensor in flat]


class Allocations(TorchDispatchMode):
    """Bytes that operators under it return in storages of their own."""

    def __init__(self, caches):
        self.known = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(caches)}
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.num_bytes += tensor.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("make", [packed_layers, separate_layers])
def test_blocks_are_copied_as_vllm_copies_them(make):
    torch.manual_seed(3)
    caches = make()
    before = stored(caches)
    tail_copies.copy_blocks(BLOCK_BYTES, caches, BLOCKS, COPIES)
    mine = stored(caches)
    assert mine != before
    torch.manual_seed(3)
    caches = make()
    assert stored(caches) == before
    in_vllms_way(caches)
    assert mine == stored(caches)


def test_what_lies_behind_the_blocks_of_a_window_is_left_alone():
    torch.manual_seed(3)
    plain = packed_layers()
    in_vllms_way(plain)
    torch.manual_seed(3)
    caches = packed_layers(FAR_BYTES)
    behind = stored(caches)[0][-FAR_BYTES:]
    tail_copies.copy_blocks(BLOCK_BYTES, caches, BLOCKS + 7, COPIES)  # vLLM counts far places, too
    assert stored(caches)[0] == stored(plain)[0] + behind


def test_a_copy_takes_no_memory_where_vllms_takes_the_blocks_again():
    caches = packed_layers()
    with Allocations(caches) as mine:
        tail_copies.copy_blocks(BLOCK_BYTES, caches, BLOCKS, COPIES)
    assert mine.num_bytes == 0
    with Allocations(caches) as stock:
        in_vllms_way(caches)
    assert stock.num_bytes >= len(COPIES) * LAYERS * LAYER_BYTES


def test_a_step_without_copies_looks_at_nothing():
    tail_copies.copy_blocks(BLOCK_BYTES, iter([SimpleNamespace()]), BLOCKS, [])


def test_a_runner_copies_this_way_whichever_of_its_classes_modules_has_vllms_function(monkeypatch):
    module = ModuleType("runner_of_a_test")
    module.copy_kv_cache_blocks_inplace = in_vllms_way
    monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = type("Runner", (), {"__module__": module.__name__})
    tail_copies.copy_one_by_one(type("OurRunner", (runner,), {"__module__": __name__})(), BLOCK_BYTES)
    caches = packed_layers()
    before = stored(caches)[0]
    module.copy_kv_cache_blocks_inplace(caches, BLOCKS, [(0, 8)])
    assert stored(caches)[0] == before[: 8 * BLOCK_BYTES] + before[:BLOCK_BYTES]


def test_a_runner_without_vllms_function_is_refused():
    with pytest.raises(AttributeError, match="copy_kv_cache_blocks_inplace"):
        tail_copies.copy_one_by_one(SimpleNamespace(), BLOCK_BYTES)
