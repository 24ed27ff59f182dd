"""The coordinator without its HTTP: membership, its journal, clock, metrics. The market: market_shell.py."""

import asyncio
import contextlib
import time
from typing import Any

from services.coordinator.config import CoordinatorSettings
from services.coordinator.core.membership import Full, JournalEntry, Membership, Stale, Unknown
from services.coordinator.journal import Journal
from services.coordinator.market_shell import MarketShell
from shared.background_task import begin_task
from shared.errors import ClusterError
from shared.ids import Epoch, InstanceId
from shared.observe.log import get_logger
from shared.observe.metrics import counter, gauge
from shared.transport.clock import Clock
from shared.wire.membership import Heartbeat, HeartbeatReply, InstanceList, Register, Registered

_log = get_logger("coordinator")
_registered = counter("quire_coordinator_registrations_total", "Epochs granted.")
_heartbeats = counter("quire_coordinator_heartbeats_total", "Heartbeats, by outcome.", ("outcome",))
_beat_ok, _beat_stale, _beat_unknown = (_heartbeats.labels(o) for o in ("ok", "stale", "unknown"))
_members = gauge("quire_coordinator_members", "Members, by state.", ("state",))


class Coordinator:
    """start() once, stop() once. Its methods answer one REST call each, without waiting."""

    def __init__(self, settings: CoordinatorSettings, clock: Clock, *, url: str = "") -> None:
        self._clock = clock
        self._settings = settings
        self._membership = Membership(
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            ttl_ms=settings.ttl_ms,
            forget_after_ms=settings.forget_after_ms,
            max_members=settings.max_members,
            version=_unix_us(),  # so that it also grows across restarts
        )
        self._journal: Journal | None = None
        if settings.redis_url:
            self._journal = Journal(settings.redis_url, self._restore, lambda: self.lending.fence)
        self._ticking: asyncio.Task[None] | None = None
        self.lending = MarketShell(
            settings, clock, url=url, unix_us=_unix_us,
            before_lead=self._read_members, on_lead=self._lead, on_stand_by=self._stand_by,
        )  # fmt: skip
        self._read: list[JournalEntry] = []  # for the term that is about to begin

    async def start(self) -> None:
        """Take over the journal if Redis answers soon, and go on without it if not."""
        await self.lending.start(self._settings.journal_wait_ms)
        if self._journal is not None and not await self._journal.start(self._settings.journal_wait_ms):
            _log.warning("journal_not_reached", wait_ms=self._settings.journal_wait_ms)
        self._ticking = begin_task(self._tick(self._clock.now_ms()), "coordinator-tick")

    async def stop(self) -> None:
        """Write what is pending, resign and stop: whoever leads next reads what was written, and nobody else may
        write then."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if self._journal is not None:
            await self._journal.close()
        await self.lending.stop()

    def register(self, register: Register) -> Registered | Full:
        """POST /v1/instances."""
        reply = self._membership.register(register, now_ms=self._clock.now_ms(), now_unix_us=_unix_us())
        if isinstance(reply, Registered):
            _registered.inc()
            _log.info(
                "member_registered", member=register.instance, epoch=reply.epoch, role=register.role,
                endpoint=register.endpoint,
            )  # fmt: skip
        self._flush()
        return reply

    def heartbeat(self, instance: InstanceId, heartbeat: Heartbeat) -> HeartbeatReply | Unknown | Stale:
        """POST /v1/instances/{id}/heartbeat."""
        reply = self._membership.heartbeat(instance, heartbeat, now_ms=self._clock.now_ms())
        if isinstance(reply, HeartbeatReply):
            _beat_ok.inc()
        else:
            (_beat_stale if isinstance(reply, Stale) else _beat_unknown).inc()
            _log.info("heartbeat_refused", member=instance, epoch=heartbeat.epoch, reply=type(reply).__name__)
        return reply

    def remove(self, instance: InstanceId, epoch: Epoch) -> Unknown | Stale | None:
        """DELETE /v1/instances/{id}."""
        reply = self._membership.remove(instance, epoch)
        if reply is None:
            _log.info("member_left", member=instance, epoch=epoch)
        self._flush()
        return reply

    def listing(self) -> InstanceList:
        """GET /v1/instances."""
        return self._membership.listing(now_ms=self._clock.now_ms())

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Ready without Redis too: the journal is best effort."""
        return True, {
            "members": len(self.listing().instances),
            "journal": self._journal.up if self._journal is not None else "none",
            "role": self.lending.role(),
            "term": self.lending.leadership.term,
            "problem": self.lending.problem,
        }

    @property
    def leader_url(self) -> str:
        """Where the leader is, while this one stands by; else ""."""
        return self.lending.leadership.leader_url if self.lending.role() == "standby" else ""

    async def _read_members(self) -> None:
        """A term is about to begin: whom the leader before knew is known then, or would be told to register again."""
        self._read = []
        if self._journal is not None:
            with contextlib.suppress(ClusterError):  # they are read again
                self._read = await self._journal.read_members()

    def _lead(self) -> None:
        """A new term: others may have led, so members and the journal know more than this process."""
        now_ms = self._clock.now_ms()
        self._membership.lead(now_ms=now_ms)
        self._membership.restore(self._read, now_ms=now_ms)
        self._read = []
        if self._journal is not None:
            self._journal.read_again()

    def _stand_by(self) -> None:
        """Another one leads: what is not written is of a term that is over."""
        if self._journal is not None:
            self._journal.forget()

    def _restore(self, entries: list[JournalEntry]) -> None:
        if self.leader_url:
            return  # the leader's members are its own affair
        num_added = self._membership.restore(entries, now_ms=self._clock.now_ms())
        _log.info("journal_restored", num_entries=len(entries), num_members_added=num_added)
        self._membership.journal_all()  # this Redis may be a new, empty one
        self._flush()

    def _flush(self) -> None:
        entries, forgotten = self._membership.take_journal(), self._membership.take_forgotten()
        if self._journal is not None and not self.leader_url:
            self._journal.note(entries, forgotten)

    async def _tick(self, due_ms: int) -> None:
        while True:
            if not self.leader_url:
                self._watch_members(self._clock.now_ms() - due_ms)
            states = [view.state for view in self.listing().instances]
            for state in ("live", "suspect", "dead"):
                _members.labels(state).set(states.count(state))
            due_ms = self._clock.now_ms() + self._settings.heartbeat_interval_ms // 2
            await asyncio.sleep(self._settings.heartbeat_interval_ms / 2000)

    def _watch_members(self, late_ms: int) -> None:
        now_ms = self._clock.now_ms()
        if (
            late_ms >= self._settings.heartbeat_interval_ms
        ):  # else what the living offered is taken back below
            self._membership.excuse(late_ms, now_ms=now_ms)
        forgets = self.lending.role() == "leader"  # else another one may lead, and hear who is silent here
        for instance, state in self._membership.tick(now_ms=now_ms, forgets=forgets):
            _log.warning("member_silent", member=instance, state=state.value)
        self._flush()
        members = {view.instance: (view.epoch, view.state != "dead") for view in self.listing().instances}
        self.lending.market.follow(members, self._membership.gone_epoch, now_ms=now_ms)


def _unix_us() -> int:
    return time.time_ns() // 1_000
