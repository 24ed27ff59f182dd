"""The engine core takes its front's hashes over, and only those of the tokens that it has."""

import random
from types import SimpleNamespace

import pytest

from shared.engine import block_hasher
from shared.engine.block_hasher import LONG_BLOCKS, quire_block_hasher
from shared.kv.block_hash import chain_digest, chain_seed, hash_blocks, hash_tail, pack_tokens

BLOCK_TOKENS = 4
SEED = chain_seed("model", "tenant")
TOKENS = random.Random(1).choices(range(9_000), k=(LONG_BLOCKS + 20) * BLOCK_TOKENS + 3)
CHAIN = hash_blocks(SEED, pack_tokens(TOKENS), BLOCK_TOKENS)


class Hashed:
    """How many blocks the engine hashed by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_blocks = 0
        monkeypatch.setattr(block_hasher, "hash_blocks", self)

    def __call__(self, seed, tokens, block_tokens):
        self.num_blocks += len(tokens) // (4 * block_tokens)
        return hash_blocks(seed, tokens, block_tokens)


def request(tokens=TOKENS, *, num_prompt_tokens=0, block_hashes=(), **params):
    digest = chain_digest(pack_tokens(TOKENS[: len(tokens)]), params.get("hashes", b""))
    extra = {"quire": {"seed": SEED, "digest": digest, **params}}
    return SimpleNamespace(
        prompt_token_ids=list(tokens[: num_prompt_tokens or len(tokens)]),
        request_id="r", all_token_ids=list(tokens), num_tokens=len(tokens), block_hashes=list(block_hashes),
        num_prompt_tokens=num_prompt_tokens or len(tokens), sampling_params=SimpleNamespace(extra_args=extra),
    )  # fmt: skip


@pytest.fixture
def hashed(monkeypatch):
    return Hashed(monkeypatch)


new_hashes = quire_block_hasher(BLOCK_TOKENS, None)


def test_a_long_prompts_hashes_come_from_its_front_and_the_rest_is_hashed_here(hashed):
    assert new_hashes(request(hashes=b"".join(CHAIN[:-5]))) == CHAIN
    assert hashed.num_blocks == 5 + 1  # its first one, for the tenant's seed


def test_a_short_prompt_is_hashed_whole(hashed):
    short = TOKENS[: 10 * BLOCK_TOKENS]
    assert new_hashes(request(short, hashes=b"".join(CHAIN[:10]))) == CHAIN[:10]
    assert hashed.num_blocks == 10


@pytest.mark.parametrize("changed", [0, 17, len(CHAIN) - 1])
def test_hashes_of_another_prompt_are_not_taken(changed):
    others = list(TOKENS)
    others[changed * BLOCK_TOKENS] += 1
    theirs = hash_blocks(SEED, pack_tokens(others), BLOCK_TOKENS)
    assert new_hashes(request(others, hashes=b"".join(CHAIN))) == theirs


def test_hashes_that_are_not_what_the_front_took_are_not_taken():
    digest = chain_digest(pack_tokens(TOKENS), b"".join(CHAIN))
    changed = [*CHAIN[:9], CHAIN[8], *CHAIN[10:]]
    assert new_hashes(request(hashes=b"".join(changed), digest=digest)) == CHAIN


def test_hashes_under_another_tenants_seed_are_not_taken():
    theirs = hash_blocks(chain_seed("model", "other"), pack_tokens(TOKENS), BLOCK_TOKENS)
    assert new_hashes(request(hashes=b"".join(theirs))) == CHAIN


def test_the_hash_of_a_part_of_a_block_is_none_of_a_whole_one():
    handed = len(CHAIN) * BLOCK_TOKENS - 2  # in the middle of the last block
    tail = hash_tail(CHAIN[-2], pack_tokens(TOKENS[(len(CHAIN) - 1) * BLOCK_TOKENS : handed]))
    given = b"".join([*CHAIN[:-1], tail])
    assert new_hashes(request(hashes=given, handed_tokens=handed)) == CHAIN


def test_blocks_of_the_answer_are_hashed_as_they_fill(hashed):
    assert new_hashes(request(block_hashes=CHAIN[:-1], hashes=b"".join(CHAIN))) == CHAIN[-1:]
    assert hashed.num_blocks == 1
