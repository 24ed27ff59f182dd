"""Prompts that all end in blocks that one engine only caches: another engine gets pages all the same."""

import pytest

from services.mempool.core.supply import ASK_AGAIN_MS
from shared.kv.page import STOCK_PART
from shared.wire import mempool as wire
from tests.unit.mempool_harness import Harness, chain, page_lists

DECODE, PREFILL = 1, 2


def full() -> tuple[Harness, list]:
    """16 pages: three prompts of four blocks, of which decode still has each last one, and its stock of four.

    Returns: the harness, and these last ones.
    """
    rig = Harness(16)
    rig.engine(DECODE, quota=7, works_in_pages=True)
    ends = []
    for name in "abc":
        hashes = chain(*(f"{name}{number}" for number in range(4)))
        pages = rig.save(DECODE, hashes)
        rig.say(DECODE, wire.Unpin(**page_lists(pages[:3])))
        ends.append(pages[3])
    assert rig.pool.status().pages_by_state["free"] == 0
    return rig, ends


def asked(rig: Harness) -> list[int]:
    return [m.count for m in rig.sent[DECODE] if isinstance(m, wire.Shrink) and m.cached]


def test_who_lacks_pages_that_cached_ends_of_prompts_hold_up_has_them_let_go():
    rig, ends = full()
    assert asked(rig) == []
    rig.engine(PREFILL, quota=7, works_in_pages=True)
    assert rig.granted[PREFILL] == []
    assert len(asked(rig)) == 1
    rig.say(DECODE, wire.Unpin(**page_lists(ends)))
    assert len(rig.granted[PREFILL]) == 16 // STOCK_PART + 1, "a stock to begin with"
    assert rig.pool.ask_again_at_ms() is None


def test_one_prompts_end_is_enough_for_its_pages():
    rig, ends = full()
    rig.engine(PREFILL, quota=3, works_in_pages=True)
    rig.say(DECODE, wire.Unpin(**page_lists(ends[:1])))
    assert len(rig.granted[PREFILL]) == 3
    assert len(asked(rig)) == 1


def test_blocks_that_requests_use_now_are_asked_for_again_later_and_not_with_every_event():
    rig, ends = full()
    rig.engine(PREFILL, quota=7, works_in_pages=True)
    for _ in range(5):
        rig.say(PREFILL, wire.NeedPages(count=1))
    assert len(asked(rig)) == 1
    assert rig.pool.next_deadline_ms() == rig.now_ms + ASK_AGAIN_MS
    rig.advance(ASK_AGAIN_MS - 1)
    assert len(asked(rig)) == 1
    rig.advance(1)
    assert len(asked(rig)) == 2
    rig.say(DECODE, wire.Unpin(**page_lists(ends)))
    rig.advance(10 * ASK_AGAIN_MS)
    assert len(asked(rig)) == 2


@pytest.mark.parametrize("num_unpinned", [1, 3])
def test_nobody_is_asked_while_the_end_of_a_prompt_can_go(num_unpinned):
    rig, ends = full()
    rig.say(DECODE, wire.Unpin(**page_lists(ends[:num_unpinned])))
    rig.engine(PREFILL, quota=3, works_in_pages=True)
    assert len(rig.granted[PREFILL]) == 3
    assert asked(rig) == []


def test_who_lacks_pages_may_have_most_blocks_itself_and_the_other_is_asked_all_the_same():
    rig = Harness(16)
    rig.engine(DECODE, quota=7, works_in_pages=True)
    rig.engine(PREFILL, quota=7, works_in_pages=True)
    (end,) = rig.save(DECODE, chain("a"))
    for name in ("b", "c"):  # which a request of its own still uses
        rig.save(PREFILL, chain(*(f"{name}{number}" for number in range(3))))
    rig.engine(3, quota=7, works_in_pages=True)
    rig.write(3, rig.take(3, len(rig.granted[3])))
    rig.say(3, wire.NeedPages(count=7))
    rig.advance(ASK_AGAIN_MS)
    assert len(asked(rig)) == 1
    rig.say(DECODE, wire.Unpin(**page_lists([end])))
    assert asked(rig) == [1]


def test_an_engine_that_has_all_the_pages_is_not_asked_for_what_it_caches_itself():
    rig = Harness(8)
    rig.engine(DECODE, quota=8, works_in_pages=True)
    ends = []
    for name in "ab":
        pages = rig.save(DECODE, chain(f"{name}0", f"{name}1", f"{name}2"))
        rig.say(DECODE, wire.Unpin(**page_lists(pages[:2])))
        ends.append(pages[2])
    rig.write(DECODE, rig.take(DECODE, len(rig.granted[DECODE])))
    rig.say(DECODE, wire.NeedPages(count=8))
    rig.advance(10 * ASK_AGAIN_MS)
    assert rig.pool.status().pages_by_state["free"] == 0
    assert asked(rig) == []


def test_cached_blocks_stay_while_the_others_have_pages_in_stock():
    rig, ends = full()
    rig.engine(PREFILL, quota=7, works_in_pages=True)
    rig.say(DECODE, wire.Unpin(**page_lists(ends[:1])))
    assert rig.granted[PREFILL]
    num_asked = len(asked(rig))
    rig.advance(10 * ASK_AGAIN_MS)
    assert len(asked(rig)) == num_asked
