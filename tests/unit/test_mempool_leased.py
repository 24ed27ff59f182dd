"""Lent pages in callers' hands: filled and read by transfers, in DRAM in time when their lender wants them back."""

from dataclasses import replace

import pytest

from services.mempool.core.actions import ApiSend
from shared.ids import InstanceId, PageId, SpaceId
from shared.kv.page import PageState
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import Medium, PageAddress, unpack_addresses
from tests.unit.mempool_harness import PAGE_BYTES, Harness
from tests.unit.test_mempool_lending import Market
from tests.unit.test_mempool_spaces import PREFILL

ME = InstanceId("i1")  # Market's consumer
HAND, OTHER_HAND = 500, 501  # callers' connections


class Hands(Market):
    """Callers of the consumer's instance, which read what they write themselves too."""

    readable = (*Market.readable, PageState.GRANTED, PageState.WRITING)

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.replies: dict[int, list] = {HAND: [], OTHER_HAND: []}
        self.call_ids = 0
        for hand in self.replies:
            self.core.api.connect(hand, wire.ApiHello(instance=ME), None)

    def run(self, actions) -> None:
        for action in actions:
            if isinstance(action, ApiSend):
                self.replies[action.connection].append(action.message)
        super().run([action for action in actions if not isinstance(action, ApiSend)])

    def ask(self, call, hand: int = HAND, **fields):
        self.call_ids += 1
        self.core.api.on_call(hand, call(call_id=self.call_ids, **fields), self.now_ms)
        self.run(self.core.after_api(self.now_ms))
        found = [m for m in self.replies[hand] if getattr(m, "call_id", 0) == self.call_ids]
        return found[0] if found else None

    def alloc(self, count: int, mem_type: str, hand: int = HAND):
        reply = self.ask(wire.AllocMem, hand, num_blocks=count, mem_type=mem_type, instance=ME)
        return unpack_addresses(reply.addresses) if isinstance(reply, wire.Addresses) else reply.code

    def move(self, sources: list, targets: list):
        """Ends when the copies have."""
        reply = self.ask(wire.Transfer, target=ME, sources=raw(sources), targets=raw(targets))
        return reply if reply is not None else self.call_ids

    def answer_to(self, call_id: int):
        (found,) = [m for m in self.replies[HAND] if getattr(m, "call_id", 0) == call_id]
        return found

    def byte(self, address: PageAddress) -> str:
        number = int(address.space)
        shelves = {s.number: s.producer for s in self.core.lending.loans.shelves.values()}
        return self.bytes.get((shelves.get(number, number), address.page), "")

    def free(self, addresses: list, hand: int = HAND) -> int:
        return self.ask(wire.FreeMem, hand, addresses=raw(addresses)).count

    def evacuated(self, hand: int = HAND) -> list:
        return [m for m in self.replies[hand] if isinstance(m, wire.Evacuated)]

    def hold(self, names: str, hand: int = HAND) -> tuple[list, list]:
        """Filled lent pages, and those beside them."""
        got = self.alloc(len(names), "leased", hand)
        lent, beside = got[: len(names)], got[len(names) :]
        shelves = {s.number: s.producer for s in self.core.lending.loans.shelves.values()}
        for address, name in zip(lent, names, strict=True):
            self.bytes[shelves[int(address.space)], address.page] = name
        return lent, beside


def raw(addresses) -> bytes:
    return b"".join(address.to_bytes() for address in addresses)


@pytest.fixture
def hands() -> Hands:
    made = Hands(dram_pages=16, producer_quota=4)
    made.lend(4)
    return made


def test_a_lent_page_comes_with_one_in_host_memory(hands):
    lent, beside = hands.hold("ab")
    assert {a.medium for a in lent} == {Medium.LEASED}
    assert {a.medium for a in beside} == {Medium.DRAM}
    assert hands.alloc(3, "leased") == "pages.exhausted"
    assert hands.free(lent + beside) == 4
    assert len(hands.alloc(4, "leased")) == 8
    assert hands.alloc(1, "mixed") != "pages.exhausted", "which never means a peer's"
    hands.counts()


def test_what_one_call_gave_one_call_takes_back(hands):
    """Which is two addresses a page."""
    hands.core.api.api.limits = replace(hands.core.api.api.limits, max_blocks_per_call=3)
    got = hands.alloc(3, "leased")
    assert len(got) == 6
    more = hands.ask(wire.FreeMem, HAND, addresses=raw([*got, got[0]]))
    assert (more.code, more.reason) == ("invalid_request", "more than 6 addresses")
    too_many = hands.ask(wire.Transfer, target=ME, sources=raw(got), targets=raw(got))
    assert too_many.reason == "more than 3 addresses"
    assert hands.free(got) == 6
    hands.counts()


