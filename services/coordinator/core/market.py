"""The memory market: offers, leases, reclaims (AQUA section 6). No I/O: time comes in, journal entries go out.

The owning mempools decide what is lent; this says who should lend to whom, and follows their reports
(shared/wire/lending.py has the rules, market_table.py the life of a lease). An expected refusal is an answer:
LendingRefused. The shell must have stored `take_journal()` before it hands out the answer to offer(), lease()
or reclaim().
"""

from collections.abc import Callable, Iterable, Mapping

from services.coordinator.core import market_gone, market_reports
from services.coordinator.core.market_book import Book
from services.coordinator.core.market_choice import choose
from services.coordinator.core.market_records import (
    NO_BOOT,
    LeaseRecord,
    MarketEntry,
    MarketLimits,
    OfferRecord,
)
from services.coordinator.core.market_refusals import ended, full, mismatch, stale
from shared.ids import Epoch, InstanceId, LeaseId
from shared.wire.lending import (
    AskLease,
    AskReclaim,
    Grant,
    HistoryEntry,
    LeaseCall,
    LendingRefused,
    MarketView,
    MempoolReport,
    Offer,
    OfferMemory,
    OfferView,
    Placement,
    ReclaimOrder,
    ReclaimView,
    Renewed,
    ReportReply,
    Token,
)

NO_TERM = 0
FORGET_EVERY_MS = 1_000
Gone = Callable[[InstanceId], Epoch | None]  # the last epoch of who is no member any more


