"""A successor's look at every page: what it finds, and that it does not take a step of Python for each."""

import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.services_table import ROWS
from services.mempool.core.page_table import PageTable
from services.mempool.core.space import Plan
from services.mempool.takeover import MAX_EPOCH_LEAD, check_words
from shared.ids import Epoch
from shared.kv.page import PageState, pack_word, unpack_word
from shared.kv.page_table import TableHeader
from tests.unit.mempool_harness import BOOT, DESCRIPTION, Harness

KEPT = (PageState.FREE, PageState.SEALED, PageState.WITHDRAWN, PageState.RELEASED)
MANY = 10_000
PAGES_S = 4_000_000 * 20e-6  # as many as were seen, at twice to four times what one takes, in seconds

words = st.lists(
    st.builds(pack_word, st.integers(1, 1 << 55).map(Epoch), st.sampled_from(PageState)), max_size=60
)


@given(words)
def test_a_table_goes_on_page_by_page_from_an_earlier_mempools_words(found):
    table = PageTable.adopt(found)
    states = [state if state in KEPT else PageState.QUARANTINED for _, state in map(unpack_word, found)]
    assert list(table.states) == states
    assert list(table.epochs) == [word >> 8 for word in found]
    assert table.by_state() == {state.name.lower(): states.count(state) for state in PageState}
    assert table.some_free(len(found))[::-1] == [
        p for p, state in enumerate(states) if state is PageState.FREE
    ]
    gone = {p for p, state in enumerate(states) if state in (PageState.WITHDRAWN, PageState.RELEASED)}
    assert table.reserved == gone
    assert table.take_words() == [
        (page, word >> 8 << 8 | states[page])
        for page, word in enumerate(found)
        if word & 0xFF != states[page]
    ]


@given(words, st.integers(0, 59), st.integers(0, 255), st.sampled_from([0, 1, BOOT, BOOT + MAX_EPOCH_LEAD]))
def test_words_are_refused_for_the_one_page_that_cannot_be(found, at, state, epoch):
    found = [word & 0xFF | BOOT << 8 for word in found]
    header = TableHeader(BOOT, len(found), 4096)
    check_words(header, found)
    if at >= len(found):
        return
    found[at] = epoch << 8 | state
    if state in set(PageState) and 0 < epoch < BOOT + MAX_EPOCH_LEAD:
        check_words(header, found)
    else:
        with pytest.raises(ValueError, match=rf"page {at} |not a valid"):
            check_words(header, found)


def calls_of(work: Callable[[], object]) -> int:
    """Python functions that it enters."""
    num_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("state", [PageState.FREE, PageState.GRANTED, PageState.WRITING, PageState.RELEASED])
def test_adopting_a_space_takes_no_call_for_each_page(state):
    """At 15 us a page 3.67 million of them were the start's whole time, and the supervisor killed each successor."""
    found, planned = [pack_word(BOOT, state)] * MANY, Plan(MANY, 4096, 1, 0)
    new = Harness(MANY, boot=Epoch(BOOT + 1_000))

    def adopt() -> None:
        check_words(TableHeader(BOOT, MANY, 4096), found)
        actions = new.pool.adopt(
            DESCRIPTION, planned, found, b"", memory_id=BOOT, processes=[], engines=[], instances=[]
        )
        assert actions or state in KEPT

    assert calls_of(adopt) < MANY / 10


def test_a_mempools_start_may_last_for_as_long_as_millions_of_pages_take():
    assert ROWS["mempool"].start_timeout_ms >= 1_000 * PAGES_S
