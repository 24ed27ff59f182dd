"""Blocks of parked requests leave for swap space and come back to their engine with their bytes."""

import pytest

from services.mempool.core.actions import Action, Send, WriteEntries, WriteWords
from shared.errors import PeerProtocolError
from shared.kv.page import PageState
from shared.kv.words import u32_list, u64_list
from shared.wire import mempool as wire
from shared.wire.mempool_swap import NO_PAGE, SwapDrop, SwapIn, SwapOut, SwappedIn, SwappedOut
from tests.unit.mempool_harness import PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_lending import ABCD, LENDER, WXYZ, Market
from tests.unit.test_mempool_spaces import FRONT, PREFILL


class Swapping(Market):
    """`out` and `come` are what an engine does: it unpins what is kept, and gives pages for what comes."""

    def begin_out(self, swap: int, hashes: list) -> None:
        self.say(PREFILL, SwapOut(swap=swap, hashes=b"".join(hashes)))

    def last(self, kind: type):
        found = [m for m in self.sent[PREFILL] if isinstance(m, kind)]
        return found[-1] if found else None

    def out(self, swap: int, hashes: list, names: str) -> SwappedOut:
        """Compute, swap out, and unpin what is kept."""
        pages = self.fill(PREFILL, 0, hashes, names)
        self.begin_out(swap, hashes)
        self.copied()
        answer = self.last(SwappedOut)
        kept = [page for page, is_kept in zip(pages, answer.kept, strict=True) if is_kept]
        self.say(PREFILL, wire.Unpin(**page_lists(kept)))
        return answer

    def begin_in(self, swap: int, hashes: list) -> None:
        pages = self.take(PREFILL, len(hashes))
        self.say(PREFILL, SwapIn(swap=swap, hashes=b"".join(hashes), **page_lists(pages)))

    def come(self, swap: int, hashes: list) -> str:
        """Bytes of what came back; "-" for what is lost."""
        self.begin_in(swap, hashes)
        self.copied()
        return self.read_in()

    def read_in(self) -> str:
        answer = self.last(SwappedIn)
        pages = u32_list(answer.pages)
        for page, epoch in zip(pages, u64_list(answer.epochs), strict=True):
            if page != NO_PAGE:
                assert self.state_in(0, page) is PageState.SEALED
                assert self.words_of[0, page] >> 8 == epoch
        return "".join("-" if page == NO_PAGE else self.bytes[0, page] for page in pages)

    def pinned(self) -> dict:
        memory = self.core.pools[0].memory
        assert memory is not None
        return memory.engines.attached[PREFILL].pinned


def test_what_left_comes_back_from_host_memory_with_its_bytes_and_its_pages_are_the_engines():
    rig = Swapping()
    assert rig.out(1, ABCD, "abcd").kept == b"\1\1\1\1"
    rig.say(PREFILL, wire.Unpin(**page_lists(rig.fill(PREFILL, 0, WXYZ, "wxyz"))))  # takes their places
    rig.copied()
    assert rig.come(1, ABCD) == "abcd"
    assert len(rig.pinned()) == 4
    counters = rig.counters()
    assert counters["swap_blocks_out_dram"] == 4
    assert counters["swap_blocks_in_dram"] == 4
    assert rig.core.swaps.num_kept == 0


def test_an_engine_never_has_more_pages_than_its_share_and_gets_back_what_it_gave_in_vain():
    rig = Swapping()
    rig.out(1, ABCD, "abcd")
    assert len(rig.granted[PREFILL]) + len(rig.pinned()) == 8
    rig.begin_in(1, [*ABCD, *WXYZ])
    rig.copied()
    assert rig.read_in() == "abcd----"
    assert len(rig.granted[PREFILL]) == len(rig.pinned()) == 4


def test_lent_pages_take_blocks_first_and_say_so():
    rig = Swapping()
    rig.lend(3)
    assert rig.out(1, ABCD, "abcd").blocks_peer == 3
    assert rig.come(1, ABCD) == "abcd"
    assert rig.counters()["swap_blocks_out_peer"] == 3
    assert rig.counters()["swap_blocks_out_dram"] == 1


def test_blocks_that_nobody_pins_make_way_in_lent_pages_for_those_of_parked_requests():
    rig = Swapping()
    rig.lend(4)
    rig.leave(WXYZ, "wxyz")  # of a request that ended
    rig.say(PREFILL, wire.Unpin(**page_lists(rig.fill(PREFILL, 0, chain("5", "6", "7", "8"), "5678"))))
    rig.copied()
    assert rig.leased() == 4
    loan = next(pool for pool in rig.core.pools.values() if pool.is_loan)
    assert loan.memory.table.num_free == 0
    assert rig.out(1, ABCD, "abcd").blocks_peer == 4
    counters = rig.counters()
    assert (counters["swap_blocks_out_peer"], counters["swap_made_way_peer"]) == (4, 4)
    assert "swap_blocks_out_dram" not in counters
    assert rig.out(2, chain("p", "q"), "pq").blocks_peer == 0  # nobody's pinned block does
    assert rig.come(1, ABCD) == "abcd"


