"""What this mempool tells the coordinator of its loans, and what it does about the answer. No I/O.

The mempool is the truth (shared/wire/lending.py, rules 3 to 6): every report says everything, the fence only grows, and
orders that are said again do nothing twice.
"""

from collections.abc import Mapping
from contextlib import suppress

from msgspec.structs import replace

from services.mempool.core.lending import Lending
from services.mempool.core.loan_state import LoanState
from services.mempool.core.loans import Loan, LoanRefused
from services.mempool.core.pool import Pool
from shared.ids import SpaceId
from shared.wire.lending import (
    MAX_DURATION_MS,
    LeaseReport,
    MempoolReport,
    OfferReport,
    ReportReply,
    SpaceReport,
)


def make_report(
    lending: Lending, pools: Mapping[int, Pool], seq: int, now_ms: int, *, address: str = "", host: str = ""
) -> MempoolReport:
    """Everything that is lent and known now, to be sent: it is noted which offers it says are worth nothing.

    An offer is told of once its pages are set aside.

    Args: address: where consumers reach this mempool; host: boot id of the host.
    """
    loans = lending.loans
    offers = [
        OfferReport(
            offer=replace(known, length_bytes=offer.limit * lending.unit_bytes(offer.producer)),
            leased_bytes=loans.lent(offer) * lending.unit_bytes(offer.producer),
        )
        for offer_id, offer in loans.offers.items()
        if not lending.is_collecting(offer_id) and (known := lending.known_offers.get(offer_id)) is not None
    ]
    for each in offers:
        loans.offers[each.offer.offer_id].is_told = not each.offer.length_bytes
    leases = [_lease(lending, loan, now_ms) for loan in loans.loans.values()]
    return MempoolReport(
        boot_generation=loans.boot_generation, seq=seq, fence=loans.fence, address=address, host=host,
        spaces=_spaces(lending, pools), offers=offers, leases=leases,
    )  # fmt: skip


def _lease(lending: Lending, loan: Loan, now_ms: int) -> LeaseReport:
    grant = lending.known_grants[loan.lease_id]
    returning = "reclaiming" if loan.keep else "ending"
    return LeaseReport(
        lease_id=loan.lease_id, offer_id=loan.offer.offer_id, consumer=loan.consumer, purpose=grant.purpose,
        length_bytes=loan.num_pages * lending.unit_bytes(loan.offer.producer), token=loan.token,
        remaining_ms=min(MAX_DURATION_MS, max(0, loan.expires_at_ms - now_ms)),
        state="held" if loan.state is LoanState.HELD else returning, key=grant.key,
    )  # fmt: skip


def _spaces(lending: Lending, pools: Mapping[int, Pool]) -> list[SpaceReport]:
    out: list[SpaceReport] = []
    for number, pool in pools.items():
        memory = pool.memory
        if memory is None or memory.is_behind:
            continue
        name = ",".join(memory.devices[rank] for rank in sorted(memory.devices))
        unit = lending.unit_bytes(number)
        out.append(
            SpaceReport(
                space=SpaceId(number),
                name=name or f"cpu:{memory.label}".strip(":"),
                total_bytes=memory.table.num_pages * unit,
                free_bytes=memory.table.num_free * unit,
                unit_bytes=unit,
            )
        )
    return out


def obey(lending: Lending, reply: ReportReply, now_ms: int) -> None:
    """Carry out what the coordinator answered to the newest report. A leader that is not the newest is not heard."""
    if reply.fence.term < lending.loans.fence.term:
        lending.loans.counters["replies_of_old_leaders"] += 1
        return
    lending.loans.raise_fence(reply.fence)
    for offer in reply.offers:
        with suppress(LoanRefused):  # the coordinator sees by the next report that it is not known
            lending.know(offer, now_ms)
    lending.loans.forget_idle({offer.offer_id for offer in reply.offers})
    for order in reply.reclaims:
        with suppress(LoanRefused):
            lending.reclaim(order, now_ms)
    for renewal in reply.renewals:
        lending.loans.renew(renewal.lease_id, min(renewal.ttl_ms, lending.max_ttl_ms), now_ms)
    for lease_id in reply.releases:
        lending.loans.release(lease_id, now_ms)