def test_without_host_memory_nothing_is_lent_to_callers(hands):
    taken = hands.alloc(8, "dram")
    assert hands.alloc(1, "dram") == "pages.exhausted", "half of it is the most for one caller"
    assert hands.alloc(1, "leased") == "pages.exhausted"
    hands.free(taken)
    assert len(hands.alloc(4, "leased")) == 8


def test_transfers_fill_and_read_lent_pages(hands):
    lent, beside = hands.hold("ab")
    source = hands.alloc(2, "dram")
    for address, name in zip(source, "xy", strict=True):
        hands.bytes[int(address.space), address.page] = name
    call_id = hands.move(source, lent)
    hands.copied()
    assert isinstance(hands.answer_to(call_id), wire.Addresses)
    assert [hands.byte(a) for a in lent] == ["x", "y"]
    call_id = hands.move(lent, beside)
    hands.copied()
    assert isinstance(hands.answer_to(call_id), wire.Addresses)
    assert [hands.byte(a) for a in beside] == ["x", "y"]


def test_a_reclaim_has_the_bytes_in_host_memory_before_the_pages_return(hands):
    lent, beside = hands.hold("abc")
    hands.reclaim(0, 1_000)
    assert hands.leased() >= 3, "not before the copy"
    assert not hands.evacuated()
    assert hands.alloc(1, "leased") == "pages.exhausted", "nothing more is taken"
    hands.copied()
    assert hands.leased() == 0
    assert [hands.byte(a) for a in beside] == ["a", "b", "c"]
    assert [m.addresses for m in hands.evacuated()] == [raw(lent)]
    assert hands.free(lent) == 0, "they are not the caller's any more"
    assert hands.free(beside) == 3
    hands.counts()


def test_only_as_many_leave_as_are_wanted(hands):
    hands.hold("abcd")
    hands.reclaim(3, 1_000)
    hands.copied()
    assert hands.leased() == 3
    (told,) = hands.evacuated()
    assert len(unpack_addresses(told.addresses)) == 1


def test_a_caller_that_is_not_heard_of_loses_nothing_when_time_ends_the_loan(hands):
    _, beside = hands.hold("ab")
    hands.advance(10_000)  # what Market.grant() says; later, the mempool would have stood still
    hands.copied()
    assert hands.leased() == 4, "the offer stands; no loan does"
    assert not hands.core.lending.loans.loans
    assert [hands.byte(a) for a in beside] == ["a", "b"]


def test_a_caller_that_leaves_frees_its_lent_pages_whatever_its_process_does(hands):
    hands.hold("ab")
    hands.core.api.on_closed(HAND)
    hands.run(hands.core.after_api(hands.now_ms))
    hands.reclaim(0, 1_000)
    assert hands.leased() == 0
    hands.counts()


def test_a_caller_that_leaves_while_its_bytes_leave_is_not_waited_for(hands):
    hands.hold("ab")
    hands.reclaim(0, 1_000)
    hands.core.api.on_closed(HAND)
    hands.run(hands.core.after_api(hands.now_ms))
    hands.copied()
    assert hands.leased() == 0
    assert not hands.evacuated()
    hands.counts()


def test_a_copy_that_is_writing_a_lent_page_is_waited_for(hands):
    lent, beside = hands.hold("a")
    source = hands.alloc(1, "dram")
    hands.bytes[int(source[0].space), source[0].page] = "new"
    call_id = hands.move(source, lent)
    hands.reclaim(0, 0)
    assert len(hands.copies) == 1
    hands.copied()  # the caller's
    assert isinstance(hands.answer_to(call_id), wire.Addresses)
    hands.copied()  # the evacuation
    assert hands.byte(beside[0]) == "new"
    assert hands.leased() == 0


def test_nothing_writes_a_page_that_is_leaving(hands):
    lent, beside = hands.hold("a")
    source = hands.alloc(1, "dram")
    hands.reclaim(0, 1_000)
    for target in (lent, beside):
        assert hands.move(source, target).code == "invalid_request"
    hands.copied()
    assert hands.move(source, lent).code in ("epoch.stale", "address.not_held")


def test_copies_that_fail_are_made_again_and_then_the_page_is_lost(hands):
    lent, beside = hands.hold("a")
    hands.reclaim(0, 1_000)
    hands.copied(failed=True)
    hands.copied()
    assert hands.byte(beside[0]) == "a", "the second one did it"
    assert not hands.evacuated()[0].lost

    other = Hands(dram_pages=16, producer_quota=4)
    other.lend(4)
    lent, _ = other.hold("a")
    other.reclaim(0, 1_000)
    for _ in range(3):
        assert other.copies
        other.copied(failed=True)
    assert other.leased() == 0
    assert [m.lost for m in other.evacuated()] == [raw(lent)]


