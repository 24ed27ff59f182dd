"""The page state machine is one table, and everything else agrees with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.mempool.core.page_state import TABLE, WRITER, PageEvent, diagram, next_state
from services.mempool.core.page_table import PageTable
from shared.errors import InvariantBroken
from shared.ids import Epoch, PageId
from shared.kv.page import PageState, pack_word

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "mempool.md"
CALLERS = [f"tests/unit/test_mempool_{name}.py" for name in ("pool", "lending", "releases", "inheritance")]
LEGAL = {(row.state, row.event): row.target for row in TABLE}


@pytest.mark.parametrize("state", PageState)
@pytest.mark.parametrize("event", PageEvent)
def test_every_pair_follows_the_table_or_is_our_bug(state, event):
    if (state, event) in LEGAL:
        assert next_state(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(InvariantBroken):
            next_state(state, event)


def test_readme_shows_the_table_of_the_code():
    assert DOCUMENT.read_text().endswith(diagram())


def test_only_one_state_lets_an_engine_write_and_only_the_way_through_retiring_frees():
    assert [s for s, who in WRITER.items() if who.startswith("the engine")] == [PageState.WRITING]
    assert {row.state for row in TABLE if row.target is PageState.FREE} == {PageState.RETIRING}
    assert {row.target for row in TABLE if row.state is PageState.FREE} == {
        PageState.GRANTED,
        PageState.LEASED,
        PageState.WITHDRAWN,
    }


def test_every_state_can_be_reached_and_left():
    assert {row.target for row in TABLE} == set(PageState) == {row.state for row in TABLE} == set(WRITER)


@pytest.mark.slow
def test_every_row_of_the_table_is_taken_by_what_engines_markets_and_successors_ask():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.taken_rows",
        "-n",
        "0",
    ]
    done = subprocess.run(
        [*command, *CALLERS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "rows never taken: none" in done.stdout, done.stdout[-3000:]


def test_the_numbers_of_states_are_those_that_an_earlier_mempool_wrote():
    numbers = {state.name: int(state) for state in PageState}
    assert numbers["WITHDRAWN"] == 8
    assert numbers["RELEASED"] == 9
    assert 7 not in numbers.values()
    table = PageTable.adopt([pack_word(Epoch(5), state) for state in PageState])
    assert sum(table.counts) == len(PageState)


def test_epoch_grows_when_a_page_becomes_free_and_words_come_in_order():
    table = PageTable(2, Epoch(100))
    assert table.take_words() == [(0, pack_word(Epoch(100), PageState.FREE)), (1, 100 << 8)]
    page, epoch = table.grant() or pytest.fail("a free page is granted")
    table.apply(page, PageEvent.WRITE)
    table.apply(page, PageEvent.SEAL)
    table.free(page, PageEvent.RETIRE)
    states = [PageState.GRANTED, PageState.WRITING, PageState.SEALED, PageState.RETIRING]
    expected = [(page, pack_word(epoch, state)) for state in states]
    assert table.take_words() == [*expected, (page, pack_word(Epoch(epoch + 1), PageState.FREE))]
    assert table.take_words() == []


def test_counts_by_state_sum_to_the_total():
    table = PageTable(3, Epoch(1))
    table.grant()
    table.grant()
    assert table.by_state()["granted"] == 2
    assert sum(table.by_state().values()) == 3
    assert table.num_free == 1


def test_full_table_grants_nothing_and_freed_pages_are_reused_first():
    table = PageTable(3, Epoch(1))
    first, _ = table.grant() or pytest.fail("free")
    table.free(first, PageEvent.GIVE_BACK)
    assert table.grant() == (first, 2)
    assert table.grant() is not None
    assert table.grant() is not None
    assert table.grant() is None


def test_pages_that_memory_may_back_are_handed_over_once_and_stay_free():
    table = PageTable(2, Epoch(1))
    page, _ = table.grant() or pytest.fail("free")
    assert not table.has_warm
    table.free(page, PageEvent.GIVE_BACK)
    assert table.take_warm() == [PageId(page)]
    assert not table.has_warm
    assert table.num_free == 2


def test_many_pages_at_once_are_what_they_are_one_by_one():
    one, many = PageTable(8, Epoch(3)), PageTable(8, Epoch(3))
    for table in (one, many):
        for page in [table.grant() for _ in range(3)]:
            table.free(page[0], PageEvent.GIVE_BACK)  # three warm pages, five cold ones
        table.take_words()
    granted = [one.grant() for _ in range(5)]
    assert list(zip(*many.grant_many(5), strict=True)) == granted
    for page, _ in granted:
        one.apply(page, PageEvent.WRITE)
    many.apply_all([page for page, _ in granted], PageEvent.WRITE)
    assert many.take_words() == one.take_words()
    assert (many.counts, many.states, many.num_free) == (one.counts, one.states, one.num_free)
    assert [len(part) for part in many.grant_many(9)] == [3, 3]
    assert many.grant_many(1) == ([], [])


def test_pages_in_several_states_are_not_taken_one_step_further_at_once():
    table = PageTable(2, Epoch(1))
    first, _ = table.grant()
    with pytest.raises(InvariantBroken):
        table.apply_all([first, PageId(1 - first)], PageEvent.WRITE)
    assert table.state(first) is PageState.GRANTED
