"""A request's chain, its tail, and which leased pages it may trust."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.request_kv import RequestKv
from shared.kv.block_hash import chain_seed, hash_blocks, hash_tail, pack_tokens
from shared.kv.layout import num_blocks

SEED = chain_seed("model", "tenant")
BLOCK = 4
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def fresh(prompt):
    return RequestKv(block_tokens=BLOCK, seed=SEED, num_prompt_tokens=len(prompt))


def prompt_hashes(prompt):
    full = len(prompt) // BLOCK * BLOCK
    hashes = hash_blocks(SEED, pack_tokens(prompt[:full]), BLOCK)
    if full < len(prompt):
        hashes.append(hash_tail(hashes[-1] if hashes else SEED, pack_tokens(prompt[full:])))
    return hashes


@given(tokens, st.lists(st.integers(1, 7), max_size=12))
def test_the_chain_does_not_depend_on_how_it_grew(prompt, steps):
    kv = fresh(prompt)
    have = 0
    for step in steps:
        have = min(len(prompt), have + step)
        kv.extend_chain(prompt, have)
    kv.extend_chain(prompt, len(prompt))
    assert kv.chain == hash_blocks(SEED, pack_tokens(prompt), BLOCK)


@given(tokens, st.data())
def test_pages_are_trusted_only_as_far_as_their_hashes_are_the_prompts(prompt, data):
    hashes = prompt_hashes(prompt)
    wrong = data.draw(st.integers(0, len(hashes)))
    said = list(hashes)
    if wrong < len(said):
        said[wrong] = bytes(32)
    kv = fresh(prompt)
    n = len(said)
    kv.offer(list(range(n)), list(range(100, 100 + n)), b"".join(said), len(prompt), prompt)
    if wrong == 0:
        assert kv.loadable is None
        return
    assert kv.loadable is not None
    assert kv.loadable.hashes == hashes[:wrong]
    assert kv.loadable.valid_tokens == min(len(prompt), wrong * BLOCK)


@given(tokens, st.integers(0, 12))
def test_a_lost_page_ends_what_can_be_loaded(prompt, still_sealed):
    hashes = prompt_hashes(prompt)
    kv = fresh(prompt)
    n = len(hashes)
    kv.offer(list(range(n)), list(range(n)), b"".join(hashes), len(prompt), prompt)
    still = min(still_sealed, n)
    got = kv.num_loadable_tokens(still)
    assert got == min(len(prompt), still * BLOCK)
    assert num_blocks(got, BLOCK) <= still


def test_a_prompt_of_whole_blocks_has_no_tail():
    kv = fresh([1, 2, 3, 4])
    assert kv.tail_hash([1, 2, 3, 4]) is None


def test_a_tail_never_equals_a_full_block_of_the_same_tokens():
    full = hash_blocks(SEED, pack_tokens([1, 2, 3, 4]), 4)[0]
    assert hash_tail(SEED, pack_tokens([1, 2, 3, 4])) != full


@pytest.mark.parametrize(("left", "right"), [(("a", "bc"), ("ab", "c")), (("", "x"), ("x", ""))])
def test_fingerprint_and_salt_cannot_run_together(left, right):
    assert chain_seed(*left) != chain_seed(*right)
