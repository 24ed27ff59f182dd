"""What a consumer knows of its loans: all of a lease may go back to its lender, or a part of it."""

from shared.aqua.borrower import Borrower
from shared.ids import InstanceId, LeaseId
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
