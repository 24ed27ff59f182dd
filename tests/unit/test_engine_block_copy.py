"""A block that goes to a page and back is the same block, whatever the cache's layout."""

import pytest
import torch

from shared.engine.block_copy import BlockCopier

SHAPE = (6, 2, 8, 16)  # blocks, kv heads, tokens, 2 * head dim
LAYOUTS = {"heads-first": (0, 1, 2, 3), "tokens-first": (0, 2, 1, 3)}


def make_caches(order, num_layers=3):
    """Logical shape SHAPE over memory in another order, as attention backends present it."""
    torch.manual_seed(1)
    out = {}
    for layer in range(num_layers):
        stored = torch.randn([SHAPE[dim] for dim in order])
        inverse = [order.index(dim) for dim in range(4)]
        out[f"model.layers.{layer}.self_attn.attn"] = stored.permute(*inverse)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_survives_the_round_trip_through_a_page(layout):
    caches = make_caches(LAYOUTS[layout])
    before = {name: cache.clone() for name, cache in caches.items()}
    copier = BlockCopier(caches)
    pages = [memoryview(bytearray(copier.block_bytes)) for _ in range(2)]
    copier.save([4, 1], pages)
    for cache in caches.values():
        cache[[4, 1, 2, 3]] = 0
    copier.load_one(pages[0], 2)
    copier.load_one(pages[1], 3)
    for name, cache in caches.items():
        assert torch.equal(cache[2], before[name][4])
        assert torch.equal(cache[3], before[name][1])
        assert torch.equal(cache[0], before[name][0])
        assert torch.equal(cache[5], before[name][5])


def test_layers_go_in_numeric_order():
    caches = make_caches(LAYOUTS["heads-first"], num_layers=11)
    shuffled = dict(sorted(caches.items()))  # "10" before "2"
    a, b = BlockCopier(caches), BlockCopier(shuffled)
    page_a, page_b = memoryview(bytearray(a.block_bytes)), memoryview(bytearray(b.block_bytes))
    a.save([0], [page_a])
    b.save([0], [page_b])
    assert page_a == page_b


def test_layers_that_share_a_cache_are_copied_once():
    caches = make_caches(LAYOUTS["heads-first"], num_layers=1)
    tensor = next(iter(caches.values()))
    caches["model.layers.1.self_attn.attn"] = tensor
    assert BlockCopier(caches).block_bytes == tensor[0].numel() * tensor.element_size()


def test_a_cache_whose_blocks_are_scattered_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        BlockCopier({"model.layers.0": torch.zeros(4, 2, 8, 32)[..., ::2]})
