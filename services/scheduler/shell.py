"""The scheduler's sockets: messages in, core, answers out. Everything runs on one event loop."""

import asyncio
import time
from functools import lru_cache
from typing import Any

from services.scheduler import config
from services.scheduler.config import SchedulerSettings
from services.scheduler.core.gateways import Gateways
from services.scheduler.core.instances import Instance, Instances
from services.scheduler.core.limits import forget_after
from services.scheduler.core.placement import Placer
from services.scheduler.core.refusals import Refusals
from services.scheduler.core.served import served_elsewhere
from shared.background_task import begin_task
from shared.errors import ClusterError, PeerProtocolError
from shared.ids import InstanceId, RequestId
from shared.observe.log import get_logger
from shared.observe.malformed import MalformedLog
from shared.observe.metrics import counter, gauge, histogram_ms
from shared.observe.trace import start_span, would_record
from shared.transport.clock import Clock
from shared.transport.membership_client import MembershipPoller
from shared.transport.zmq_channel import RouterServer
from shared.wire.explain import explain
from shared.wire.membership import InstanceList
from shared.wire.placement import (
    FROM_SCHEDULER,
    TO_SCHEDULER,
    Ended,
    GatewayHello,
    GatewayToScheduler,
    Held,
    Place,
    Placed,
    Rejected,
    SchedulerToGateway,
)
from shared.wire.reports import (
    REPORT_REPLIES,
    REPORTS,
    Goodbye,
    Hello,
    Refused,
    Report,
    SchedulerToWorker,
    WorkerToScheduler,
)

TICK_S = 0.1
MAX_TENANTS_SHOWN = 64

_log = get_logger("scheduler")
_placed = counter("quire_scheduler_placed_total", "Placements.", ("kind", "policy"))
_rejected = counter("quire_scheduler_rejected_total", "Requests without a placement.", ("code",))
_live = gauge("quire_scheduler_live_instances", "Instances on which something may be placed.")
_open = gauge("quire_scheduler_open_placements", "Attempts placed and not ended.")
_forgotten = counter("quire_scheduler_forgotten_total", "Placements whose end nobody would have told.")
_held = gauge("quire_scheduler_held_requests", "Requests that wait for room in decode's pages.")
_held_ms = histogram_ms("quire_scheduler_held_ms", "How long they waited.")
_gaps = gauge("quire_scheduler_report_gaps", "Reports that were missing between two others.")
_malformed = gauge("quire_scheduler_malformed_messages", "Messages that were dropped as nonsense.")
_unsent = counter("quire_scheduler_unsent_replies_total", "Answers whose asker was gone or did not read.")
_decision = histogram_ms(
    "quire_scheduler_decision_ms", "Deciding one placement.", buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20)
)


_refused = counter(
    "quire_scheduler_worker_refusals_total", "Hellos and reports that were refused.", ("code",)
)
_dropped = counter(
    "quire_scheduler_epochs_dropped_total",
    "Epochs that somebody said and the coordinator's list contradicted.",
)
_fetches = counter(
    "quire_scheduler_fetch_verdicts_total",
    "Prompts of which another has more: eq 2's verdict.",
    ("verdict", "path"),
)
_fetch_counter = lru_cache(maxsize=16)(_fetches.labels)
_unpredicted = counter(
    "quire_scheduler_unpredicted_total", "Placements by cost without coefficients, as prompt_tree."
)


def _note_verdicts(answer: Placed) -> None:
    if answer.kv is not None and answer.kv.source:
        _fetch_counter("recompute" if answer.kv.recompute else "fetch", answer.kv.path).inc()
    if answer.policy == "cost" and answer.predicted is None:
        _unpredicted.inc()


@lru_cache(maxsize=16)
def _placed_counter(kind: str, policy: str) -> Any:
    return _placed.labels(kind, policy)


