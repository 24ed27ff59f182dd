"""What no report can end, because its mempool or its offer is not known: damaged or half-lost journals leave that.

A mempool that is only late is known again by its next report; so what it could still speak for is waited for as long as
a silent mempool is.
"""

from services.coordinator.core.market_book import Book
from services.coordinator.core.market_records import ReclaimRecord


def end_orphans(book: Book, now_ms: int) -> None:
    """End what is forget_after_ms old. Cost: a pass over leases and reclaims."""
    before_ms = now_ms - book.limits.forget_after_ms
    for lease in book.leases.values():
        if lease.state != "ended" and lease.mempool not in book.mempools and lease.changed_at_ms <= before_ms:
            book.move(lease, "gone", now_ms)
    for reclaim in book.reclaims.values():
        if reclaim.done_at_ms is None and reclaim.asked_at_ms <= before_ms and _is_orphan(book, reclaim):
            book.finish_reclaim(reclaim, now_ms)


def _is_orphan(book: Book, reclaim: ReclaimRecord) -> bool:
    record = book.offers.get(reclaim.offer_id)
    return record is None or (record.closed and record.offer.mempool not in book.mempools)
