"""Lent pages full of cached blocks: what a running request reads goes there all the same, and the others are kept."""

from services.mempool.core.far_pace import EVERY_MS
from shared.wire.mempool_far import NO_PLACE
from tests.unit.mempool_harness import chain
from tests.unit.test_mempool_far import FarMarket
from tests.unit.test_mempool_far_moves import go_back, in_dram
from tests.unit.test_mempool_lending import ABCD, WXYZ

EFGH = chain("e", "f", "g", "h")
PREFILL_SPACE = 0


def full_of_cached(places: int = 12, dram_pages: int = 12) -> FarMarket:
    """Its loan of four pages, with WXYZ."""
    rig = FarMarket(places=places, dram_pages=dram_pages)
    rig.lend(4)
    rig.leave(WXYZ, "wxyz")
    rig.copied()
    assert len(rig.on_shelf()) == 4
    return rig


def settle(rig: FarMarket, places: list[int]) -> list[int]:
    """Places after a while."""
    for _ in range(8):
        moved = go_back(rig, EVERY_MS)
        places = [moved.get(place, place) for place in places]
    return places


def test_cached_blocks_in_lent_pages_make_way_to_host_memory_for_blocks_that_are_read():
    rig = full_of_cached()
    places = rig.out(1, ABCD, "abcd")
    assert all(in_dram(rig, places))
    assert rig.seen(places) == "abcd"
    places = settle(rig, places)
    assert not any(in_dram(rig, places))
    assert rig.seen(places) == "abcd"
    rig.drop(*places)
    assert rig.read(WXYZ) == "wxyz", "they were kept"


def test_no_more_make_way_than_are_read_in_host_memory():
    rig = full_of_cached()
    places = settle(rig, rig.out(1, ABCD[:1], "a"))
    assert not any(in_dram(rig, places))
    hashes = [entry.block_hash for entry in rig.on_shelf()]
    assert sum(block_hash in WXYZ for block_hash in hashes) == 3


def test_while_blocks_that_are_read_wait_for_lent_pages_no_cached_ones_come_there():
    rig = full_of_cached()
    places = rig.out(1, ABCD, "abcd")
    rig.copied()
    assert rig.on_shelf() == []  # the cached ones have left, and it is not time yet for the others
    rig.leave(EFGH, "efgh")
    rig.copied()
    assert rig.on_shelf() == []
    assert not any(in_dram(rig, settle(rig, places)))


def test_cached_blocks_come_again_when_nothing_is_read_in_host_memory():
    rig = full_of_cached()
    places = settle(rig, rig.out(1, ABCD[:1], "a"))
    for pool in rig.core.pools.values():
        pool.delete([])
    rig.leave(EFGH, "efgh")
    rig.copied()
    assert sum(entry.block_hash in EFGH for entry in rig.on_shelf()) == 3
    assert rig.seen(places) == "a"


def test_with_host_memory_full_of_what_is_read_a_block_takes_the_page_of_a_cached_one_rather_than_none():
    rig = full_of_cached(dram_pages=4)
    first = rig.out(1, ABCD, "abcd")
    second = rig.out(2, EFGH[:3], "efg")
    assert all(in_dram(rig, first))
    assert NO_PLACE not in second
    assert not any(in_dram(rig, second))
    assert rig.seen(first + second) == "abcdefg"


def test_a_loan_full_of_cached_blocks_is_not_asked_for_again():
    rig = full_of_cached()
    rig.out(1, ABCD, "abcd")
    far = rig.core.swaps.far
    assert far.need(PREFILL_SPACE).short == 0, "they are leaving"
    rig.copied()
    assert far.need(PREFILL_SPACE).short == 0
    rig.out(2, EFGH[:2], "ef")
    assert far.need(PREFILL_SPACE).short == 2


def test_who_may_move_nothing_now_looks_again_later_and_not_at_once():
    rig = full_of_cached()
    rig.out(1, ABCD, "abcd")
    rig.copied()
    far = rig.core.swaps.far
    rig.now_ms += EVERY_MS
    assert far.next_deadline_ms() == rig.now_ms
    far.bring_back(rig.now_ms, is_busy=True)
    assert far.next_deadline_ms() == rig.now_ms + EVERY_MS