class Scheduler:
    """start() once, stop() once. Handlers never wait and never raise."""

    def __init__(self, settings: SchedulerSettings, clock: Clock, boot: str) -> None:
        self.instances = Instances(config.instance_limits(settings))
        self.placer = Placer(
            self.instances,
            settings.policy,
            boot,
            config.placement_limits(settings),
            config.cost_settings(settings),
        )
        self.gateways = Gateways()
        self._clock = clock
        self._started_ms = clock.now_ms()
        self._places: RouterServer[GatewayToScheduler, SchedulerToGateway] = RouterServer(
            settings.listen,
            into=TO_SCHEDULER,
            out=FROM_SCHEDULER,
            on_message=self._on_place,
            on_malformed=self._on_malformed_place,
            on_lost=self.gateways.lost,
        )
        # No hello_ms: a worker has nothing to say as long as it has no epoch.
        self._reports: RouterServer[WorkerToScheduler, SchedulerToWorker] = RouterServer(
            settings.report_listen,
            into=REPORTS,
            out=REPORT_REPLIES,
            on_message=self._on_worker,
            on_malformed=self._on_malformed_report,
            on_lost=self._on_worker_lost,
        )
        self._workers: dict[bytes, InstanceId] = {}  # by connection: who said Hello on it
        self._malformed_log = MalformedLog(_log)
        self._askers: dict[tuple[RequestId, int], tuple[bytes, Place, int]] = {}  # of held requests
        self._refusals = Refusals()
        self._poller: MembershipPoller | None = None
        if settings.coordinator_url:
            self._poller = MembershipPoller(
                settings.coordinator_url,
                key=settings.coordinator_key,
                interval_ms=settings.membership_interval_ms,
                on_list=self._on_members,
                on_event=lambda event, ids: _log.info(event, **ids),
                every_answer=True,
            )
        self._ticking: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, str]:
        """(placements, reports), after start()."""
        return self._places.address, self._reports.address

    async def start(self) -> None:
        """Listen. Raises: SettingsError when an address is taken or wrong."""
        await self._reports.start()  # first: whoever may ask for a placement finds instances soon after
        await self._places.start()
        if self._poller is not None:
            self._poller.open()
        self._ticking = begin_task(self._tick(), "scheduler-tick")

    async def stop(self) -> None:
        """Close everything; gateways place again with the next scheduler."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if self._poller is not None:
            await self._poller.close()
        self._places.close()
        self._reports.close()

    def status(self) -> dict[str, Any]:
        """What /status shows."""
        now_ms = self._clock.now_ms()
        return {
            "policy": self.placer.policy,
            "uptime_ms": now_ms - self._started_ms,
            "num_placed": self.placer.num_placed,
            "num_open": self.placer.num_open,
            "num_held": len(self.placer.waiting),
            "instances": [self._instance_status(known, now_ms) for known in self.instances],
            "refused": self._refusals.lately(now_ms=now_ms),
            "places": self.placer.tenants.places(MAX_TENANTS_SHOWN),
        }

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Ready as soon as it listens: instances come and go."""
        now_ms = self._clock.now_ms()
        return True, {"live_instances": len(self.instances.live(now_ms=now_ms))}

    def _instance_status(self, known: Instance, now_ms: int) -> dict[str, Any]:
        view = known.view(now_ms=now_ms)
        return {
            "instance": known.instance,
            "role": known.role,
            "epoch": known.epoch,
            "endpoint": known.endpoint,
            "live": self.instances.is_live(known, now_ms=now_ms),
            "draining": known.draining,
            "silent_ms": now_ms - known.seen_at_ms,
            "num_requests": view.num_requests,
            "prefill_tokens": view.prefill_tokens,
            "context_tokens": view.context_tokens,
            "kv_used_share": view.kv_used_share,
            "queue_ms": view.queue_ms,
            "num_decodes": view.num_decodes,
            "room_blocks": view.room_blocks,
            "has_model": known.model is not None,
            "served_tokens": dict(known.load.report.served) if known.load.report is not None else {},
        }

    # ---- what is no message ----

    def _on_malformed_place(self, identity: bytes, error: PeerProtocolError) -> None:
        self._say_malformed("gateway", self.gateways.name(identity), self._places.remote(identity), error)

    def _on_malformed_report(self, identity: bytes, error: PeerProtocolError) -> None:
        self._say_malformed("worker", self._workers.get(identity, ""), self._reports.remote(identity), error)

    def _say_malformed(self, kind: str, name: str, address: str, error: PeerProtocolError) -> None:
        sender = f"{kind} {name}" if name else f"a {kind} at {address or 'a unix socket'}"
        self._malformed_log.note(sender, error)

    # ---- gateways ----

    def _on_place(self, identity: bytes, seq: int, message: GatewayToScheduler, raw: list[bytes]) -> None:
        del seq, raw
        self._places.accept(identity)  # whatever it said: gateways of before GatewayHello place at once
        now_ms = self._clock.now_ms()
        self.instances.attend(now_ms=now_ms)
        if isinstance(message, GatewayHello):
            self.gateways.hello(identity, message.gateway)
            if message.request_deadline_ms:
                self.placer.keep_for(forget_after(message.request_deadline_ms))
            return
        if isinstance(message, Ended):
            self.placer.ended(message)
            self._askers.pop((message.request_id, message.attempt), None)
            self._serve_held()
            return
        start_ns = time.time_ns()
        answer = self.placer.place(message, now_ms=now_ms, gateway=self.gateways.name(identity))
        _decision.observe((time.time_ns() - start_ns) / 1e6)
        if isinstance(answer, Held):
            self._askers[message.request_id, message.attempt] = identity, message, start_ns
        else:  # also to one that was held, and asked again over a new connection
            self._askers.pop((message.request_id, message.attempt), None)
            self._record(message, answer, start_ns)
        self._answer(identity, answer)

    def _answer(self, identity: bytes, answer: SchedulerToGateway) -> None:
        try:
            self._places.send(identity, answer)
        except ClusterError as error:
            _unsent.inc()
            self.placer.ended(Ended(request_id=answer.request_id, attempt=answer.attempt))
            self._askers.pop((answer.request_id, answer.attempt), None)
            _log.info("answer_unsent", request=answer.request_id, error=error.message)

    def _serve_held(self) -> None:
        """Something changed: perhaps there is room."""
        for answer in self.placer.serve_held(now_ms=self._clock.now_ms()):
            found = self._askers.pop((answer.request_id, answer.attempt), None)
            if found is not None:
                identity, place, start_ns = found
                _held_ms.observe((time.time_ns() - start_ns) / 1e6)
                self._record(place, answer, start_ns)
                self._answer(identity, answer)

    def _record(self, place: Place, answer: Placed | Rejected, start_ns: int) -> None:
        if isinstance(answer, Placed):
            _placed_counter(answer.kind, answer.policy).inc()
            _note_verdicts(answer)
        else:
            _rejected.labels(answer.code).inc()
            _log.info("rejected", request=place.request_id, code=answer.code, reason=answer.reason)
        if would_record(place.traceparent):
            self._trace(place, answer, start_ns)

    def _trace(self, place: Place, answer: Placed | Rejected, start_ns: int) -> None:
        ids = {"quire.request_id": place.request_id, "attempt": place.attempt}
        with start_span(
            "schedule.decide", parent=place.traceparent, attributes=ids, start_ns=start_ns
        ) as span:
            if not isinstance(answer, Placed):
                span.fail(answer.reason)
                return
            span.set("kind", answer.kind)
            span.set("decode", answer.decode.instance)
            if answer.prefill is not None:
                span.set("prefill", answer.prefill.instance)
            if span.recording:
                for name, value in explain(answer).items():
                    span.set(name, value)

    # ---- workers ----

    def _on_worker(self, identity: bytes, seq: int, message: WorkerToScheduler, raw: list[bytes]) -> None:
        del seq, raw
        self._reports.accept(identity)
        now_ms = self._clock.now_ms()
        self.instances.attend(now_ms=now_ms)
        answer: SchedulerToWorker | None = None
        if isinstance(message, Report):
            answer = self.instances.report(message, now_ms=now_ms)
            self.placer.tenants.arrived(message.instance, message.arrived or ())
            self._serve_held()
            if answer is None and message.served:
                answer = served_elsewhere(message, self.instances.live(now_ms=now_ms))
        elif isinstance(message, Hello):
            self._workers[identity] = message.instance
            answer = self.instances.hello(message, now_ms=now_ms)
            if not isinstance(answer, Refused):
                _log.info(
                    "hello", worker=message.instance, epoch=message.epoch, role=message.role,
                    endpoint=message.endpoint,
                )  # fmt: skip
        elif isinstance(message, Goodbye) and self.instances.goodbye(message):
            _log.info("goodbye", worker=message.instance, epoch=message.epoch)
        if isinstance(answer, Refused):
            _refused.labels(answer.code).inc()
            if self._refusals.note(message.instance, message.epoch, answer.reason, now_ms=now_ms):
                _log.warning(
                    "worker_refused", worker=message.instance, code=answer.code, reason=answer.reason
                )
        if answer is not None:
            try:
                self._reports.send(identity, answer)
            except ClusterError as error:
                _unsent.inc()
                _log.info("answer_unsent", worker=message.instance, error=error.message)

    def _on_worker_lost(self, identity: bytes) -> None:
        self._workers.pop(identity, None)

    def _on_members(self, members: InstanceList) -> None:
        for dropped in self.instances.follow(members):
            _dropped.inc()
            _log.error(
                "epoch_not_the_coordinators", worker=dropped.instance, epoch=dropped.epoch, now=dropped.now
            )

    def _forget_lost(self, now_ms: int) -> None:
        """What was placed for gateways that are gone, and what is too old to run."""
        gone = self.gateways.tick(now_ms=now_ms)
        num_forgotten = self.placer.tick(now_ms=now_ms, gone=gone)
        if num_forgotten:  # a gateway that ended in order has told all
            _forgotten.inc(num_forgotten)
            _log.warning("ends_untold", gateways=gone, num_forgotten=num_forgotten)

    async def _tick(self) -> None:
        while True:
            now_ms = self._clock.now_ms()
            self.instances.attend(now_ms=now_ms)
            for known in self.instances.tick(now_ms=now_ms):
                silent_ms = now_ms - known.seen_at_ms
                _log.warning("instance_dead", worker=known.instance, epoch=known.epoch, silent_ms=silent_ms)
            self._forget_lost(now_ms)
            _live.set(len(self.instances.live(now_ms=now_ms)))
            self._serve_held()
            _open.set(self.placer.num_open)
            _held.set(len(self.placer.waiting))
            _gaps.set(self.instances.num_report_gaps)
            _malformed.set(self._places.num_malformed + self._reports.num_malformed)
            await asyncio.sleep(TICK_S)