class Market:
    """One coordinator's. It grants only while it leads, its journal works, and the mempools of its term are
    known.

    `journal_trouble`: code of the refusal while intentions cannot be stored, set by the shell.
    """

    def __init__(self, limits: MarketLimits) -> None:
        self.book = Book(limits)
        self.limits = limits
        self.journal_trouble = ""
        self.deposing_term = NO_TERM  # the highest term of another leader that a mempool has heard of
        self._leads_until_ms = 0
        self._awaits_until_ms = 0
        self._rebuilt = False
        self._forgets_at_ms = 0

    # --- leadership

    def lead(self, term: int, *, until_ms: int, knows_all: bool, now_ms: int) -> None:
        """Begin a term: nothing is granted before the mempools have reported a fence of it.

        Args: until_ms: leads so long, see extend(); knows_all: the journal named the mempools, so that there
        is nobody else to wait for.
        """
        book = self.book
        book.term, book.next_number, book.next_id = term, 1, 1
        book.write_all()  # the store may be a new, empty one
        self.deposing_term = NO_TERM
        book.note("term_begun", str(term), "", now_ms)
        self._leads_until_ms, self._rebuilt = until_ms, False
        self._awaits_until_ms = now_ms if knows_all else now_ms + self.limits.report_ttl_ms
        for mempool in book.mempools.values():
            mempool.confirmed, mempool.heard, mempool.seen_at_ms = False, False, now_ms

    def extend(self, until_ms: int) -> None:
        """The leadership holds until then. 0: it is over."""
        self._leads_until_ms = until_ms

    def restore(
        self,
        entries: Iterable[MarketEntry],
        history: Iterable[HistoryEntry] = (),
        *,
        replace: bool,
        now_ms: int,
    ) -> None:
        """Take over a journal. Call before lead(). replace: others may have led since; here only reclaims are newer."""
        known = self.book
        if replace:
            self.book = Book(self.limits)
        self.book.restore(entries, now_ms)
        self.book.keep_reclaims(known)
        if not self.book.history:
            for entry in history:
                self.book.remember(entry, now_ms)

    def why_not(self, now_ms: int) -> str:
        """Code of the refusal that an ask for memory gets now; "" when it would be granted."""
        if now_ms >= self._leads_until_ms:
            return "market.standby"
        if self.journal_trouble:
            return self.journal_trouble
        return "" if self._is_rebuilt(now_ms) else "market.rebuilding"

    def _is_rebuilt(self, now_ms: int) -> bool:
        if not self._rebuilt and now_ms >= self._awaits_until_ms:
            ttl_ms = self.limits.report_ttl_ms
            self._rebuilt = all(
                mempool.confirmed or now_ms - mempool.seen_at_ms >= ttl_ms
                for mempool in self.book.mempools.values()
            )
            if self._rebuilt:
                self.book.note("rebuilt", str(self.book.term), f"{len(self.book.leases)} leases", now_ms)
        return self._rebuilt

    def _closed(self, now_ms: int) -> LendingRefused | None:
        code = self.why_not(now_ms)
        if code in ("", "market.standby"):
            return self._standby() if code else None
        message = "intentions cannot be stored: the journal does not answer, or is not durable"
        if code == "market.rebuilding":
            message = "not all mempools have reported to this leader yet"
        return LendingRefused(code=code, message=message, retry_after_ms=self.limits.report_interval_ms)

    def _standby(self) -> LendingRefused:
        return LendingRefused(
            code="market.standby",
            message="this coordinator does not lead",
            retry_after_ms=self.limits.report_interval_ms,
        )

    # --- producers

    def offer(self, ask: OfferMemory, key: str, *, now_ms: int) -> OfferView | LendingRefused:
        """Memory that may be lent. It is lent from once its mempool lists it."""
        if refused := self._closed(now_ms):
            return refused
        book = self.book
        if ask.producer_epoch and ask.producer_epoch < (epoch := book.epochs.get(ask.producer, NO_BOOT)):
            return stale(ask.producer, ask.producer_epoch, epoch)
        known = book.offers.get(book.keys.get(("offer", ask.producer, key), "")) if key else None
        if known is not None:
            return self.view_offer(known) if known.is_answer_to(ask) else mismatch(key)
        mempool = book.mempools.get(ask.mempool)
        if mempool is None:
            message = f"mempool {ask.mempool} has not reported yet"
            return LendingRefused(
                code="mempool.unknown", message=message, retry_after_ms=self.limits.report_idle_ms
            )
        if mempool.boot_generation != ask.boot_generation:
            message = f"mempool {ask.mempool} has boot generation {mempool.boot_generation}: attach again"
            return LendingRefused(code="offer.stale", message=message)
        if len(book.offers) >= self.limits.max_offers:
            return full(f"{self.limits.max_offers} offers")
        offer = Offer(
            offer_id=book.make_id("o"), producer=ask.producer, producer_epoch=ask.producer_epoch,
            mempool=ask.mempool, boot_generation=ask.boot_generation, space=ask.space,
            length_bytes=ask.length_bytes, key=key,
        )  # fmt: skip
        record = book.offers[offer.offer_id] = OfferRecord(offer, offer.length_bytes, now_ms)
        book.set_key("offer", ask.producer, key, offer.offer_id)
        book.write_offer(record)
        book.note("offer_made", offer.offer_id, f"{ask.producer}: {ask.length_bytes} bytes", now_ms)
        return self.view_offer(record)

    def reclaim(self, ask: AskReclaim, key: str, *, now_ms: int) -> ReclaimOrder | LendingRefused:
        """The producer wants memory back: the order that its mempool gets. It needs no journal to be safe."""
        if now_ms >= self._leads_until_ms:
            return self._standby()
        book = self.book
        known = book.reclaims.get(book.keys.get(("reclaim", ask.producer, key), "")) if key else None
        if known is not None:
            return known.order(now_ms) if known.offer_id == ask.offer_id else mismatch(key)
        offer = book.offers.get(ask.offer_id)
        if offer is None or offer.closed or offer.offer.producer != ask.producer:
            message = f"{ask.producer} has no open offer {ask.offer_id}"
            return LendingRefused(code="offer.unknown", message=message)
        keep_bytes = max(0, offer.target_bytes - ask.length_bytes) if ask.length_bytes else 0
        asked, most = list(book.open_reclaims(ask.offer_id)), self.limits.max_reclaims
        made = next((one for one in asked if one.covers(keep_bytes, ask.deadline_ms, now_ms)), None)
        if made is None and len(asked) >= most:
            return full(f"{most} open reclaims of one offer")
        made = made or book.open_reclaim(offer, keep_bytes, ask.deadline_ms, key, now_ms)
        return made.order(now_ms)

    def follow(self, members: Mapping[InstanceId, tuple[Epoch, bool]], gone: Gone, *, now_ms: int) -> None:
        """Take back what dead, replaced or gone producers offered. members: newest epoch, and whether it lives."""
        self.book.epochs = {instance: epoch for instance, (epoch, _) in members.items()}
        if now_ms >= self._leads_until_ms:
            return
        for record in self.book.offers.values():
            offer = record.offer
            if not offer.producer_epoch or record.closed or record.target_bytes == 0:
                continue
            if (member := members.get(offer.producer)) is not None:
                is_lost = member[0] > offer.producer_epoch or not member[1]
            else:  # who was never known may live: this process forgot everybody when it started
                is_lost = (gone(offer.producer) or NO_BOOT) >= offer.producer_epoch
            if is_lost:
                self.book.vacate(record, 0, now_ms)

    # --- consumers

    def lease(self, ask: AskLease, key: str, *, now_ms: int) -> Grant | LendingRefused:
        """An intention to lend, or why not."""
        if refused := self._closed(now_ms):
            return refused
        book = self.book
        if ask.consumer_epoch and ask.consumer_epoch < (epoch := book.epochs.get(ask.consumer, NO_BOOT)):
            return stale(ask.consumer, ask.consumer_epoch, epoch)
        known = book.leases.get(LeaseId(book.keys.get(("lease", ask.consumer, key), ""))) if key else None
        if known is not None:
            if not known.is_answer_to(ask):
                return mismatch(key)
            return known.grant if known.state != "ended" else ended(known)
        if len(book.leases) >= self.limits.max_leases:
            return full(f"{self.limits.max_leases} leases")
        choice = choose(book, ask, now_ms)
        if choice.offer is None:
            return LendingRefused(
                code="offers.exhausted",
                message=f"no offer has {ask.min_bytes or ask.length_bytes} bytes left in a space that was named",
                retry_after_ms=self.limits.report_idle_ms,
                largest_bytes=max(0, choice.largest_bytes),
            )
        return self._grant(ask, choice.offer.offer, choice.length_bytes, key, now_ms)

    def _grant(self, ask: AskLease, offer: Offer, length_bytes: int, key: str, now_ms: int) -> Grant:
        book, limits = self.book, self.limits
        mempool = book.mempools[offer.mempool]
        token = Token(book.term, book.next_number)
        book.next_number += 1
        ttl_ms = max(2 * limits.ttl_margin_ms, min(ask.ttl_ms or limits.lease_ttl_ms, limits.lease_ttl_ms))
        grant = Grant(
            lease_id=LeaseId(f"l-{token.term}-{token.number}"), offer_id=offer.offer_id, consumer=ask.consumer,
            purpose=ask.purpose, mempool=offer.mempool, address=mempool.address,
            boot_generation=mempool.boot_generation, space=offer.space, length_bytes=length_bytes, token=token,
            present_ms=limits.present_ms, ttl_ms=ttl_ms, consumer_ttl_ms=ttl_ms - limits.ttl_margin_ms, key=key,
        )  # fmt: skip
        lease = LeaseRecord(grant, offer.producer, "granted", length_bytes, now_ms)
        book.add_lease(lease)
        book.write_lease(lease)
        detail = f"{ask.consumer} from {offer.producer}: {length_bytes} bytes, {ask.purpose}"
        book.note("lease_granted", grant.lease_id, detail, now_ms)
        return grant

    def renew(self, lease_id: LeaseId, call: LeaseCall, *, now_ms: int) -> Renewed | LendingRefused:
        """More time, once the mempool hears of it; the answer promises only what it has confirmed."""
        lease = self._held_by(lease_id, call, now_ms)
        if isinstance(lease, LendingRefused):
            return lease
        if lease.state == "ended":
            return ended(lease)
        lease.wants_renewal = lease.was_listed and lease.state != "releasing"
        is_over = lease.state == "reclaiming"
        left_ms = lease.left_ms(now_ms) - self.limits.ttl_margin_ms
        return Renewed(
            lease_id=lease_id,
            state=lease.state,
            length_bytes=lease.held_bytes,
            consumer_ttl_ms=max(0, left_ms),
            keep_bytes=lease.keep_bytes if is_over else lease.held_bytes,
            deadline_ms=self.book.deadline_ms(lease.grant.offer_id, now_ms) if is_over else 0,
        )

    def release(self, lease_id: LeaseId, call: LeaseCall, *, now_ms: int) -> LendingRefused | None:
        """The consumer is done, and will not present the grant. None when noted; again is harmless."""
        lease = self._held_by(lease_id, call, now_ms)
        if isinstance(lease, LendingRefused):
            return lease
        self.book.move(lease, "released", now_ms)
        return None

    def _held_by(self, lease_id: LeaseId, call: LeaseCall, now_ms: int) -> LeaseRecord | LendingRefused:
        if now_ms >= self._leads_until_ms:
            return self._standby()
        lease = self.book.leases.get(lease_id)
        if lease is None:
            return LendingRefused(code="lease.unknown", message=f"no lease {lease_id}")
        if lease.grant.consumer != call.consumer or lease.grant.token != call.token:
            return LendingRefused(code="lease.stale", message=f"{lease_id} has another consumer or token")
        return lease

    # --- mempools

    def report(
        self, mempool: InstanceId, report: MempoolReport, *, now_ms: int
    ) -> ReportReply | LendingRefused:
        """What a mempool says, and what it is to do."""
        if report.fence.term > self.book.term:
            self.deposing_term = max(self.deposing_term, report.fence.term)
            self._leads_until_ms = 0
        if now_ms >= self._leads_until_ms:
            return self._standby()
        if refused := market_reports.check(self.book, mempool, report):
            return refused
        record = market_reports.learn(self.book, mempool, report, now_ms)
        return market_reports.reply(self.book, record, report.seq, now_ms)

    def tick(self, *, now_ms: int) -> None:
        """What time alone changes. Call at least every report interval."""
        book, limits = self.book, self.limits
        for lease in book.leases.values():
            waited_ms = now_ms - lease.changed_at_ms
            if lease.state == "granted" and waited_ms >= limits.present_ms + limits.ttl_margin_ms:
                book.move(lease, "overdue", now_ms)
        if now_ms < self._leads_until_ms:  # else reports are refused, and nobody is silent
            market_gone.end_silent(book, now_ms)
            self._is_rebuilt(now_ms)
        if now_ms >= self._forgets_at_ms:
            self._forgets_at_ms = now_ms + FORGET_EVERY_MS
            book.forget(now_ms)

    # --- placer, people, shell

    def place(self, placement: Placement, *, now_ms: int) -> None:
        """Who borrows from whom first, from now on."""
        self.book.pairs = list(placement.pairs)
        self.book.write_pairs()
        self.book.note("placement", "", f"{len(placement.pairs)} pairs", now_ms)

    def view_offer(self, record: OfferRecord) -> OfferView:
        """As its producer sees it."""
        return record.view(self.book.leased_bytes(record.offer.offer_id))

    def view_reclaim(self, reclaim_id: str, *, now_ms: int) -> ReclaimView | LendingRefused:
        """How far it is."""
        reclaim = self.book.reclaims.get(reclaim_id)
        if reclaim is None:
            return LendingRefused(code="reclaim.unknown", message=f"no reclaim {reclaim_id}")
        return reclaim.view(now_ms, self.book.leased_bytes(reclaim.offer_id))

    def view(self, *, now_ms: int) -> MarketView:
        """Everything."""
        book, ttl_ms = self.book, self.limits.report_ttl_ms
        why_not = self.why_not(now_ms)
        return MarketView(
            term=book.term,
            is_granting=not why_not,
            why_not=why_not,
            mempools=[m.view(now_ms, ttl_ms) for m in book.mempools.values()],
            offers=[self.view_offer(o) for o in book.offers.values()],
            leases=[x.view(now_ms, book.deadline_ms(x.grant.offer_id, now_ms)) for x in book.leases.values()],
            reclaims=[r.view(now_ms, book.leased_bytes(r.offer_id)) for r in book.reclaims.values()],
            history=[_aged(entry, now_ms - at_ms) for at_ms, entry in book.history],
        )

    def take_journal(self) -> dict[str, MarketEntry | None]:
        """Fields to store (None: to remove) since the last call."""
        taken, self.book.journal = self.book.journal, {}
        return taken

    def take_events(self) -> list[tuple[str, str, str]]:
        """(event, subject, detail) since the last call, for the log and the stored history."""
        taken, self.book.events = self.book.events, []
        return taken


def _aged(entry: HistoryEntry, age_ms: int) -> HistoryEntry:
    return HistoryEntry(event=entry.event, subject=entry.subject, detail=entry.detail, age_ms=age_ms)
