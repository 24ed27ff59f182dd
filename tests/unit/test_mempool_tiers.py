"""Blocks leave HBM in time, come back when asked, and move no byte that need not move."""

import pytest

from services.mempool.core.own_pages import OwnPages
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from services.mempool.core.tiers import CopyPages, CopyResult, SwapDone, TierLimits, Tiers
from shared.errors import InvariantBroken, Overloaded
from shared.ids import Epoch, SpaceId
from tests.unit.mempool_harness import SEED, chain

FAST, SLOW = SpaceId(1), SpaceId(2)
NEVER = TierLimits(begin_free_ratio=0, end_free_ratio=0)


class Rig:
    """Two tiers whose copies end when end() is called."""

    def __init__(self, num_fast: int, num_slow: int, limits: TierLimits = NEVER) -> None:
        self.fast = OwnPages(FAST, PageTable(num_fast, Epoch(5)), Index())
        self.slow = OwnPages(SLOW, PageTable(num_slow, Epoch(5)), Index())
        self.tiers = Tiers(self.fast, self.slow, limits)
        self.copies: list[CopyPages] = []
        self.done: list[SwapDone] = []
        self.now_ms = 1_000

    def seal(self, *names: object, space: OwnPages | None = None):
        """A prompt's blocks, in fast pages."""
        space = space or self.fast
        hashes = chain(*names)
        pages, _ = space.take(len(hashes) - len(space.index.prefix(hashes)))
        known = len(hashes) - len(pages)
        parent = hashes[known - 1] if known else SEED
        space.seal(space.index.insert_path(parent, hashes[known:], pages, 16))
        return hashes

    def perform(self, actions) -> None:
        self.copies += [action for action in actions if isinstance(action, CopyPages)]
        self.done += [action for action in actions if isinstance(action, SwapDone)]

    def tick(self) -> None:
        self.perform(self.tiers.tick(self.now_ms))

    def end(self, **result) -> None:
        """Every copy that is under way, and those that begin then."""
        while self.copies:
            copy = self.copies.pop(0)
            self.perform(self.tiers.on_copied(copy.copy_id, CopyResult(**result), self.now_ms))

    def out(self, count: int) -> None:
        self.perform(self.tiers.swap_out(count, self.now_ms)[1])

    def bring(self, hashes) -> None:
        entries = [self.slow.index.get(h) for h in hashes]
        self.perform(self.tiers.swap_in(entries, self.now_ms)[1])


def test_swap_out_moves_the_coldest_leaves_and_frees_their_pages():
    rig = Rig(8, 8)
    cold, warm = rig.seal("c1", "c2", "c3"), rig.seal("w1", "w2")
    rig.out(2)
    (copy,) = rig.copies
    assert (copy.source, copy.target, copy.source_epochs) == (FAST, SLOW, [5, 5])
    assert rig.fast.index.prefix(warm)
    assert all(h in rig.fast.index for h in cold), "they can be hit while they are copied"
    rig.end()
    assert [h in rig.fast.index for h in cold] == [True, False, False]
    assert [h in rig.slow.index for h in cold] == [False, True, True]
    assert rig.fast.num_free == 5
    assert {entry.block_hash for entry in rig.done[0].entries} == set(cold[1:])


def test_a_block_that_is_used_while_it_is_copied_stays_and_its_copy_too():
    rig = Rig(8, 8)
    hashes = rig.seal("a", "b")
    rig.out(2)
    rig.fast.index.prefix(hashes)
    rig.end()
    assert rig.fast.num_free == 6
    assert len(rig.slow.index) == 2
    assert rig.done[0].entries == []


def test_blocks_that_came_back_leave_again_without_a_copy():
    rig = Rig(4, 4)
    hashes = rig.seal("a", "b", "c")
    rig.out(3)
    rig.end()
    rig.bring(hashes)
    assert [copy.target for copy in rig.copies] == [FAST]
    rig.end()
    here = rig.done[-1].entries
    assert [entry.block_hash for entry in here] == hashes
    assert all(entry.pins == 1 for entry in here)
    rig.fast.index.unpin(here)
    rig.out(3)
    assert rig.copies == []
    assert len(rig.done[-1].entries) == 3
    assert rig.fast.num_free == 4
    assert rig.tiers.counters["blocks_freed"] == 3


