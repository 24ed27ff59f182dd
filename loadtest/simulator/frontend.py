"""The gateway under the virtual clock: look-up, the production RequestFlow with its retries and deadlines, records."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loadtest.outcomes import Outcome
from loadtest.simulator.events import EventQueue
from loadtest.simulator.request import SimRequest
from services.gateway.core.request_flow import (
    Action,
    Fail,
    Limits,
    Phase,
    RequestFlow,
    SendAbort,
    SendEnded,
    SendGenerate,
    SendPlace,
)
from services.gateway.core.retry_budget import RetryBudget
from shared.errors import PromptTooLong
from shared.ids import InstanceId, RequestId
from shared.prompttree.asked_before import AskedBefore
from shared.wire.handoff import HandoffState
from shared.wire.placement import Held, Place, Placed, PrefixHit, Rejected, Target

Submitted = Literal["taken", "down", "never fits"]
TICK_MS = 50.0  # services/gateway/cluster.py, while a request waits to be placed again


class Workers(Protocol):
    """What the frontend asks of the cluster; names are instance ids."""

    def lookup(self, request: SimRequest) -> list[PrefixHit]: ...
    def place(self, place: Place) -> Placed | Rejected | Held: ...
    def ended(self, request_id: RequestId, attempt: int) -> None: ...
    def submit(self, call: "Call", order: SendGenerate) -> Submitted: ...
    def abort(self, call: "Call", attempt: int, target: Target) -> None: ...
    def handoff(self, placed: Placed) -> HandoffState: ...
    def outside_ms(self, request: SimRequest) -> float: ...


@dataclass(frozen=True, slots=True)
class Delays:
    """In ms: the gateway's own work on a request, and a message between two processes."""

    gateway_ms: float = 1.0
    hop_ms: float = 0.3


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way."""

    index: int
    request: SimRequest
    flow: RequestFlow
    record: Outcome
    hits: list[PrefixHit] = field(default_factory=list)
    seen_tokens: int = 0  # leading ones of the prompt, asked for before
    targets: list[InstanceId] = field(default_factory=list)  # of the running attempt
    first_at_ms: float = -1.0

    @property
    def name(self) -> RequestId:
        """As the scheduler knows it."""
        return RequestId(f"r{self.request.request_id}")


class Frontend:
    """Args: on_end: a call has its outcome; called once a call."""

    def __init__(
        self,
        events: EventQueue,
        workers: Workers,
        delays: Delays,
        limits: Limits,
        *,
        model: str,
        block_tokens: int,
        on_end: Callable[[Call], None],
    ) -> None:
        self._events, self._workers, self._delays, self._limits = events, workers, delays, limits
        self._model = model
        self._block_tokens = block_tokens
        self._asked = AskedBefore()
        self._on_end = on_end
        self._budget = RetryBudget()
        self._open: dict[int, Call] = {}
        self._held: dict[tuple[RequestId, int], Call] = {}  # by the scheduler

    @property
    def num_open(self) -> int:
        """Calls without an outcome."""
        return len(self._open)

    def arrive(self, index: int, request: SimRequest) -> None:
        """A request comes in now."""
        now_ms = self._events.now_ms
        record = Outcome(
            request.request_id,
            request.session,
            request.turn,
            due_ms=request.arrival_ms,
            sent_ms=now_ms,
            planned_prompt_tokens=request.prompt_tokens,
            planned_output_tokens=request.output_tokens,
            prompt_tokens=request.prompt_tokens,
        )
        call = Call(index, request, RequestFlow(self._limits, self._budget), record)
        self._open[index] = call
        self._events.after(self._delays.gateway_ms, self._start, call)
        self._events.after(self._limits.request_deadline_ms + TICK_MS, self._tick, call)

    def _start(self, call: Call) -> None:
        request, block_tokens = call.request, self._block_tokens
        call.hits = self._workers.lookup(request)
        call.seen_tokens = block_tokens * self._asked.ask(
            request.blocks[: request.prompt_tokens // block_tokens]
        )
        self._run(call, call.flow.start(now_ms=self._now()))

    # -- from workers -----------------------------------------------------------------------------

    def first_token(self, call: Call, attempt: int) -> None:
        """Of a colocated or decode stage."""
        if call.flow.accepts(attempt):
            self._show(call)

    def _show(self, call: Call) -> None:
        if call.first_at_ms < 0:
            call.first_at_ms = self._events.now_ms
        call.flow.mark_sent()

    def prefilled(self, call: Call, attempt: int) -> None:
        """A prefill stage ended; its token is the client's, and the whole answer when no more was asked for."""
        if call.flow.attempt != attempt or call.flow.phase is not Phase.PREFILLING:
            return
        assert call.flow.placed is not None
        handoff = self._workers.handoff(call.flow.placed) if call.request.output_tokens > 1 else None
        self._show(call)
        self._run(call, call.flow.on_prefilled(attempt, handoff, now_ms=self._now()))

    def finished(self, call: Call, attempt: int) -> None:
        """The last token."""
        self._run(call, call.flow.on_finished(attempt))

    def instance_down(self, instance: InstanceId) -> None:
        """The connection to an instance broke."""
        for call in list(self._open.values()):
            if instance in call.targets:
                self._run(call, call.flow.on_instance_down(instance, now_ms=self._now()))

    # -- actions ----------------------------------------------------------------------------------

    def _now(self) -> int:
        return int(self._events.now_ms)

    def _run(self, call: Call, actions: Sequence[Action]) -> None:
        todo = deque(actions)
        while todo:
            todo.extend(self._do(call, todo.popleft()))
        if call.flow.phase is Phase.BACKOFF:
            self._events.after(TICK_MS, self._tick, call)

    def _do(self, call: Call, action: Action) -> Sequence[Action]:
        hop_ms = self._delays.hop_ms
        if isinstance(action, SendPlace):
            self._events.after(hop_ms, self._place, call, action)
        elif isinstance(action, SendGenerate):
            wait_ms = hop_ms + (self._workers.outside_ms(call.request) if action.stage != "decode" else 0.0)
            self._events.after(wait_ms, self._generate, call, action)
            self._note(call, action)
        elif isinstance(action, SendAbort):
            self._events.after(hop_ms, self._workers.abort, call, action.attempt, action.target)
        elif isinstance(action, SendEnded):
            self._events.after(hop_ms, self._workers.ended, call.name, action.attempt)
            call.targets = []
            self._held.pop((call.name, action.attempt), None)
        elif call.flow.phase is Phase.ENDED:
            self._end(call, action.code if isinstance(action, Fail) else "")
        return ()

    def _place(self, call: Call, action: SendPlace) -> None:
        request = call.request
        answer = self._workers.place(
            Place(
                request_id=call.name,
                attempt=action.attempt,
                num_prompt_tokens=request.prompt_tokens,
                max_tokens=request.output_tokens,
                model=self._model,
                hits=call.hits,
                seen_tokens=call.seen_tokens,
                session=request.session,
                exclude=action.exclude,
                continues=True,
            )
        )
        if isinstance(answer, Held):
            self._held[call.name, action.attempt] = call
        self._events.after(self._delays.hop_ms, self._placed, call, answer)

    def _placed(self, call: Call, answer: Placed | Rejected | Held) -> None:
        self._run(call, call.flow.on_scheduler(answer, now_ms=self._now()))

    def placed_at_last(self, answer: Placed | Rejected) -> None:
        """Of a call that the scheduler held."""
        call = self._held.pop((answer.request_id, answer.attempt))
        self._events.after(self._delays.hop_ms, self._placed, call, answer)

    def _note(self, call: Call, action: SendGenerate) -> None:
        placed, record = call.flow.placed, call.record
        assert placed is not None
        record.placement, record.policy, record.reason = placed.kind, placed.policy, placed.reason
        record.instances = [placed.decode.instance]
        if placed.prefill is not None:
            record.instances.insert(0, placed.prefill.instance)
        record.predicted_ttft_ms = placed.predicted_ttft_ms or 0.0
        call.targets = [placed.decode.instance]
        if placed.prefill is not None and action.stage == "prefill":
            call.targets.append(placed.prefill.instance)

    def _generate(self, call: Call, action: SendGenerate) -> None:
        if call.flow.attempt != action.attempt or call.flow.phase is Phase.ENDED:
            return
        instance = action.target.instance
        answer = self._workers.submit(call, action)
        if answer == "down":
            self._run(call, call.flow.on_instance_down(instance, now_ms=self._now()))
        elif answer == "never fits":
            code = PromptTooLong.code
            failed = call.flow.on_failed(
                action.attempt, code, "It never fits.", False, now_ms=self._now(), source=instance
            )
            self._run(call, failed)

    def _tick(self, call: Call) -> None:
        if call.index in self._open:
            self._run(call, call.flow.on_tick(now_ms=self._now()))

    def _end(self, call: Call, error: str) -> None:
        record, now_ms = call.record, self._events.now_ms
        del self._open[call.index]  # a request ends once: a second end raises
        record.error = error
        record.jct_ms = now_ms - record.sent_ms
        if not error:
            record.output_tokens = call.request.output_tokens
        if call.first_at_ms >= 0:
            record.ttft_ms = call.first_at_ms - record.sent_ms
            if call.request.output_tokens > 1:
                record.tpot_ms = (now_ms - call.first_at_ms) / (call.request.output_tokens - 1)
        self._on_end(call)
