"""The memory market with its journal and its leadership: what core/market.py decides is stored before it is
said."""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.coordinator.config import CoordinatorSettings, market_limits
from services.coordinator.core.leadership import Leadership
from services.coordinator.core.market import Market
from services.coordinator.market_journal import Fence, MarketJournal, NotLeading
from shared.background_task import begin_task
from shared.errors import ClusterError
from shared.ids import InstanceId, LeaseId
from shared.observe.log import get_logger
from shared.observe.metrics import counter, gauge
from shared.transport.clock import Clock
from shared.wire.lending import (
    AskLease,
    AskReclaim,
    Grant,
    HistoryEntry,
    LeaseCall,
    LendingRefused,
    MarketView,
    MempoolReport,
    OfferMemory,
    OfferView,
    Placement,
    ReclaimOrder,
    ReclaimView,
    Renewed,
    ReportReply,
)
from shared.wire.lending_limits import check_range

SOLO_LEASE_MS = 1 << 60
TICK_S = 0.25
RETRY_S = 1.0
FAR_US = 10 * 366 * 86_400 * 1_000_000  # terms are of clocks, and none is so far ahead

T = TypeVar("T")

_log = get_logger("coordinator")
_events = counter("quire_coordinator_market_events_total", "What happened in the memory market.", ("event",))
_refusals = counter("quire_coordinator_market_refusals_total", "Refused asks for memory, by code.", ("code",))
_term = gauge("quire_coordinator_term", "Term of this coordinator's newest leadership.")
_leads = gauge("quire_coordinator_leads", "1 while this coordinator leads.")
_bytes = gauge("quire_coordinator_market_bytes", "Bytes that may be lent, and that are leased.", ("what",))


async def no_wait() -> None:
    """Nothing has to be known before a term begins."""


