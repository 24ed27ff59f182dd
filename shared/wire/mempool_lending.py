"""What the coordinator's market answered, presented to the mempool that owns the pages (shared/wire/lending.py).

Calls of clients, answered by LendingDone, or by CallFailed with the reason's code: what is presented has no effect
before the mempool accepts it. Each may be said again: the answer is the same, and nothing happens twice.

Where a mempool asks the market by itself (Attached.load_interval_ms), fronts of engines report their load to it, and
hear what memory their engine has after each change (AQUA 6, northbound interface). Both are one-way.
"""

from msgspec import Struct

from shared.ids import Epoch, LeaseId
from shared.wire.lending import Grant, Offer, ReclaimOrder


class PresentOffer(Struct, frozen=True, kw_only=True, tag="present_offer"):
    """By the producer: pages of its space are set aside from now on. `num_bytes` of the answer: what it is worth now;
    less when engines do not give back as much."""

    call_id: int
    offer: Offer


class PresentGrant(Struct, frozen=True, kw_only=True, tag="present_grant"):
    """By the consumer: lend, if the grant is good. `num_bytes` of the answer: what is on loan."""

    call_id: int
    grant: Grant


class PresentReclaim(Struct, frozen=True, kw_only=True, tag="present_reclaim"):
    """By the producer: its offer is worth less, and its loans fit by the deadline."""

    call_id: int
    order: ReclaimOrder


class RenewLoan(Struct, frozen=True, kw_only=True, tag="renew_loan"):
    """By the consumer: it ends ttl_ms from now, its grant's at most, or later if it would anyway."""

    call_id: int
    lease_id: LeaseId
    ttl_ms: int


class ReleaseLoan(Struct, frozen=True, kw_only=True, tag="release_loan"):
    """By the consumer: it is done with it; blocks there leave for host memory."""

    call_id: int
    lease_id: LeaseId


class LendingDone(Struct, frozen=True, kw_only=True, tag="lending_done"):
    """It is so. `num_bytes`: lent by an offer, held by a grant, or still held by a renewed loan. `budget_bytes_per_s`:
    of an offer: what may be copied from and to its lent pages; 0: no limit."""

    call_id: int
    num_bytes: int = 0
    budget_bytes_per_s: int = 0


class ReportLoad(Struct, frozen=True, kw_only=True, tag="report_load"):
    """By the front of an engine, every load_interval_ms. Totals are since its start.

    `instance_epoch`: of its membership, 0 without one. `kv_used_share`: of the pages that the engine has, as requests
    that run use them; cached ones are not used. `num_pages_in_use`: of its space, by its requests, those that others
    sealed and leases pin for them too; None: it does not count them.
    """

    instance_epoch: Epoch = Epoch(0)
    model: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_arrived: int = 0
    num_preempted: int = 0
    kv_used_share: float = 0.0
    num_pages_in_use: int | None = None


class MemoryShares(Struct, frozen=True, kw_only=True, tag="memory_shares"):
    """To who reports load, after a change: of its engine's space, all ranks together. What is offered is lent or set
    aside."""

    total_bytes: int
    offered_bytes: int = 0
    lent_bytes: int = 0
    borrowed_bytes: int = 0


LendingCall = PresentOffer | PresentGrant | PresentReclaim | RenewLoan | ReleaseLoan
ToLending = LendingCall | ReportLoad
FromLending = LendingDone | MemoryShares