def test_what_its_engine_has_again_makes_way_before_what_nobody_else_has():
    rig = Swapping()
    rig.lend(6)
    rig.out(1, ABCD, "abcd")
    rig.say(PREFILL, wire.Unpin(**page_lists(rig.fill(PREFILL, 0, WXYZ, "wxyz"))))
    rig.copied()
    assert rig.come(1, ABCD) == "abcd"
    loan = next(pool for pool in rig.core.pools.values() if pool.is_loan)
    others = [h for h in loan.index.hashes if h not in ABCD]
    rig.out(2, chain("p", "q", "r"), "pqr")
    assert all(h in loan.index for h in others)
    assert rig.counters()["swap_blocks_out_peer"] >= 6


def test_what_a_swap_keeps_in_host_memory_is_not_copied_to_a_lent_page_besides():
    rig = Swapping()
    pages = rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.begin_out(1, ABCD)
    rig.copied()
    rig.lend(2)
    rig.say(PREFILL, wire.Unpin(**page_lists(pages)))
    assert len(rig.granted[PREFILL]) == 8
    assert not rig.copies
    assert rig.come(1, ABCD) == "abcd"


def test_a_swap_is_copied_in_whole_copies_and_waits_for_room_for_one():
    rig = Swapping(out_in_flight_bytes=3 * PAGE_BYTES)
    rig.lend(8)
    rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.begin_out(1, ABCD[:2])
    rig.begin_out(2, ABCD[2:])
    assert [len(copy.targets) for copy in rig.copies.values()] == [2]
    rig.copied()
    assert [len(copy.targets) for copy in rig.copies.values()] == [2]
    rig.copied()
    assert rig.last(SwappedOut) == SwappedOut(swap=2, kept=b"\1\1", blocks_copied=2, blocks_peer=2)


def test_nothing_evicts_what_is_kept_and_what_has_no_room_stays_with_its_engine():
    rig = Swapping(dram_pages=4)
    assert rig.out(1, ABCD, "abcd").kept == b"\1\1\1\1"
    assert rig.out(2, WXYZ, "wxyz").kept == b"\0\0\0\0"
    assert rig.counters()["swap_blocks_without_room"] == 4
    rig.begin_in(1, ABCD)
    rig.copied()
    assert rig.read_in() == "abcd"


def test_a_reclaim_of_lent_pages_moves_kept_blocks_to_host_memory_and_they_stay_kept():
    rig = Swapping()
    rig.lend(4)
    rig.out(1, ABCD, "abcd")
    rig.reclaim(0, 1_000)
    rig.copied()
    rig.advance(1)
    assert rig.leased() == 0
    assert rig.core.swaps.num_kept == 4
    assert rig.come(1, ABCD) == "abcd"


def test_a_reclaim_copies_kept_blocks_that_another_engine_has_too():
    """Nobody keeps them there for who is parked here."""
    rig = Swapping(producer_quota=12)
    rig.lend(4)
    rig.out(1, ABCD, "abcd")
    others = rig.fill(LENDER, rig.producer, ABCD, "abcd")
    rig.reclaim(0, 1_000)
    rig.copied()
    rig.advance(1)
    assert rig.leased() == 0
    assert rig.core.swaps.num_kept == 4
    rig.say(LENDER, wire.Unpin(**page_lists(others)))
    rig.fill(LENDER, rig.producer, WXYZ, "wxyz")
    assert rig.come(1, ABCD) == "abcd"


def test_a_reclaim_copies_kept_blocks_that_their_own_engine_still_has():
    rig = Swapping()
    rig.lend(4)
    rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.begin_out(1, ABCD)
    rig.copied()
    rig.reclaim(0, 1_000)
    rig.copied()
    rig.advance(1)
    assert rig.leased() == 0
    assert rig.core.swaps.num_kept == 4


def test_blocks_that_a_reclaim_had_no_room_for_are_lost_and_said_to_be():
    rig = Swapping(dram_pages=4)
    rig.lend(4)
    rig.out(1, ABCD, "abcd")
    rig.out(2, WXYZ, "wxyz")  # host memory is full of these
    rig.reclaim(0, 0)
    rig.advance(1)
    assert rig.leased() == 0
    rig.begin_in(2, WXYZ)
    rig.copied()
    assert rig.read_in() == "wxyz"
    found = rig.come(1, ABCD)
    assert all(a in (b, "-") for a, b in zip(found, "abcd", strict=True))


def test_blocks_that_are_still_where_they_were_come_back_as_they_are():
    rig = Swapping()
    pages = rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.begin_out(1, ABCD)
    rig.copied()
    rig.say(PREFILL, wire.Unpin(**page_lists(pages[:1])))  # another request has the others still
    rig.core.pools[0].index.pin(rig.core.pools[0].index.prefix(ABCD)[:1])
    rig.begin_in(1, ABCD[:1])
    assert not rig.copies
    assert rig.read_in() == "a"
    assert u32_list(rig.last(SwappedIn).pages) == [pages[0][0]]
    assert len(rig.granted[PREFILL]) + len(rig.pinned()) == 8
    assert rig.counters()["swap_blocks_in_here"] == 1