def indebted(hands: Hands) -> tuple[list, list]:
    """Four filled lent pages of a producer whose budget lets nothing more through for an hour."""
    hands.core.lending.copies.limit_one(hands.producer, 1)
    lent, beside = hands.hold("abcd")
    source = hands.alloc(1, "dram")
    hands.bytes[int(source[0].space), source[0].page] = "a"
    hands.move(source, lent[:1])
    hands.copied()
    assert not hands.core.lending.copies.is_open(hands.producer, hands.now_ms)
    return lent, beside


def test_a_producer_in_debt_gets_its_pages_by_its_deadline_and_no_byte_of_them_is_lost(hands):
    lent, beside = indebted(hands)
    spent_bytes = hands.core.lending.copies.spent_bytes()[hands.producer]
    hands.reclaim(0, 1_000)
    assert hands.copies, "begun at once"
    hands.copied()
    assert hands.leased() == 0
    assert [hands.byte(a) for a in beside] == ["a", "b", "c", "d"]
    assert [(m.addresses, m.lost) for m in hands.evacuated()] == [(raw(lent), b"")]
    assert hands.core.lending.copies.spent_bytes()[hands.producer] == spent_bytes + 4 * PAGE_BYTES


def test_a_callers_copy_that_its_budget_held_up_to_the_deadline_costs_no_byte(hands):
    lent, beside = indebted(hands)
    call_id = hands.move(lent[1:2], hands.alloc(1, "dram"))
    assert not hands.copies, "held"
    hands.reclaim(0, 1_000)
    hands.copied()
    assert hands.leased() == 1
    hands.advance(1_000)
    assert hands.answer_to(call_id).code == "copy.failed"
    hands.copied()
    assert hands.leased() == 0
    assert [hands.byte(a) for a in beside] == ["a", "b", "c", "d"]
    assert not any(m.lost for m in hands.evacuated())


def test_a_failed_copy_that_may_still_write_is_settled_before_the_next(hands):
    lent, beside = hands.hold("a")
    hands.reclaim(0, 1_000)
    page = int(beside[0].page)
    hands.copied(failed=True, in_doubt=[page])
    assert not hands.copies
    hands.run(hands.core.on_settled(int(beside[0].space), [PageId(page)], hands.now_ms))
    hands.copied()
    assert hands.byte(beside[0]) == "a"
    assert hands.leased() == 0
    assert int(lent[0].space) != SpaceId(hands.producer)


def test_a_caller_gives_up_what_was_lent_to_the_space_that_its_instance_has_left(hands):
    hands.hold("a")
    hands.hold("b", OTHER_HAND)
    for connection in (PREFILL, 100 + PREFILL):
        hands.closed(connection)
    hands.dead(PREFILL)
    hands.worker(77, "cpu:7", instance=ME)
    assert hands.ask(wire.MatchBlocks, OTHER_HAND, instance=ME, hashes=b"").num_known == 0
    for hand in (HAND, OTHER_HAND):
        hands.core.api.on_closed(hand)
        hands.run(hands.core.after_api(hands.now_ms))
    hands.copied()
    hands.reclaim(0, 1_000)
    assert hands.leased() == 0


def test_each_caller_hears_of_its_own(hands):
    mine, _ = hands.hold("a")
    other, _ = hands.hold("b", OTHER_HAND)
    hands.reclaim(0, 1_000)
    hands.copied()
    assert [m.addresses for m in hands.evacuated()] == [raw(mine)]
    assert [m.addresses for m in hands.evacuated(OTHER_HAND)] == [raw(other)]


def test_one_caller_gets_half_of_an_engines_space_also_while_the_engine_is_away(hands):
    hands.closed(PREFILL)
    hands.dead(PREFILL)
    hands.core.api.api.homes.pop(ME, None)  # as of a mempool that has just begun
    assert hands.alloc(5, "hbm") == "pages.exhausted"
    assert len(hands.alloc(4, "hbm")) == 4


def test_a_space_whose_owner_wants_none_of_it_for_an_engine_is_for_callers_until_one_comes():
    rig = Harness(8)
    rig.engine(1, quota=0)
    assert rig.pool.memory is not None
    engines = rig.pool.memory.engines
    assert engines.none_computes
    rig.closed(1)
    assert not engines.none_computes, "nobody is here who could say so"
    rig.engine(2, quota=0)
    assert engines.none_computes
    rig.engine(3, quota=4)
    assert not engines.none_computes
    rig.closed(3)
    rig.dead(3)
    assert not engines.none_computes, "it comes back"