class MarketShell:
    """start() once, stop() once.

    Args:
        url: where this coordinator is reached.
        before_lead: waited for behind a claim of a new term, which it may hold up for a second.
        on_lead: runs when a new term begins, before anything is served in it.
        on_stand_by: runs whenever the store says that another one leads.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        clock: Clock,
        *,
        url: str,
        unix_us: Callable[[], int],
        on_lead: Callable[[], None],
        before_lead: Callable[[], Awaitable[None]] = no_wait,
        on_stand_by: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._unix_us = unix_us
        self._on_lead = on_lead
        self._before_lead = before_lead
        self._on_stand_by = on_stand_by
        self.leadership = Leadership(settings.leader_lease_ms)
        self.market = Market(market_limits(settings))
        self.fsync_policy = ""
        self._journal: MarketJournal | None = None
        self._claim_problem = ""  # why the store does not say who leads, though it answers
        self._must_check = True  # whether Redis writes through to disk
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        if settings.redis_url:
            self._journal = MarketJournal(
                settings.redis_url,
                owner=f"{settings.instance}@{socket.gethostname()} {url}",  # 127.0.0.1 is every host
                boot=uuid.uuid4().hex,
                url=url,
                on_up=self._journal_is_up,
            )
            self.market.journal_trouble = "journal.down"

    async def start(self, wait_ms: int) -> None:
        """Begin; wait at most `wait_ms` for the store to say who leads. Without a store this process leads
        alone."""
        if self._journal is None:
            self._begin_term(self._unix_us(), self._clock.now_ms() + SOLO_LEASE_MS, knows_all=False)
        else:
            self._journal.open()
            self._tasks.append(begin_task(self._keep_leading(), "leadership"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._answered.wait()
        self._tasks.append(begin_task(self._tick(), "market-tick"))

    async def stop(self) -> None:
        """Write what is pending, resign, stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._journal is not None:
            with contextlib.suppress(ClusterError):
                await self._store()
            await self._journal.close(resign=self.leadership.is_leading(self._clock.now_ms()))

    def role(self) -> str:
        """ "leader" | "standby" | "unknown": Redis has not said."""
        if self._journal is None:
            return "leader"
        return self.leadership.role(self._clock.now_ms())

    @property
    def problem(self) -> str:
        """Why this process does not know who leads, in words for an operator; "" when it does."""
        if self._journal is None or self.role() != "unknown":
            return ""
        if not self._journal.up:
            return self._journal.down_reason
        return self._claim_problem or "Redis has not said yet who leads"

    @property
    def fence(self) -> Fence | None:
        """What the store checks before it takes this process's word for a leader's; None while it has not said who
        leads."""
        if self._journal is None or self.role() == "unknown":
            return None
        return (*self._journal.who, self.leadership.term)

    # --- calls whose answer is stored first

    async def offer(self, ask: OfferMemory, key: str) -> OfferView | LendingRefused:
        """POST /v1/offers."""
        return await self._stored(self.market.offer(ask, key, now_ms=self._clock.now_ms()))

    async def lease(self, ask: AskLease, key: str) -> Grant | LendingRefused:
        """POST /v1/leases."""
        return await self._stored(self.market.lease(ask, key, now_ms=self._clock.now_ms()))

    async def reclaim(self, ask: AskReclaim, key: str) -> ReclaimOrder | LendingRefused:
        """POST /v1/reclaims. It also works while the journal is down: mempools remember it. Who does not lead any more
        refuses it: nobody hears its orders."""
        answer = self.market.reclaim(ask, key, now_ms=self._clock.now_ms())
        stored = await self._stored(answer)
        is_down = isinstance(stored, LendingRefused) and stored.code == "journal.down"
        return answer if is_down else stored

    async def place(self, placement: Placement) -> LendingRefused | None:
        """PUT /v1/placement."""
        if self.role() != "leader":
            return LendingRefused(code="market.standby", message="this coordinator does not lead")
        self.market.place(placement, now_ms=self._clock.now_ms())
        answer = await self._stored(placement)
        return answer if isinstance(answer, LendingRefused) else None

    # --- calls that need no store

    def renew(self, lease_id: LeaseId, call: LeaseCall) -> Renewed | LendingRefused:
        """POST /v1/leases/{id}/renew."""
        return self._counted(self.market.renew(lease_id, call, now_ms=self._clock.now_ms()))

    def release(self, lease_id: LeaseId, call: LeaseCall) -> LendingRefused | None:
        """POST /v1/leases/{id}/release."""
        return self._counted(self.market.release(lease_id, call, now_ms=self._clock.now_ms()))

    def report(self, mempool: InstanceId, report: MempoolReport) -> ReportReply | LendingRefused:
        """PUT /v1/mempools/{id}/report. Raises: InvalidRequest for a term that no coordinator had: above the largest
        there is none."""
        most = max(self.market.book.term, time.time_ns() // 1_000 + FAR_US)
        check_range("fence.term", report.fence.term, 0, most)
        answer = self._counted(self.market.report(mempool, report, now_ms=self._clock.now_ms()))
        if self.market.deposing_term:
            self._wake.set()
        return answer

    def view(self) -> MarketView:
        """GET /v1/market."""
        return self.market.view(now_ms=self._clock.now_ms())

    def view_reclaim(self, reclaim_id: str) -> ReclaimView | LendingRefused:
        """GET /v1/reclaims/{id}."""
        return self.market.view_reclaim(reclaim_id, now_ms=self._clock.now_ms())

    def placement(self) -> Placement:
        """GET /v1/placement."""
        return Placement(pairs=self.market.book.pairs)

    # --- inside

    def _counted(self, answer: T) -> T:
        if isinstance(answer, LendingRefused):
            _refusals.labels(answer.code).inc()
        return answer

    async def _stored(self, answer: T) -> T | LendingRefused:
        self._counted(answer)
        if isinstance(answer, LendingRefused):
            return answer
        term = self.leadership.term
        try:
            await self._store()
        except NotLeading as error:
            self._lost(term)
            return self._counted(LendingRefused(code=error.code, message=error.message, retry_after_ms=500))
        except ClusterError as error:
            return self._counted(
                LendingRefused(code="journal.down", message=error.message, retry_after_ms=500)
            )
        return answer

    async def _store(self) -> None:
        fields, events = self.market.take_journal(), self.market.take_events()
        for event, subject, detail in events:
            _events.labels(event).inc()
            _log.info(event, subject=subject, detail=detail)
        if self._journal is not None:
            self._journal.note(fields, events)
            await self._journal.flush()

    def _lost(self, term: int) -> None:
        if term == self.leadership.term:  # else it leads again already
            self._pause()
            self._wake.set()

    def _pause(self) -> None:
        self.leadership.until_ms = 0
        self.market.extend(0)

    def _begin_term(self, term: int, until_ms: int, *, knows_all: bool) -> None:
        now_ms = self._clock.now_ms()
        self.market.lead(term, until_ms=until_ms, knows_all=knows_all, now_ms=now_ms)
        _term.set(term)
        self._on_lead()

    def _journal_is_up(self) -> None:
        self._must_check = True
        self._wake.set()

    async def _keep_leading(self) -> None:
        while True:
            journal = self._journal
            assert journal is not None
            if journal.up:
                try:
                    await self._claim(journal)
                    self._claim_problem = ""
                except ClusterError as error:
                    if error.message != self._claim_problem:  # it asks every second
                        _log.warning("claim_failed", error=error.message)
                    self._claim_problem = error.message
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.leader_lease_ms / 3000):
                    await self._wake.wait()

    async def _claim(self, journal: MarketJournal) -> None:
        market, leadership = self.market, self.leadership
        asked_at_ms = self._clock.now_ms()
        # where grants depend on it, each time: an operator may change it meanwhile
        if self._must_check or self._settings.journal_fsync == "always":
            await self._check_durability(journal)
        claim = await journal.claim(
            self._settings.leader_lease_ms, above_term=market.deposing_term, known_term=leadership.term
        )
        if not claim.term:
            if leadership.leader_url != claim.leader_url:
                _log.info("standby", leader=claim.leader_url)
            leadership.refused(claim.leader_url)
            market.extend(0)
            journal.forget()
            self._on_stand_by()
            self._answered.set()
            return
        if claim.term != leadership.term:
            self._pause()  # the term before is over, though nobody else may have led: its journal may be lost
            journal.forget()
            stored = await journal.read()
            history = [HistoryEntry(event=e, subject=s, detail=d, age_ms=0) for e, s, d in stored.history]
            # An empty store was wiped: what this process still knows is more.
            market.restore(
                stored.entries, history, replace=stored.knows_mempools, now_ms=self._clock.now_ms()
            )
            await self._before_lead()
            journal.begin(claim.term)
            leadership.claimed(claim.term, asked_at_ms=asked_at_ms)
            self._begin_term(claim.term, leadership.until_ms, knows_all=stored.knows_mempools)
        leadership.claimed(claim.term, asked_at_ms=asked_at_ms)
        market.extend(leadership.until_ms)
        self._answered.set()
        await self._store()

    async def _check_durability(self, journal: MarketJournal) -> None:
        self._must_check = False  # another connection meanwhile sets it again
        try:
            policy = await journal.fsync_policy()
        except ClusterError:
            self._must_check = True
            raise
        if policy != self.fsync_policy:
            self.fsync_policy = policy
            if policy == "always":
                _log.info("journal_durable", appendfsync=policy)
            else:
                _log.warning(
                    "journal_not_durable",
                    appendfsync=policy,
                    needs="appendonly yes and appendfsync always",
                    grants=self._settings.journal_fsync != "always",
                )

    def _trouble(self) -> str:
        if self._journal is None:
            return ""
        if not self._journal.up:
            return "journal.down"
        if self._settings.journal_fsync == "always" and (self._must_check or self.fsync_policy != "always"):
            return "journal.not_durable"
        return ""

    async def _tick(self) -> None:
        while True:
            now_ms = self._clock.now_ms()
            self.market.journal_trouble = self._trouble()
            self.market.tick(now_ms=now_ms)
            if self._journal is None and self.market.deposing_term:  # its clock went back over a restart
                term = max(self._unix_us(), self.market.deposing_term + 1)
                self._begin_term(term, now_ms + SOLO_LEASE_MS, knows_all=False)
            _leads.set(self.role() == "leader")
            if self.role() == "leader":
                term = self.leadership.term
                try:
                    await self._store()
                except NotLeading:
                    self._lost(term)
                except ClusterError as error:
                    _log.warning("market_journal_failed", error=error.message)
                    await asyncio.sleep(RETRY_S)
            offers = self.market.book.offers.values() if self.role() != "standby" else ()
            _bytes.labels("offered").set(sum(offer.limit_bytes for offer in offers))
            leased = (self.market.book.leased_bytes(offer.offer.offer_id) for offer in offers)
            _bytes.labels("leased").set(sum(leased))
            await asyncio.sleep(TICK_S)
