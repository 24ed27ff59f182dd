"""A mempool's report: what the coordinator learns from it, and what it answers (shared/wire/lending.py, rules
2 to 6)."""

from msgspec.structs import replace

from services.coordinator.core.market_book import HELD_STATES, Book
from services.coordinator.core.market_records import LeaseRecord, MempoolRecord, OfferRecord
from shared.ids import InstanceId, LeaseId, SpaceId
from shared.wire.lending import (
    Grant,
    LeaseReport,
    LendingRefused,
    MempoolReport,
    OfferReport,
    Renewal,
    ReportReply,
    Token,
)


def check(book: Book, mempool: InstanceId, report: MempoolReport) -> LendingRefused | None:
    """Why the report cannot be taken, if so."""
    known = book.mempools.get(mempool)
    if known is None and len(book.mempools) >= book.limits.max_mempools:
        return LendingRefused(
            code="market.full",
            message=f"{book.limits.max_mempools} mempools are the most",
            retry_after_ms=1_000,
        )
    if known is not None and report.boot_generation < known.boot_generation:
        message = f"{mempool} has boot generation {known.boot_generation}, not {report.boot_generation}"
        return LendingRefused(code="epoch.stale", message=message)
    return None


def learn(book: Book, mempool: InstanceId, report: MempoolReport, now_ms: int) -> MempoolRecord:
    """Take over what the report says; one that is older than the newest known changes nothing."""
    record = book.mempools.get(mempool)
    if record is None:
        record = book.mempools[mempool] = MempoolRecord(mempool, seen_at_ms=now_ms)
        book.note("mempool_new", mempool, report.address, now_ms)
    is_new_boot = report.boot_generation > record.boot_generation
    if not is_new_boot and report.seq <= record.seq:
        return record
    if is_new_boot or report.address != record.address:
        record.boot_generation, record.address = report.boot_generation, report.address
        book.write_mempool(record)
    record.seq, record.fence, record.host = report.seq, report.fence, report.host
    record.spaces, record.seen_at_ms, record.heard = report.spaces, now_ms, True
    was_confirmed, record.confirmed = record.confirmed, report.fence.term >= book.term
    if record.confirmed and not was_confirmed:
        book.note("mempool_confirmed", mempool, f"boot {report.boot_generation}", now_ms)
    for offer in report.offers:
        _learn_offer(book, record, offer, now_ms)
    for lease in report.leases:
        _learn_lease(book, record, lease, now_ms)
    _miss_leases(book, record, {lease.lease_id for lease in report.leases}, now_ms)
    _miss_offers(book, record, {offer.offer.offer_id for offer in report.offers}, now_ms)
    _finish_reclaims(book, record, now_ms)
    return record


def reply(book: Book, record: MempoolRecord, seq: int, now_ms: int) -> ReportReply:
    """Everything the mempool has still to do. Renewals are told once: a lost one is asked for again."""
    limits, offers, reclaims, renewals, releases = book.limits, [], [], [], []
    own_offers = [x for x in book.offers.values() if x.offer.mempool == record.mempool]
    for offer in own_offers:
        is_here = offer.offer.boot_generation == record.boot_generation
        if offer.state == "proposed" and is_here and offer.target_bytes > 0:
            offers.append(replace(offer.offer, length_bytes=offer.target_bytes))
        reclaims += [reclaim.tell(now_ms) for reclaim in book.open_reclaims(offer.offer.offer_id)]
    is_busy = bool(offers or reclaims)
    fence = Token(book.term, book.next_number)
    for lease in book.leases.values():
        if lease.mempool != record.mempool or lease.state == "ended":
            continue
        is_busy = True
        if lease.state == "granted" and lease.grant.token.term == book.term:
            fence = min(fence, lease.grant.token)
        if lease.state == "releasing" and lease.was_listed:
            releases.append(lease.grant.lease_id)
        if lease.wants_renewal:
            lease.wants_renewal = False
            renewals.append(Renewal(lease_id=lease.grant.lease_id, ttl_ms=lease.grant.ttl_ms))
    return ReportReply(
        seq=seq,
        fence=fence,
        interval_ms=limits.report_interval_ms if is_busy else limits.report_idle_ms,
        ttl_ms=limits.report_ttl_ms,
        offers=offers,
        reclaims=reclaims,
        renewals=renewals,
        releases=releases,
    )


