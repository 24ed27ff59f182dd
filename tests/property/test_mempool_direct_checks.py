"""The checks of a direct copy, in numpy and in machine code: what they let through, and that both say the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv.page import PageState
from shared.mempool.direct_checks import (
    CHECKS,
    FROMS,
    IS_OWNED,
    IS_PINNED,
    LOOK_ROWS,
    NOT_HELD,
    SOURCE_WORDS,
    TARGET_WORDS,
    TOS,
    native_checks,
)  # fmt: skip
from tests.support.examples import examples

NATIVE = native_checks()
PAGES, EPOCHS = 6, 3  # few, so that they meet
SIZE, BASES = 4096, (1 << 30, 1 << 40)
STATES = [PageState.FREE, PageState.GRANTED, PageState.WRITING, PageState.SEALED, 200]

# of three pages that are held and whose words fit, what is wrong: (what, which of them, value)
flaws = st.lists(
    st.one_of(
        st.tuples(st.just("page"), st.integers(0, 2), st.sampled_from([-7, -1, PAGES, PAGES + 1])),
        st.tuples(st.sampled_from(["owned", "pinned", "epoch"]), st.integers(0, 2), st.integers(0, EPOCHS)),
        st.tuples(st.sampled_from(["pins", "reading", "writing", "mediated"]), st.integers(0, 2), st.integers(-1, 2)),
        st.tuples(st.just("state"), st.integers(0, 2), st.sampled_from(STATES)),
    ),
    max_size=2,
)  # fmt: skip
sides = st.tuples(
    st.permutations(range(PAGES)).map(lambda every: every[:3]),
    st.lists(st.integers(1, EPOCHS), min_size=3, max_size=3),
    flaws,
    st.booleans(),  # pinned
)
ROWS = {"pins": 0, "reading": 1, "writing": 2, "mediated": 3}


def arrays(side, *, state):
    """Of a side: pages, epochs, their columns' epochs and counts, the table's words. `state`: of a good word."""
    named, epochs = np.array(side[0], np.int64), np.array(side[1], np.uint64)
    held, counts = np.zeros((2, PAGES), np.uint64), np.zeros((4, PAGES), np.int32)
    words, states = np.zeros(PAGES, np.uint64), np.full(3, state, np.uint64)
    held[:, named], counts[0, named] = epochs, int(side[3])
    told, pages = epochs.copy(), named.copy()
    for what, which, value in side[2]:
        if what == "page":
            pages[which] = value
        elif what == "epoch":
            told[which] = value
        elif what == "state":
            states[which] = value
        elif what in ROWS:
            counts[ROWS[what], named[which]] = value if what == "pins" else max(0, value)
        else:
            held[int(what == "pinned"), named[which]] = value
    words[named] = epochs << np.uint64(8) | states
    return pages, told, held, counts, words


def expected_hold(source, target) -> int:
    pages, epochs, held, counts, _ = target
    if not all(
        0 <= page < PAGES and held[0][page] == epoch and not counts[1:, page].any()
        for page, epoch in zip(pages.tolist(), epochs.tolist(), strict=True)
    ):
        return NOT_HELD
    pages, epochs, held, counts, _ = source
    if not all(0 <= page < PAGES for page in pages.tolist()):
        return NOT_HELD
    pairs = list(zip(pages.tolist(), epochs.tolist(), strict=True))
    if all(held[1][page] == epoch and counts[0][page] > 0 for page, epoch in pairs):
        return IS_PINNED
    owned = all(held[0][page] == epoch and not counts[2:, page].any() for page, epoch in pairs)
    return IS_OWNED if owned else NOT_HELD


def expected_look(source, target, how) -> bool:
    wanted = [(source, {PageState.SEALED} if how == IS_PINNED else {PageState.GRANTED})]
    wanted.append((target, {PageState.GRANTED, PageState.WRITING}))
    return all(
        0 <= page < PAGES and int(words[page]) in {epoch << 8 | state for state in states}
        for (pages, epochs, _, _, words), states in wanted
        for page, epoch in zip(pages.tolist(), epochs.tolist(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.skipif(NATIVE is None, reason="needs numba")
@settings(max_examples=examples(800), deadline=None)
@given(sides, sides)
def test_only_held_idle_pages_pass_and_numpy_and_machine_code_agree_to_the_last_mark(source, target):
    results = []
    for checks in (CHECKS, NATIVE):
        here = arrays(source, state=PageState.SEALED)
        there = arrays(target, state=PageState.WRITING)
        before = here[3].copy(), there[3].copy()
        want = expected_hold(here, there)
        how = checks.hold(*here[:4], *there[:4])
        assert how == want
        marked = here[3].copy(), there[3].copy()
        if how == NOT_HELD:
            assert all(np.array_equal(*pair) for pair in zip(marked, before, strict=True))
        else:
            assert (here[3] - before[0]).sum() == (there[3] - before[1]).sum() == 3
            checks.leave(here[0], here[3], there[0], there[3])
            assert np.array_equal(here[3], before[0])
            assert np.array_equal(there[3], before[1])
        results.append((how, *(array.tolist() for array in marked)))
    assert results[0] == results[1]


@pytest.mark.skipif(NATIVE is None, reason="needs numba")
@settings(max_examples=examples(800), deadline=None)
@given(sides, sides, st.sampled_from([IS_OWNED, IS_PINNED]))
def test_only_words_of_the_right_epoch_and_state_pass_and_addresses_are_those_of_the_pages(
    source, target, how
):
    here = arrays(source, state=PageState.SEALED if how == IS_PINNED else PageState.GRANTED)
    there = arrays(target, state=PageState.WRITING)
    want = expected_look(here, there, how)
    for checks in (CHECKS, NATIVE):
        found = np.zeros((LOOK_ROWS, 3), np.uint64)
        bases = np.uint64(BASES[0]), np.uint64(BASES[1])
        tables = (here[4], here[0], here[1]), (there[4], there[0], there[1])
        assert checks.look(*tables[0], *tables[1], how, *bases, np.uint64(SIZE), found) == want
        if want:
            assert found[SOURCE_WORDS].tolist() == here[4][here[0]].tolist()
            assert found[TARGET_WORDS].tolist() == there[4][there[0]].tolist()
            assert found[FROMS].tolist() == [BASES[0] + SIZE * page for page in here[0].tolist()]
            assert found[TOS].tolist() == [BASES[1] + SIZE * page for page in there[0].tolist()]
