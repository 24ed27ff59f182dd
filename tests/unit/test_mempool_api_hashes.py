"""Remembered hashes are the hashes."""

import random

from shared.kv.block_hash import chain_seed, hash_blocks, hash_tail, pack_tokens
from shared.mempool.api_hashes import CHUNK_BLOCKS, HashMemory

SEEDS = [chain_seed("f", "a"), chain_seed("f", "b")]


def test_hashes_are_those_of_the_tokens_seen_before_or_not():
    rng = random.Random(7)
    memory = HashMemory(4, max_chunks=6)
    prompts = [[rng.randrange(3) for _ in range(4 * CHUNK_BLOCKS * 2 + extra)] for extra in (0, 3, 4, 200)]
    prompts += [prompts[0][:n] for n in (0, 3, 4, 4 * CHUNK_BLOCKS, 4 * CHUNK_BLOCKS + 5)]
    for _ in range(300):
        seed, tokens = rng.choice(SEEDS), rng.choice(prompts)
        raw = pack_tokens(tokens)
        expected = hash_blocks(seed, raw, 4)
        assert memory.hashes(seed, raw) == expected
        if tail := raw[16 * len(expected) :]:
            expected = [*expected, hash_tail(expected[-1] if expected else seed, tail)]
        assert memory.with_tail(seed, raw) == expected
        assert len(memory) <= 6
