"""What a gateway remembers of prompts: never more than it was asked, all of it while the table has room."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.prompttree.asked_before import AskedBefore
from tests.unit.mempool_harness import chain

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=40)


def reference(seen, hashes):
    return next((n for n, each in enumerate(hashes) if each not in seen), len(hashes))


@given(PROMPTS)
def test_with_room_it_knows_exactly_the_leading_blocks_that_were_asked_for(prompts):
    memory, seen = AskedBefore(1 << 16), set()
    chains = [chain(*prompt) for prompt in prompts]
    distinct = {each for hashes in chains for each in hashes}
    assume(len({each[-2:] for each in distinct}) == len(distinct))  # each has its own place
    for hashes in chains:
        assert memory.ask(hashes) == reference(seen, hashes)
        seen.update(hashes)


@given(PROMPTS, st.sampled_from([1, 2, 8, 32]))
def test_without_room_it_forgets_but_never_claims_more(prompts, most_blocks):
    memory, seen = AskedBefore(most_blocks), set()
    for prompt in prompts:
        hashes = chain(*prompt)
        assert memory.ask(hashes) <= reference(seen, hashes)
        seen.update(hashes)


def test_names_that_only_count_have_places_of_their_own():
    memory = AskedBefore(64)
    prompts = [[(prompt * 4 + block).to_bytes(16, "big") for block in range(4)] for prompt in range(16)]
    assert [memory.ask(each) for each in prompts] == [0] * 16
    assert [memory.ask(each) for each in prompts] == [4] * 16


def test_a_hash_of_zeros_is_not_taken_for_an_empty_place():
    memory = AskedBefore(4)
    assert memory.ask([bytes(32)]) == 0
    assert memory.ask([bytes(32)]) == 1


@pytest.mark.parametrize("most_blocks", [0, -1, 3, 100])
def test_a_size_that_is_no_power_of_two_is_refused(most_blocks):
    with pytest.raises(ValueError, match="power of two"):
        AskedBefore(most_blocks)
