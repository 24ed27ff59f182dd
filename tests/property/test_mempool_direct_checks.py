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

NATIVE = native_checks()
PAGES, EPOCHS = 6, 3  # few, so that they meet
SIZE, BASES = 4096, (1 << 30, 1 << 40)
STATES = [PageState.FREE, PageState.GRANTED, PageState.WRITING, PageState.SEALED, 200]

few = st.integers(-1, PAGES)  # at the edges, no page at all
sides = st.fixed_dictionaries(
    {
        "pages": st.lists(few, min_size=3, max_size=3, unique=True),
        "epochs": st.lists(st.integers(1, EPOCHS), min_size=3, max_size=3),
        "columns": st.lists(
            st.tuples(
                *[st.integers(0, EPOCHS)] * 2, st.integers(-1, 1), *[st.sampled_from([0, 0, 0, 1])] * 3
            ),
            min_size=PAGES,
            max_size=PAGES,
        ),
        "words": st.lists(
            st.tuples(st.integers(0, EPOCHS), st.sampled_from(STATES)), min_size=PAGES, max_size=PAGES
        ),
        "kind": st.sampled_from(["any", "good", "good"]),
    }
)


def arrays(side, *, is_source):
    """Of a side; a "good" one is held and its words fit, most of the time."""
    pages, epochs = np.array(side["pages"], np.int64), np.array(side["epochs"], np.uint64)
    columns = np.array(side["columns"]).T
    held, counts = columns[:2].astype(np.uint64), columns[2:].astype(np.int32)
    words = np.array([epoch << 8 | state for epoch, state in side["words"]], np.uint64)
    if side["kind"] == "good":
        inside = (pages >= 0) & (pages < PAGES)
        held[:, pages[inside]] = epochs[inside]
        counts[:, pages[inside]] = np.array([[1], [0], [0], [0]])
        state = PageState.SEALED if is_source else PageState.WRITING
        words[pages[inside]] = epochs[inside] << np.uint64(8) | np.uint64(state)
    return pages, epochs, np.ascontiguousarray(held), np.ascontiguousarray(counts), words


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


@pytest.mark.skipif(NATIVE is None, reason="needs numba")
@settings(max_examples=600, deadline=None)
@given(sides, sides)
def test_only_held_idle_pages_pass_and_numpy_and_machine_code_agree_to_the_last_mark(source, target):
    results = []
    for checks in (CHECKS, NATIVE):
        here, there = arrays(source, is_source=True), arrays(target, is_source=False)
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
@settings(max_examples=600, deadline=None)
@given(sides, sides, st.sampled_from([IS_OWNED, IS_PINNED]))
def test_only_words_of_the_right_epoch_and_state_pass_and_addresses_are_those_of_the_pages(
    source, target, how
):
    here, there = arrays(source, is_source=True), arrays(target, is_source=False)
    if how == IS_OWNED:
        here[4][:] ^= np.uint64(PageState.SEALED ^ PageState.GRANTED)
    want = expected_look(here, there, how)
    for checks in (CHECKS, NATIVE):
        found = np.zeros((LOOK_ROWS, 3), np.uint64)
        bases = np.uint64(BASES[0]), np.uint64(BASES[1])
        tables = (here[4], here[0], here[1]), (there[4], there[0], there[1])
        assert checks.look(*tables[0], *tables[1], how, *bases, np.uint64(SIZE), found) == want
        if want:
            assert found[SOURCE_WORDS].tolist() == here[4][here[0]].tolist()
            assert found[TARGET_WORDS].tolist() == there[4][there[0]].tolist()
            assert found[FROMS].tolist() == [BASES[0] + SIZE * page for page in source["pages"]]
            assert found[TOS].tolist() == [BASES[1] + SIZE * page for page in target["pages"]]
