"""What a consumer knows of its loans: all of a lease may go back to its lender, or a part of it."""

from structlog.testing import capture_logs

from shared.aqua.borrower import Borrower
from shared.ids import InstanceId, LeaseId
from shared.wire.lending import LendingRefused
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone

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
