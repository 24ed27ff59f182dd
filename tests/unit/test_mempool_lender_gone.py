"""A process that only lends and dies: its offers come back, no consumer loses anything, its device has the memory."""

import pytest
from msgspec.structs import replace

from services.mempool.core.actions import ReleaseUnits
from services.mempool.core.lifetimes import LENDER_IDLE_MS
from shared.kv.layout import LENDER as ONLY_LENDS
from shared.wire import mempool as wire
from tests.unit.mempool_harness import DESCRIPTION, PAGE_BYTES
from tests.unit.test_mempool_lending import ABCD, LENDER, SELLER, Market
from tests.unit.test_mempool_spaces import FRONT


class LenderMarket(Market):
    """The producer only lends, from a process without an engine: both of its connections are that process's."""

    def worker(self, connection: int, device: str, **more: object) -> None:
        if connection == LENDER:
            more = {"quota": 0, "description": replace(DESCRIPTION, backend=ONLY_LENDS, fingerprint="lender")}
        super().worker(connection, device, **more)

    def die(self, *, proven_first: bool = True) -> None:
        if proven_first:
            self.dead(LENDER)
        for connection in (LENDER, 100 + LENDER, SELLER):
            self.closed(connection)
        if not proven_first:
            self.dead(LENDER)


@pytest.fixture
def rig() -> LenderMarket:
    made = LenderMarket()
    made.lend(4)
    made.leave(ABCD, "abcd")
    made.copied()
    return made


@pytest.mark.parametrize("proven_first", [False, True])
def test_the_loans_of_a_dead_lender_end_and_their_blocks_leave_for_host_memory(rig, proven_first):
    rig.die(proven_first=proven_first)
    assert rig.copies
    rig.copied()
    assert rig.leased() == 0
    assert not rig.core.lending.loans.loans
    assert rig.read(ABCD) == "abcd"
    assert not rig.counters().get("lending_blocks_dropped")


def test_they_are_back_when_moving_them_takes_no_longer_than_a_reclaim(rig):
    rig.core.lending.copies.limit_one(rig.producer, PAGE_BYTES)
    rig.advance(10)
    rig.die()
    (loan,) = rig.core.lending.loans.loans.values()
    assert loan.deadline_ms == rig.now_ms + 4_000 + rig.core.lending.rules.reclaim_deadline_ms


def test_its_device_has_the_memory_as_soon_as_nothing_of_it_is_lent(rig):
    rig.die()
    rig.advance(LENDER_IDLE_MS)
    assert not rig.memory, "it is read still"
    rig.copied()
    rig.advance(LENDER_IDLE_MS)
    released = [unit for each in rig.memory if isinstance(each, ReleaseUnits) for unit in each.units]
    assert len(released) == rig.table().num_pages


def test_an_offer_of_a_dead_lender_that_comes_late_is_refused(rig):
    rig.die()
    rig.copied()
    rig.sent[FRONT].clear()
    rig.seller = FRONT
    rig.offer(4, "late")
    (failed,) = [m for m in rig.sent[FRONT] if isinstance(m, wire.CallFailed)]
    assert failed.code == "producer.gone"
    assert rig.leased() == 0


def test_a_lender_whose_connection_ended_and_that_lives_keeps_its_offers(rig):
    rig.closed(LENDER)
    rig.dead(77)
    rig.copied()
    assert rig.leased() == 4


def test_an_engines_offers_stay_when_it_dies_for_who_reports_load_decides():
    rig = Market()
    rig.lend(4)
    rig.dead(LENDER)
    for connection in (LENDER, 100 + LENDER):
        rig.closed(connection)
    assert rig.core.lending.loans.loans
