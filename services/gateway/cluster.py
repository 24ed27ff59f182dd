"""The cluster as the gateway sees it: runs each request's RequestFlow over ZeroMQ and feeds its sink.

Everything here is callbacks on one event loop: a message from a worker goes through its link straight into
the sink of the call that it names, and from there to the client's connection. Messages of attempts that were
given up find no call, or a call with another attempt number, and are dropped.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from services.gateway import metrics, tally
from services.gateway.call import Call, PromptLogprobs
from services.gateway.core.request_actions import (
    Action,
    Cancel,
    Complete,
    Fail,
    GoOn,
    SendAbort,
    SendEnded,
    SendGenerate,
    SendPlace,
)
from services.gateway.core.request_flow import Limits, Phase, RequestFlow
from services.gateway.core.retry_budget import RetryBudget
from services.gateway.messages import generate_message, place_message
from services.gateway.receipt import note_prediction
from services.gateway.scheduler_link import SchedulerLink
from services.gateway.worker_links import WorkerLink
from shared.background_task import begin_task
from shared.errors import Overloaded, PeerGone
from shared.observe.log import get_logger
from shared.observe.trace import start_span
from shared.wire.membership import InstanceView
from shared.wire.placement import Placed, SchedulerToGateway
from shared.wire.requests import (
    ALIVE_INTERVAL_MS,
    Abort,
    Alive,
    Failed,
    Finished,
    Prefilled,
    PromptScored,
    TokenChunk,
    Tokens,
    WorkerToGateway,
)

QUICK_TICK_MS = 50
_OUTCOMES = (Complete, Cancel, Fail)
FORGET_LINK_AFTER_MS = 30_000
_UNPROCESSED = "The output could not be processed."

_log = get_logger("gateway.cluster")


class Cluster:
    """Links to the scheduler and the workers. One per process."""

    def __init__(
        self, scheduler: str, *, model: str, limits: Limits, retry_budget: RetryBudget | None = None
    ) -> None:
        self.limits = limits
        self.retry_budget = retry_budget or RetryBudget()
        self._model, self._refused_before = model, 0
        self._calls: dict[str, Call] = {}
        self._links: dict[str, WorkerLink[Call]] = {}
        self._unlisted_since_ms: dict[str, int] = {}
        self._quick_timer: asyncio.TimerHandle | None = None
        self._slow_task: asyncio.Task[None] | None = None
        self._scheduler = SchedulerLink(
            scheduler, on_message=self._from_scheduler, on_down=self._scheduler_down,
            request_deadline_ms=limits.request_deadline_ms,
        )  # fmt: skip

    @property
    def num_calls(self) -> int:
        """Calls that have no outcome yet."""
        return len(self._calls)

    @property
    def scheduler_up(self) -> bool:
        """The scheduler answers."""
        return self._scheduler.up

    @property
    def workers_up(self) -> list[str]:
        """Endpoints of the workers that answer."""
        return [endpoint for endpoint, link in self._links.items() if link.up]

    def start(self) -> None:
        """Connect to the scheduler; it may come later."""
        self._scheduler.open()
        self._slow_task = begin_task(self._tick_slowly(), "cluster-tick")

    async def stop(self) -> None:
        """Fail what still runs and close every link."""
        for call in list(self._calls.values()):
            self._run(call, call.flow.on_late("draining", "The server is shutting down."))
        if self._slow_task is not None:
            self._slow_task.cancel()
            await asyncio.gather(self._slow_task, return_exceptions=True)
        if self._quick_timer is not None:
            self._quick_timer.cancel()
        for link in list(self._links.values()):
            link.close()
        self._scheduler.close()

    # ---- requests ----

    def submit(self, call: Call) -> None:
        """Start a call; its sink hears the rest. Cost: one message to the scheduler."""
        self._calls[call.request_id] = call
        self._run(call, call.flow.start(now_ms=_now_ms()))

    def cancel(self, call: Call) -> None:
        """The client left."""
        self._run(call, call.flow.on_client_gone())

    def on_members(self, members: Iterable[InstanceView]) -> None:
        """Connect ahead of the first request; forget endpoints that nobody has listed for a while."""
        now_ms = _now_ms()
        listed = {view.endpoint: view.epoch for view in members if view.state != "dead"}
        for endpoint, epoch in listed.items():
            self._link(endpoint).expect(epoch)
            self._unlisted_since_ms.pop(endpoint, None)
        for endpoint in self._links.keys() - listed.keys():
            self._unlisted_since_ms.setdefault(endpoint, now_ms)

    def _link(self, endpoint: str) -> WorkerLink[Call]:
        link = self._links.get(endpoint)
        if link is None:
            hear, lose = self._from_worker, self._worker_down
            link = WorkerLink(
                endpoint, self.limits.worker_silent_ms, on_message=hear, on_down=lose,
                on_malformed=partial(lose, unread=True),
            )  # fmt: skip
            self._links[endpoint] = link
        return link

    # ---- what comes in ----

    def _from_worker(self, seq: int, message: WorkerToGateway, raw: list[bytes]) -> None:
        del seq, raw
        if type(message) is Tokens:
            calls = self._calls
            for chunk in message.chunks:
                call = calls.get(chunk.request_id)
                if call is None or not call.flow.accepts(chunk.attempt):
                    metrics.STALE.inc()
                else:
                    self._deliver(call, chunk)
            return
        call = self._calls.get(message.request_id)  # type: ignore[union-attr]
        if call is None or message.attempt != call.flow.attempt:  # type: ignore[union-attr]
            metrics.STALE.inc()
            return
        if isinstance(message, Prefilled):
            self._prefilled(call, message)
        elif isinstance(message, Finished):
            call.early = None
            call.receipts.append(message.receipt)
            self._run(call, call.flow.on_finished(message.attempt))
        elif isinstance(message, PromptScored):
            self._scored(call, message.prompt_logprobs)
        elif isinstance(message, Failed):
            self._failed(call, message)

    def _deliver(self, call: Call, chunk: TokenChunk) -> None:
        if chunk.finish_reason in ("abort", "error"):
            self._engine_ended(call, chunk)
            return
        call.note_chunk(chunk, time.monotonic_ns())
        if call.flow.continues:
            call.output_ids += chunk.token_ids
            if call.flow.resume_by_ms:
                spare_ms = call.flow.mark_resumed(now_ms=_now_ms())
                _log.info("resumed", request=call.request_id, spare_ms=spare_ms)
        if chunk.finish_reason is not None and call.choice_ended(chunk.index):
            call.flow.mark_answered()
        try:
            enough = call.sink.chunk(chunk)
        except Exception as error:  # noqa: BLE001 - one request's bad output must not stop the others'
            self._sink_failed(call, error)
            return
        if enough:
            call.keep_early_receipt()
            self._run(call, call.flow.on_satisfied())

    def _engine_ended(self, call: Call, chunk: TokenChunk) -> None:
        """It gave up without saying why: "error" is of this request, wherever it runs; "abort" is not."""
        code, text = "cluster.error", "The engine could not go on with this request."
        if again := chunk.finish_reason == "abort":
            code, text = "peer.error", "The engine ended the request early."
        now_ms = _now_ms()
        self._run(call, call.flow.on_failed(chunk.attempt, code, text, again, now_ms=now_ms, source=None))

    def _scored(self, call: Call, rows: PromptLogprobs) -> None:
        try:
            call.sink.scored(call, rows)
        except Exception as error:  # noqa: BLE001 - as in _deliver
            self._sink_failed(call, error)

    def _sink_failed(self, call: Call, error: Exception) -> None:
        _log.error("sink_failed", request=call.request_id, error=repr(error), exc_info=error)
        self._run(call, call.flow.on_broken("cluster.error", _UNPROCESSED))

    def _prefilled(self, call: Call, message: Prefilled) -> None:
        if call.flow.phase is not Phase.PREFILLING:
            metrics.STALE.inc()
            return
        call.receipts.append(message.receipt)
        if message.prompt_logprobs is not None:
            self._scored(call, message.prompt_logprobs)
        if message.handoff is None or message.handoff.mode == "continue":
            self._deliver(call, message.first)  # "resample": the decode instance draws it again
        self._run(call, call.flow.on_prefilled(message.attempt, message.handoff, now_ms=_now_ms()))

    def _failed(self, call: Call, message: Failed) -> None:
        index = 0 if call.flow.phase is Phase.PREFILLING else -1
        source = call.targets[index].instance if call.targets else None
        _log.warning("attempt_failed", request=call.request_id, attempt=message.attempt, code=message.code,
                     instance=source, retryable=message.retryable, message=message.message)  # fmt: skip
        self._run(call, call.flow.on_failed(
            message.attempt, message.code, message.message, message.retryable,
            now_ms=_now_ms(), source=source,
        ))  # fmt: skip

    def _from_scheduler(self, seq: int, message: SchedulerToGateway, raw: list[bytes]) -> None:
        del seq, raw
        call = self._calls.get(message.request_id)
        if call is None:
            metrics.STALE.inc()
        else:
            self._run(call, call.flow.on_scheduler(message, now_ms=_now_ms()))

    def _scheduler_down(self) -> None:
        _log.warning("scheduler_link_down")
        for call in list(self._calls.values()):
            self._run(call, call.flow.on_scheduler_down(now_ms=_now_ms()))

    def _worker_down(self, endpoint: str, calls: list[Call], *, unread: bool = False) -> None:
        """`unread`: it is there, and said what is no message: of one of these, which would wait, or have a gap."""
        now_ms, reached = _now_ms(), self._link(endpoint).reached
        for call in calls:
            if name := next((each.instance for each in call.targets if each.endpoint == endpoint), None):
                lost = call.flow.on_instance_down(name, now_ms=now_ms, unread=unread, reached=reached)
                self._run(call, lost)

    # ---- what goes out ----

    def _run(self, call: Call, actions: list[Action]) -> None:
        for action in actions:  # what an action leads to comes behind the others: the list grows
            actions += self._do(call, action)
        if self._quick_timer is None and call.flow.wants_quick_ticks:
            loop = asyncio.get_running_loop()
            self._quick_timer = loop.call_later(QUICK_TICK_MS / 1000, self._tick_quickly)

    def _do(self, call: Call, action: Action) -> list[Action]:
        if isinstance(action, SendGenerate):
            return self._generate(call, action)
        if isinstance(action, SendPlace):
            return self._place(call, action)
        if isinstance(action, SendEnded):
            self._scheduler.ended(call.request_id, action.attempt)
            self._leave_targets(call)
        elif isinstance(action, _OUTCOMES):
            self._end(call, action)
        elif isinstance(action, SendAbort):
            abort = Abort(request_id=call.request_id, attempt=action.attempt, handoff_id=action.handoff_id)
            self._send_worker(action.target.endpoint, abort)
        else:
            self._again(call, goes_on=isinstance(action, GoOn))
        return []

    def _again(self, call: Call, *, goes_on: bool) -> None:
        flow, kept = call.flow, len(call.output_ids) if goes_on else 0
        metrics.RETRIES.inc()
        _log.info("retry", request=call.request_id, attempt=flow.attempt, reason=flow.last_failure, kept=kept)
        call.span.event("retry", {"reason": flow.last_failure, "kept_tokens": kept})
        if goes_on:
            metrics.CONTINUED.inc()
            call.keep_early_receipt()
        else:
            call.discard()

    def _place(self, call: Call, action: SendPlace) -> list[Action]:
        if call.schedule_span is None:
            call.schedule_span = start_span(
                "schedule", parent=call.span.traceparent, attributes={"quire.request_id": call.request_id}
            )
        message = place_message(call, action, self._model)
        try:
            self._scheduler.place(message)
        except (PeerGone, Overloaded):
            return call.flow.on_not_asked(now_ms=_now_ms())
        return []

    def _generate(self, call: Call, action: SendGenerate) -> list[Action]:
        placed = call.flow.placed
        assert placed is not None
        if action.stage != "decode":
            self._placed(call, placed)
        message = generate_message(call, action)
        try:
            self._link(action.target.endpoint).send(message, (call.frame,))
        except PeerGone:
            return call.flow.on_instance_down(action.target.instance, now_ms=_now_ms(), reached=False)
        except Overloaded as error:
            return call.flow.on_failed(
                action.attempt, error.code, error.message, True,
                now_ms=_now_ms(), source=action.target.instance,
            )  # fmt: skip
        return []

    def _send_worker(self, endpoint: str, message: Abort | Alive) -> None:
        """What needs no answer; a worker that is gone has stopped its work."""
        with suppress(PeerGone, Overloaded):
            self._link(endpoint).send(message)

    def _placed(self, call: Call, placed: Placed) -> None:
        """Register the call at the links it depends on."""
        call.placed = placed
        call.placed_ns, call.num_earlier_receipts = time.monotonic_ns(), len(call.receipts)
        call.targets = [placed.decode] if placed.prefill is None else [placed.prefill, placed.decode]
        for target in call.targets:
            link = self._link(target.endpoint)
            link.expect(target.epoch)
            link.calls.add(call)
        call.end_schedule_span(placed)

    def _leave_targets(self, call: Call) -> None:
        for target in call.targets:
            self._link(target.endpoint).calls.discard(call)
        call.targets = []

    def _end(self, call: Call, outcome: Complete | Cancel | Fail) -> None:
        self._leave_targets(call)
        self._calls.pop(call.request_id, None)
        call.end_schedule_span()
        try:
            if isinstance(outcome, Complete):
                call.keep_early_receipt()  # if its stage was lost behind its last token
                note_prediction(call)
                call.sink.complete(call)
            elif isinstance(outcome, Fail):
                call.sink.fail(call, outcome.code, outcome.message, outcome.retry_after_ms)
        except Exception as error:  # noqa: BLE001 - the loop's other requests go on
            _log.error("sink_failed", request=call.request_id, error=repr(error), exc_info=error)
            if isinstance(outcome, Complete):  # the client still waits, and its place is still taken
                self._fail_sink(call)

    def _fail_sink(self, call: Call) -> None:
        try:
            call.sink.fail(call, "cluster.error", _UNPROCESSED, None)
        except Exception as error:  # noqa: BLE001 - as in _end
            _log.error("sink_failed", request=call.request_id, error=repr(error), exc_info=error)

    # ---- time ----

    def _tick_quickly(self) -> None:
        self._quick_timer = None
        self._tick(lambda flow: flow.wants_quick_ticks)

    async def _tick_slowly(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_INTERVAL_MS / 1000)
            self._tick(lambda flow: True)
            self._count_retries()
            tally.settle()
            for endpoint in self.workers_up:
                self._send_worker(endpoint, Alive())
            now_ms = _now_ms()
            for endpoint, since_ms in list(self._unlisted_since_ms.items()):
                link = self._links.get(endpoint)
                if link is None or (not link.calls and now_ms - since_ms > FORGET_LINK_AFTER_MS):
                    del self._unlisted_since_ms[endpoint]
                    if link is not None:
                        del self._links[endpoint]
                        link.close()

    def _count_retries(self) -> None:
        budget = self.retry_budget
        metrics.RETRY_BUDGET.set(budget.left)
        metrics.RETRIES_REFUSED.inc(budget.num_refused - self._refused_before)
        self._refused_before = budget.num_refused

    def _tick(self, choose: Callable[[RequestFlow], bool]) -> None:
        now_ms = _now_ms()
        for call in [c for c in self._calls.values() if choose(c.flow)]:
            self._run(call, call.flow.on_tick(now_ms=now_ms))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
