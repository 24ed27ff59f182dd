"""Who is silent for long, and what no report can end: its mempool or its offer is not known.

Silence proves nothing: a mempool that is only cut off lends on, and is known again by its next report. So leases and
offers are forgotten, and found again then; a reclaim, which nobody would ask for a second time, stays open.
"""

from services.coordinator.core.market_book import Book
from services.coordinator.core.market_records import ReclaimRecord
from shared.ids import InstanceId


def end_silent(book: Book, now_ms: int) -> None:
    """Call while this coordinator leads. End what was not heard of for forget_after_ms, and drop reclaims that nothing
    was heard of for lost_after_ms. Cost: a pass over offers, leases and reclaims."""
    before_ms = now_ms - book.limits.forget_after_ms
    for mempool in list(book.mempools.values()):
        if mempool.seen_at_ms <= before_ms:
            _forget_mempool(book, mempool.mempool, now_ms)
    for record in book.offers.values():
        if record.state == "proposed" and record.changed_at_ms <= before_ms:
            book.close_offer(record, "its mempool never took it", now_ms)
    for lease in book.leases.values():  # of a mempool that damaged or half-lost journals do not name
        if lease.state != "ended" and lease.mempool not in book.mempools and lease.changed_at_ms <= before_ms:
            book.move(lease, "gone", now_ms)
    for reclaim in list(book.reclaims.values()):
        if reclaim.done_at_ms is None and _is_lost(book, reclaim, now_ms):
            book.lose_reclaim(reclaim, now_ms)


def _forget_mempool(book: Book, mempool: InstanceId, now_ms: int) -> None:
    for lease in book.leases.values():
        if lease.mempool == mempool and lease.state != "ended":
            book.move(lease, "gone", now_ms)
    for record in book.offers.values():
        if record.offer.mempool == mempool:
            book.close_offer(record, "its mempool is gone", now_ms)
            for reclaim in book.open_reclaims(record.offer.offer_id):
                reclaim.told = False  # the answer may not have come
    del book.mempools[mempool]
    book.journal[f"mempool:{mempool}"] = None
    book.note("mempool_gone", mempool, "", now_ms)


def _is_lost(book: Book, reclaim: ReclaimRecord, now_ms: int) -> bool:
    record, since_ms = book.offers.get(reclaim.offer_id), reclaim.asked_at_ms
    if record is not None:
        if not record.closed or record.offer.mempool in book.mempools:
            return False
        since_ms = max(since_ms, record.changed_at_ms)
    return now_ms - since_ms >= book.limits.lost_after_ms
