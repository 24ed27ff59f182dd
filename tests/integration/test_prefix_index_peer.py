"""vLLM's prefix cache, as bench_prefix_index measures it, answers as the mempool's index does."""

from random import Random

import pytest

from loadtest import bench_prefix_index as bench


@pytest.mark.engine
def test_both_caches_find_the_same_blocks():
    measured = pytest.importorskip("shared.engine.measured_prefix")
    rng = Random(3)
    caches = [bench.RadixCache(400, 16), measured.VllmPrefixCache(400, 16)]
    tokens = [rng.randrange(1000) for _ in range(320)]
    for cache in caches:
        bench.fill(cache, 100, rng)
        whole, half = cache.prompt(tokens), cache.prompt(tokens[:160] + [1] * 160)
        for prompt in (whole, half):
            cache.hash(prompt)
        blocks = cache.blocks(whole)
        cache.insert(whole, blocks)
        assert (cache.match(whole), cache.match(half), len(cache)) == (20, 10, 120)
        cache.forget(whole, blocks)
        assert (cache.match(whole), len(cache)) == (0, 100)