def test_pages_leave_by_themselves_between_two_watermarks():
    rig = Rig(20, 20, TierLimits(begin_free_ratio=0.1, end_free_ratio=0.3))
    rig.seal(*range(18))
    rig.tick()
    assert rig.copies == [], "two free pages of twenty are not fewer than a tenth"
    rig.seal("x")
    rig.tick()
    assert sum(len(copy.source_pages) for copy in rig.copies) == 5
    rig.tick()
    assert len(rig.copies) == 1, "what is leaving counts as free"
    rig.end()
    assert rig.fast.num_free == 6
    rig.seal("y", "z")
    rig.tick()
    assert rig.copies == [], "four of twenty: between the marks nothing begins"


def test_when_dram_is_full_its_coldest_leaves_are_dropped_copies_first():
    rig = Rig(8, 3)
    first = rig.seal("a", "b")
    rig.out(2)
    rig.end()
    other = rig.seal("c")
    rig.out(1)
    rig.end()
    rig.bring(other)
    rig.end()
    rig.fast.index.unpin(rig.done[-1].entries)
    rig.seal("d", "e")
    rig.fast.index.prefix(other)
    rig.out(2)
    rig.end()
    assert rig.tiers.counters["copies_dropped"] == 1
    assert rig.tiers.counters["blocks_dropped"] == 1
    assert [h in rig.slow.index for h in first] == [True, False]


def test_nothing_leaves_when_all_of_dram_is_pinned():
    rig = Rig(4, 1, TierLimits(begin_free_ratio=0.25, end_free_ratio=0.5))
    rig.seal("a", space=rig.slow)
    rig.slow.index.pin(rig.slow.index.entries())
    rig.seal("x", "y", "z", "w")
    rig.tick()
    assert rig.copies == []
    assert rig.fast.index.num_pinned == 0
    assert rig.tiers.next_deadline_ms(rig.now_ms) == rig.now_ms + 50
    rig.out(2)
    assert rig.done[-1].entries == []


def test_swap_in_makes_room_for_itself():
    rig = Rig(3, 8, TierLimits(begin_free_ratio=0, end_free_ratio=0, max_pages_per_copy=2))
    old = rig.seal("a", "b", "c")
    rig.out(3)
    rig.end()
    new = rig.seal("x", "y", "z")
    rig.bring(old)
    assert {copy.target for copy in rig.copies} == {SLOW}
    rig.end()
    assert [entry.block_hash for entry in rig.done[-1].entries] == old
    assert all(h in rig.slow.index for h in new)


def test_swap_in_gives_up_what_finds_no_room():
    rig = Rig(2, 8)
    old = rig.seal("a", "b")
    rig.out(2)
    rig.end()
    rig.seal("x")
    rig.fast.index.pin(rig.fast.index.entries())
    rig.bring(old)
    rig.end()
    assert [entry and entry.block_hash for entry in rig.done[-1].entries] == [old[0], None]
    assert rig.slow.index.num_pinned == 0


def test_what_is_in_hbm_already_is_not_copied_again():
    rig = Rig(8, 8)
    hashes = rig.seal("a", "b")
    rig.seal("a", "b", space=rig.slow)
    rig.bring(hashes)
    assert rig.copies == []
    assert [entry.pins for entry in rig.done[0].entries] == [1, 1]


@pytest.mark.parametrize("result", [{"failed": True}, {"stale": (0, 1)}])
def test_a_copy_that_fails_changes_nothing_and_is_not_tried_at_once(result):
    rig = Rig(4, 4, TierLimits(begin_free_ratio=0.3, end_free_ratio=0.5))
    hashes = rig.seal("a", "b", "c", "d")
    rig.tick()
    rig.end(**result)
    assert all(h in rig.fast.index for h in hashes)
    assert (rig.slow.num_free, rig.fast.index.num_pinned) == (4, 0)
    assert rig.tiers.next_deadline_ms(rig.now_ms) == rig.now_ms + 1_000
    rig.now_ms += 1_000
    rig.tick()
    assert len(rig.copies) == 1


def test_a_target_that_may_still_be_written_waits_until_it_is_settled():
    rig = Rig(4, 4)
    rig.seal("a", "b")
    rig.out(2)
    lost = rig.copies[0].target_pages[:1]
    rig.end(failed=True, quarantined=lost)
    assert rig.slow.num_free == 3
    assert rig.tiers.quarantined[SLOW] == set(lost)
    rig.perform(rig.tiers.on_settled(SLOW, [*lost, 3], rig.now_ms))
    rig.perform(rig.tiers.on_settled(SLOW, lost, rig.now_ms))
    assert rig.slow.num_free == 4