def _learn_offer(book: Book, mempool: MempoolRecord, report: OfferReport, now_ms: int) -> None:
    offer = report.offer
    record = book.offers.get(offer.offer_id)
    if record is None and not offer.length_bytes and not report.leased_bytes:
        return  # worth nothing, and forgotten here
    if record is None:
        record = book.offers[offer.offer_id] = OfferRecord(offer, offer.length_bytes, now_ms)
        book.set_key("offer", offer.producer, offer.key, offer.offer_id)
        book.write_offer(record)
        book.note("offer_found", offer.offer_id, f"{offer.producer}: {offer.length_bytes} bytes", now_ms)
    elif record.closed and offer.length_bytes > 0:
        # Back from a mempool that was gone, or presented late. What was reclaimed stays so: target_bytes is kept.
        record.closed = False
        book.write_offer(record)
        book.note("offer_found", offer.offer_id, f"{offer.producer}: again", now_ms)
    elif record.reported_bytes is None and not record.closed:
        book.note("offer_open", offer.offer_id, f"{offer.producer}: {offer.length_bytes} bytes", now_ms)
    if not record.closed:
        record.reported_bytes, record.leased_bytes = offer.length_bytes, report.leased_bytes
    if record.offer.boot_generation != offer.boot_generation:  # a new mempool took it over
        record.offer = replace(record.offer, boot_generation=offer.boot_generation)
        book.write_offer(record)
    if record.target_bytes > offer.length_bytes:
        record.target_bytes = offer.length_bytes  # the mempool heard of a reclaim that this coordinator lost
        book.write_offer(record)
    elif offer.length_bytes > record.target_bytes and not any(book.open_reclaims(offer.offer_id)):
        book.vacate(record, record.target_bytes, now_ms)


def _learn_lease(book: Book, mempool: MempoolRecord, report: LeaseReport, now_ms: int) -> None:
    lease = book.leases.get(report.lease_id)
    if lease is None:
        lease = _found(book, mempool, report, now_ms)
        book.add_lease(lease)
        book.write_lease(lease)
        book.note("lease_found", report.lease_id, f"{report.consumer}: {report.length_bytes} bytes", now_ms)
    book.move(lease, "listed", now_ms)
    lease.was_listed = True
    lease.held_bytes, lease.remaining_ms, lease.seen_at_ms = report.length_bytes, report.remaining_ms, now_ms


def _found(book: Book, mempool: MempoolRecord, report: LeaseReport, now_ms: int) -> LeaseRecord:
    offer = book.offers.get(report.offer_id)
    grant = Grant(
        lease_id=report.lease_id,
        offer_id=report.offer_id,
        consumer=report.consumer,
        purpose=report.purpose,
        mempool=mempool.mempool,
        address=mempool.address,
        boot_generation=mempool.boot_generation,
        space=offer.offer.space if offer is not None else SpaceId(0),
        length_bytes=report.length_bytes,
        token=report.token,
        present_ms=0,
        ttl_ms=book.limits.lease_ttl_ms,
        consumer_ttl_ms=book.limits.lease_ttl_ms - book.limits.ttl_margin_ms,
        key=report.key,
    )
    producer = offer.offer.producer if offer is not None else InstanceId("")
    return LeaseRecord(grant, producer, "held", report.length_bytes, now_ms, was_listed=True)


def _miss_leases(book: Book, mempool: MempoolRecord, listed: set[LeaseId], now_ms: int) -> None:
    """Leases that the report does not list: over, or not presented yet."""
    for lease in list(book.leases.values()):
        if lease.mempool != mempool.mempool or lease.state == "ended" or lease.grant.lease_id in listed:
            continue
        is_other_boot = lease.grant.boot_generation != mempool.boot_generation
        if lease.was_listed:
            book.move(lease, "unlisted", now_ms)
        elif lease.grant.token < mempool.fence or is_other_boot:
            book.move(lease, "fenced", now_ms)


def _miss_offers(book: Book, mempool: MempoolRecord, listed: set[str], now_ms: int) -> None:
    """Offers that the report does not list: dropped by the mempool, or not heard of yet."""
    for record in book.offers.values():
        offer = record.offer
        if offer.mempool != mempool.mempool or record.closed or offer.offer_id in listed:
            continue
        if record.reported_bytes is not None or offer.boot_generation != mempool.boot_generation:
            book.close_offer(record, "the mempool has dropped it", now_ms)
        elif record.target_bytes == 0:
            book.close_offer(record, "taken back", now_ms)


def _finish_reclaims(book: Book, mempool: MempoolRecord, now_ms: int) -> None:
    """What this report proves to be done, and what each lease may keep of the rest."""
    for record in book.offers.values():
        if record.offer.mempool != mempool.mempool:
            continue
        offer_id, held_bytes = record.offer.offer_id, 0
        for lease in book.leases_of(offer_id):
            held_bytes += lease.held_bytes if lease.state in HELD_STATES and lease.was_listed else 0
        lends_bytes = 0 if record.closed else record.reported_bytes
        for reclaim in list(book.open_reclaims(offer_id)):
            if lends_bytes is not None and max(lends_bytes, held_bytes) <= reclaim.keep_bytes:
                book.finish_reclaim(reclaim, now_ms)
        if record.target_bytes == 0 and not record.closed and lends_bytes == 0 and held_bytes == 0:
            book.close_offer(record, "taken back", now_ms)
        book.share_out(offer_id, now_ms)