def test_known_blocks_are_kept_without_a_copy():
    rig = Swapping()
    rig.out(1, ABCD, "abcd")
    rig.begin_in(1, ABCD)
    rig.copied()
    rig.begin_out(2, ABCD)
    assert not rig.copies
    assert rig.last(SwappedOut) == SwappedOut(swap=2, kept=b"\1\1\1\1")


def test_a_dropped_swap_ends_its_pins_and_is_answered_all_the_same():
    rig = Swapping()
    rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.begin_out(1, ABCD)
    rig.say(PREFILL, SwapDrop(swap=1))
    rig.copied()
    assert rig.last(SwappedOut) == SwappedOut(swap=1, kept=b"\0\0\0\0", blocks_copied=4)
    assert rig.core.swaps.num_kept == 0
    assert rig.core.status().num_pinned == 4  # by the engine, which said nothing yet


def test_an_engine_that_dies_in_the_middle_leaves_no_pin_and_no_page():
    rig = Swapping()
    rig.out(1, ABCD, "abcd")
    rig.fill(PREFILL, 0, WXYZ, "wxyz")
    rig.begin_out(2, WXYZ)
    for kind in (rig.dead, rig.closed):
        kind(PREFILL)
    rig.closed(100 + PREFILL)
    rig.copied()
    rig.closed(FRONT)
    status = rig.core.status()
    assert (status.num_pinned, rig.core.swaps.num_kept) == (0, 0)
    states = next(s for s in status.spaces if s.number == 0).pages_by_state
    assert {name for name, count in states.items() if count} <= {"free", "sealed"}


def test_an_engine_that_dies_while_its_blocks_come_back_leaves_them_as_cached_ones():
    rig = Swapping()
    rig.out(1, ABCD, "abcd")
    rig.begin_in(1, ABCD)
    for kind in (rig.dead, rig.closed):
        kind(PREFILL)
    rig.closed(100 + PREFILL)
    rig.copied()
    assert rig.core.status().num_pinned == 0
    rig.worker(PREFILL + 50, "cpu:0", quota=8)
    rig.counts()


def test_a_copy_that_failed_is_a_block_that_is_lost_and_its_pages_come_back_when_they_are_settled():
    rig = Swapping()
    rig.out(1, ABCD, "abcd")
    rig.begin_in(1, ABCD)
    (copy,) = rig.copies.values()
    rig.copied(failed=True, in_doubt=copy.targets[:2])
    assert rig.read_in() == "----"
    rig.run(rig.core.on_settled(0, copy.targets[:2], rig.now_ms))
    assert len(rig.granted[PREFILL]) == 8
    assert rig.core.status().num_pinned == 0


def test_a_page_given_twice_or_under_an_old_epoch_is_not_taken():
    rig = Swapping()
    rig.out(1, ABCD[:1], "a")
    (page,) = rig.take(PREFILL, 1)
    old = (page[0], page[1] - 1)
    rig.say(PREFILL, SwapIn(swap=1, hashes=ABCD[0], **page_lists([old])))
    assert rig.read_in() == "-"
    assert rig.counters()["swap_pages_stale"] == 1


def test_only_engines_that_work_in_the_pages_swap():
    rig = Swapping()
    with pytest.raises(PeerProtocolError):
        rig.say(FRONT, SwapDrop(swap=1))


def test_a_reader_that_waits_for_pages_does_not_hold_up_lent_pages_that_are_overdue():
    rig = Swapping()
    rig.lend(4)
    rig.leave(ABCD, "abcd")
    rig.copied()
    pages = rig.take(PREFILL, len(rig.granted[PREFILL]))  # what there is, is written
    rig.write(PREFILL, pages)
    rig.say(FRONT, wire.Acquire(call_id=9, hashes=b"".join(ABCD), wait_ms=20_000))
    if rig.copies:
        rig.copied()
    rig.reclaim(0, 0)
    rig.advance(1)
    assert rig.leased() == 0
    assert [m.call_id for m in rig.sent[FRONT] if isinstance(m, wire.Acquired)] == [9]


def test_an_answer_comes_behind_the_words_of_the_host_memory_that_it_speaks_of():
    """A mempool that is killed between the two has promised blocks that its successor does not find."""
    rig = Swapping()
    batches: list[list[Action]] = []
    run = rig.run
    rig.run = lambda actions: (batches.append(list(actions)), run(actions))[1]
    assert rig.out(1, ABCD, "abcd").kept == b"\1\1\1\1"
    (batch,) = [
        b for b in batches if any(isinstance(a, Send) and isinstance(a.message, SwappedOut) for a in b)
    ]
    told = [i for i, a in enumerate(batch) if isinstance(a, Send)]
    written = [i for i, a in enumerate(batch) if isinstance(a, WriteWords | WriteEntries) and a.space != 0]
    assert written
    assert max(written) < min(told)