def test_a_long_swap_goes_in_pieces_within_the_bound():
    rig = Rig(
        40, 40, TierLimits(begin_free_ratio=0, end_free_ratio=0, max_pages_per_copy=4, max_pages_in_flight=8)
    )
    rig.seal(*range(30))
    rig.out(30)
    assert [len(copy.source_pages) for copy in rig.copies] == [4, 4]
    rig.end()
    assert len(rig.done[0].entries) == 30
    assert rig.slow.index.num_branches <= 8


def test_room_at_once_loses_only_what_has_no_copy():
    rig = Rig(2, 2)
    rig.seal("a", "b")
    rig.seal("a", space=rig.slow)
    assert rig.tiers.make_room()
    assert rig.tiers.make_room()
    assert not rig.tiers.make_room()
    assert (rig.tiers.counters["blocks_evicted"], rig.tiers.counters["blocks_freed"]) == (1, 1)


def test_bounds_and_wrong_answers_are_refused():
    rig = Rig(4, 4, TierLimits(max_tickets=1))
    rig.seal("a")
    rig.out(1)
    with pytest.raises(Overloaded):
        rig.out(1)
    with pytest.raises(InvariantBroken):
        rig.tiers.on_copied(99, CopyResult(), 0)
    with pytest.raises(InvariantBroken):
        TierLimits(begin_free_ratio=0.5, end_free_ratio=0.1)


def test_swap_in_goes_on_at_once_where_room_costs_no_copy():
    rig = Rig(2, 8)
    old = rig.seal("a", "b")
    rig.out(2)
    rig.end()
    rig.seal("x", "y")
    rig.seal("x", "y", space=rig.slow)
    rig.bring(old)
    assert [copy.target for copy in rig.copies] == [FAST]


def test_room_that_a_swap_out_makes_serves_a_swap_in_that_waits():
    rig = Rig(2, 8)
    old = rig.seal("a", "b")
    rig.out(2)
    rig.end()
    rig.seal("x", "y")
    rig.seal("x", "y", space=rig.slow)
    rig.fast.index.pin(rig.fast.index.entries())
    rig.slow.index.pin(rig.slow.index.prefix(old))
    rig.bring(old)
    assert rig.done[-1].entries == [None, None], "nothing can leave, so nobody waits"


def test_at_once_no_more_is_evicted_than_is_wanted_beyond_what_is_leaving():
    rig = Rig(8, 8, TierLimits(0, 0, max_pages_per_copy=2, max_pages_in_flight=2))
    rig.seal(*"abcdefgh")
    assert rig.tiers.leave(5, rig.now_ms)
    rig.tick()
    assert [len(copy.target_pages) for copy in rig.copies] == [2]
    assert (rig.fast.num_free, rig.tiers.counters["blocks_evicted"]) == (3, 3)
    assert not rig.tiers.leave(2, rig.now_ms)  # as many are on their way
    assert rig.fast.num_free == 3


def test_blocks_that_leave_without_a_copy_are_used_in_host_memory_as_the_path_that_they_are():
    rig = Rig(6, 8)
    hashes = rig.seal(*"abcdef")
    other = rig.seal("x", "y", space=rig.slow)
    rig.seal(*"abcdef", space=rig.slow)
    rig.slow.index.prefix(other)  # used later than the others
    assert rig.tiers.leave(5, rig.now_ms)
    assert rig.fast.num_free == 5
    assert rig.slow.index.num_branches == 2
    assert [rig.slow.evict().block_hash for _ in range(2)] == other[::-1]
    assert len(rig.slow.index.prefix(hashes)) == 6


def test_a_swap_is_told_of_each_block_that_is_there_also_where_they_are_no_path():
    rig = Rig(6, 8)
    hashes = rig.seal(*"abc")
    pages, _ = rig.slow.take(3)
    for block_hash, page in zip(hashes, pages, strict=True):
        rig.slow.seal(rig.slow.index.insert_path(SEED, [block_hash], [page], 16))
    rig.out(3)
    assert not rig.copies
    assert {entry.block_hash for entry in rig.done[0].entries} == set(hashes)
