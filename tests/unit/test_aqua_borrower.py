"""What a consumer knows of its loans: all of a lease may go back to its lender, or a part of it."""

import itertools
from types import SimpleNamespace

from structlog.testing import capture_logs

from shared.aqua import borrower
from shared.aqua.borrower import Borrower
from shared.ids import InstanceId, LeaseId
from shared.wire.lending import Grant, LendingRefused
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone
from tests.unit.market_calls import ask, call, led_world

LEASE = LeaseId("l")


class Pool:
    """A mempool that answers renewals with what is next in `answers`."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def renew_loan(self, lease_id, ttl_ms):
        assert (lease_id, ttl_ms) == (LEASE, 1_000)
        return self.answers.pop(0)


async def test_a_part_that_went_back_is_missed_at_the_next_renewal():
    heard = []
    pool = Pool(
        LendingDone(call_id=1, num_bytes=100), LendingDone(call_id=2, num_bytes=60), None,
        LendingDone(call_id=4, num_bytes=60), CallFailed(call_id=5, code="lease.ended", reason=""),
    )  # fmt: skip
    made = Borrower(
        InstanceId("i"), pool, None, heard.append, wanted_bytes=100, min_bytes=1, ttl_ms=1_000, every_ms=1
    )
    made._held[LEASE] = (None, 100)
    held = []
    while pool.answers:
        await made._renew()
        held.append(made.held_bytes)
    assert held == [100, 60, 60, 60, 0]
    assert heard == [-40, -60]


class Market:
    """Answers what is next in `answers`."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def market(self):
        return self.answers.pop(0)


async def test_a_refusal_of_the_coordinator_is_logged_when_it_is_another_than_before():
    """A warning where asking again cannot help."""
    key = LendingRefused(code="invalid_api_key", message="X-API-Key is missing or unknown")
    passing = LendingRefused(code="market.rebuilding", message="in a moment", retry_after_ms=100)
    nobody = type("Market", (), {"mempools": [], "offers": []})
    market = Market(key, key, passing, passing, key, nobody, key)
    pool = type("Pool", (), {"boot_generation": 1})
    made = Borrower(
        InstanceId("i"), pool, market, lambda _: None, wanted_bytes=100, min_bytes=1, ttl_ms=1_000, every_ms=1
    )
    with capture_logs() as lines:
        while market.answers:
            await made._ask()
    told = [(line["event"], line["log_level"], line["code"]) for line in lines]
    warned = ("borrowing_refused", "warning", "invalid_api_key")
    assert told == [warned, ("borrowing_refused", "info", "market.rebuilding"), warned, warned]
    assert lines[0]["error"] == "X-API-Key is missing or unknown"


class Unfit:
    """A market, and a mempool whose pages are too small for who asks."""

    def __init__(self, world):
        self.world, self.boot_generation = world, world.m0.boot
        self.asked_at_ms, self.released = [], []
        self.keys = map(str, itertools.count())

    async def market(self):
        return self.world.a.view(now_ms=self.world.now_ms)

    async def lease(self, ask):
        self.asked_at_ms.append(self.world.now_ms)
        return self.world.a.lease(ask, next(self.keys), now_ms=self.world.now_ms)

    async def release(self, grant):
        self.released.append(grant.lease_id)
        return self.world.a.release(grant.lease_id, call(grant), now_ms=self.world.now_ms)

    async def present(self, grant):
        return CallFailed(call_id=1, code="offer.unfit", reason="pages of 2097152 bytes")


async def test_who_is_refused_for_good_leaves_the_memory_to_who_can_borrow_it(monkeypatch):
    side = Unfit(led_world())
    clock = SimpleNamespace(monotonic=lambda: side.world.now_ms / 1_000)
    monkeypatch.setattr(borrower, "time", clock)
    made = Borrower(
        InstanceId("aqua"), side, side, lambda _: None, wanted_bytes=64 << 30, min_bytes=8 << 20, ttl_ms=30_000,
        every_ms=500,
    )  # fmt: skip
    granted = []
    for number in range(120):  # a minute
        await made._ask()
        side.world.settle("a", 1)
        side.world.pass_ms(250)
        side.world.settle("a", 1)
        if number % 4 == 3:
            answer = ask(side.world, consumer="engine", key=f"e{number}")
            granted.append(isinstance(answer, Grant))
            if granted[-1]:
                side.world.a.release(answer.lease_id, call(answer), now_ms=side.world.now_ms)
        side.world.pass_ms(250)
    assert sum(granted) >= len(granted) - 2
    assert len(side.released) == len(side.asked_at_ms), (
        "what the mempool refuses is not kept until its time is over"
    )
    num_asked = len(side.asked_at_ms)
    pauses_ms = [after - before for before, after in itertools.pairwise(side.asked_at_ms)]
    assert pauses_ms == sorted(pauses_ms)
    assert pauses_ms[0] == 1_000
    assert num_asked <= 7, "it asks twice as rarely each time"
    for _ in range(3):
        side.world.pass_ms(borrower.MAX_PAUSE_S * 1_000)
        side.world.settle("a", 3)
        await made._ask()
    assert len(side.asked_at_ms) == num_asked + 3, (
        "once a minute in the end: what makes a space unfit may end"
    )
