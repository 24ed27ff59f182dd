"""A process that only lends and dies: its offers come back, no consumer loses anything, its device has the memory."""

import pytest
from msgspec.structs import replace

from services.mempool.core.actions import ReleaseUnits
from services.mempool.core.lifetimes import LENDER_IDLE_MS
from services.mempool.core.space import Plan
from shared.ids import Epoch, InstanceId
from shared.kv.layout import LENDER as ONLY_LENDS
from shared.kv.layout import TENSORS
from shared.kv.page import PageState, pack_word
from shared.wire import mempool as wire
from tests.unit.mempool_harness import BOOT, DESCRIPTION, PAGE_BYTES
from tests.unit.test_mempool_lending import ABCD, LENDER, SELLER, Market
from tests.unit.test_mempool_spaces import FRONT, Spaces


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


def successor(backend: str) -> Spaces:
    """Of a mempool whose every page may be written: process 7 had the space, process 9 copied there as a caller."""
    made = Spaces(num_pages=8)
    words = [pack_word(BOOT, PageState.WRITING)] * 8
    actions = made.core.adopt(
        0, replace(DESCRIPTION, backend=backend), Plan(8, PAGE_BYTES, 1), words, b"", memory_id=BOOT, processes=[7, -9],
        engines=[7], instances=[InstanceId("p")],
    )  # fmt: skip
    made.run(actions)
    return made


def pages(rig: Spaces) -> dict[str, int]:
    return {state: count for state, count in rig.core.status().pages_by_state.items() if count}


@pytest.mark.parametrize("backend", [ONLY_LENDS, TENSORS, "CPU_ATTN"])
def test_only_engines_and_callers_are_ended_for_their_silence_and_the_pages_of_others_wait_for_them(backend):
    """A process that once used shared/aqua has nothing to say, whatever it does now."""
    after = successor(backend)
    assert after.core.awaited() == ({7, -9} if backend == "CPU_ATTN" else {-9})
    after.dead(9)
    assert pages(after) == {"quarantined": 8}
    after.dead(7)
    assert pages(after) == {"free": 8}


def test_the_pages_of_a_lender_that_says_that_it_touches_none_are_free_at_a_successor():
    after = successor(ONLY_LENDS)
    after.dead(9)
    described = replace(DESCRIPTION, backend=ONLY_LENDS)
    rank = wire.Attach(kind="rank", instance=InstanceId("p"), description=described, memory_id=BOOT)
    after.run(after.core.on_attach(1, 7, rank, after.now_ms))
    assert pages(after) == {"quarantined": 8}, "it lives, and may have an engine"
    engine = wire.Attach(
        kind="engine", instance=InstanceId("p"), description=described, works_in_pages=True, memory_id=BOOT
    )
    after.run(after.core.on_attach(2, 7, engine, after.now_ms))
    assert pages(after) == {"free": 8}


def test_an_engine_that_is_back_in_its_space_is_not_ended_for_another_where_its_pages_wait():
    after, name, words = Spaces(num_pages=8), InstanceId("p"), [pack_word(BOOT, PageState.WRITING)] * 8
    for number, label, memory in ((0, "", BOOT), (3, "b", Epoch(BOOT + 3))):
        after.core.adopt(
            number, DESCRIPTION, Plan(8, PAGE_BYTES, 1), words, b"", memory_id=memory, processes=[7, 8], engines=[7],
            instances=[name, name], label=label,
        )  # fmt: skip
    for process, kind in ((7, "engine"), (8, "rank")):
        assert process in after.core.awaited()
        attach = wire.Attach(
            kind=kind, instance=name, description=DESCRIPTION, device="cpu:b", memory_id=Epoch(BOOT + 3)
        )
        after.run(after.core.on_attach(process, process, attach, 5))
    assert not after.core.awaited()
    assert after.core.pools[0].awaited() == {7, 8}
