"""How busy one instance is: its last report, plus what was placed on it and is not in that report yet.

A prefill or colocated stage counts on top of reports until one includes it: its worker says which have come; of one
that does not say, it is the first report made some milliseconds after the placement. A decode stage arrives only when
its prefill is done; until it ends it counts as one request, but once it is old enough to have arrived, never beyond
what the report says. What nobody tells the end of (a gateway died) is ended by the placer: it counts against the room
in pages until then.
"""

import math
from dataclasses import dataclass, field
from itertools import islice

from msgspec import Struct

from services.scheduler.core.limits import FORGET_MS
from services.scheduler.core.request import AttemptKey
from shared.costmodel.model import CostModel
from shared.wire.reports import Report


class LoadView(Struct, frozen=True):
    """Load now. Shares are of the instance's own limits and may exceed 1."""

    num_requests: int
    prefill_tokens: int  # prompt tokens that wait for or are in prefill
    context_tokens: int  # KV tokens of running requests
    kv_used_share: float
    requests_share: float  # num_requests / requests in one engine step at most
    prefill_share: float  # prefill_tokens / tokens in one engine step at most: steps until the queue is empty
    queue_ms: float = 0.0  # predicted work of prompts that wait for or are in prefill; 0 without a cost model
    num_decodes: int = 0  # requests that decode here now or soon
    room_blocks: int | None = None  # pages that nothing here needs or may still need; None: not known


class OpenStage(Struct, frozen=True):
    """One placed stage that no report covers for certain."""

    placed_at_ms: int
    prefill_tokens: int
    context_tokens: int
    prefill_ms: float = 0.0
    need_blocks: int = 0  # pages that it may take here


@dataclass(slots=True)
class InstanceLoad:
    """Load of one instance under one epoch.

    Args: transit_ms: from a placement to its arrival at a worker that does not say what has come, or whose word was
    lost; arrive_ms: the same for a decode stage, its prefill included, and the longest for a worker that says it;
    forget_ms: a decode stage that never ended is dropped then.
    """

    max_running: int
    max_batched_tokens: int
    transit_ms: int = 20
    arrive_ms: int = 10_000
    forget_ms: int = FORGET_MS
    only_decodes: bool = False  # by its role: what runs here decodes
    only_whole: bool = False  # by its role: so does what runs here, once its prompt is done
    report: Report | None = None
    reported_at_ms: int = 0
    lent: CostModel | None = None  # by lend()
    _unreported: dict[AttemptKey, OpenStage] = field(default_factory=dict)  # prefill and colocated
    _young: dict[AttemptKey, OpenStage] = field(default_factory=dict)  # decode, perhaps not arrived
    _old: dict[AttemptKey, OpenStage] = field(default_factory=dict)  # decode, arrived by now
    # decode, not said to have come; where a report was lost, nothing that was on its way then
    _coming: dict[AttemptKey, OpenStage] = field(default_factory=dict)
    _unsure: dict[AttemptKey, OpenStage] = field(default_factory=dict)  # was coming when a report was lost
    _colocated: dict[AttemptKey, int] = field(default_factory=dict)  # whole requests: when they were placed
    _young_context_tokens: int = 0
    _old_context_tokens: int = 0
    # in the last report: of an earlier scheduler or epoch, whose end was told too early, further choices of a request
    _num_others: int = 0
    _drained: LoadView | None = (
        None  # the view once the reported queue is worked off, until something changes
    )
    _drained_at_ms: float = 0.0  # when that is
    _grows_old_at_ms: float = 0.0  # until then time alone shortens the queue, and changes nothing else

    @property
    def num_open(self) -> int:
        """Placed stages that are still counted on top of, or against, the report."""
        return len(self._unreported) + len(self._young) + len(self._old) + len(self._colocated)

    def resize(self, max_running: int, max_batched_tokens: int) -> None:
        """Other limits of its engine."""
        self._drained = None
        self.max_running, self.max_batched_tokens = max_running, max_batched_tokens

    def lend(self, model: CostModel | None) -> None:
        """Another's model, for a worker that has none and so cannot say what its queue takes. None: it has its own."""
        if model is not self.lent:
            self._drained = None
            self.lent = model

    def add_direct(
        self,
        key: AttemptKey,
        *,
        prefill_tokens: int,
        context_tokens: int,
        now_ms: int,
        prefill_ms: float = 0.0,
        decodes: bool = False,
        need_blocks: int = 0,
    ) -> None:
        """A prefill or colocated stage was placed here. `decodes`: it stays after its prompt."""
        self._drained = None
        if not math.isfinite(prefill_ms):  # of coefficients that make no sense: it must not get into an order
            prefill_ms = 0.0
        self._unreported[key] = OpenStage(now_ms, prefill_tokens, context_tokens, prefill_ms, need_blocks)
        if decodes:
            self._colocated[key] = now_ms

    def add_handoff(self, key: AttemptKey, *, context_tokens: int, now_ms: int, need_blocks: int = 0) -> None:
        """A decode stage was placed here; its request is prefilled elsewhere first."""
        self._drained = None
        self._young[key] = self._coming[key] = OpenStage(now_ms, 0, context_tokens, need_blocks=need_blocks)
        self._young_context_tokens += context_tokens

    def end(self, key: AttemptKey) -> None:
        """The request left. Unknown keys are ignored."""
        self._drained = None
        self._unreported.pop(key, None)
        self._colocated.pop(key, None)
        self._coming.pop(key, None)
        self._unsure.pop(key, None)
        if (young := self._young.pop(key, None)) is not None:
            self._young_context_tokens -= young.context_tokens
        if (old := self._old.pop(key, None)) is not None:
            self._old_context_tokens -= old.context_tokens

    def on_report(self, report: Report, *, now_ms: int) -> None:
        """The worker said how busy it is, and perhaps what has come since its last report.

        Who says that, says it of every prompt and hand-off once: what is not among them is still on its way, or its
        pages are.
        """
        self._drained = None
        for key in report.arrived or ():
            self._unreported.pop(key, None)
            self._coming.pop(key, None)
            self._unsure.pop(key, None)
        says_all = report.arrived is not None and (self.report is None or report.seq == self.report.seq + 1)
        self.report, self.reported_at_ms = report, now_ms
        patience_ms = self.arrive_ms if says_all else self.transit_ms
        while self._unreported:  # in the order of placement
            key, stage = next(iter(self._unreported.items()))
            if stage.placed_at_ms + patience_ms > now_ms:
                break
            del self._unreported[key]
        if not says_all:
            self._unsure.update(self._coming)
            self._coming.clear()
        if report.arrived is not None:
            come = self._num_whole() + len(self._old) + len(self._young) - len(self._coming)
            self._num_others = max(0, _num_seen(report) - come)

    def view(self, *, now_ms: int) -> LoadView:
        """Best estimate. Cost: O(stages not said to have come) behind a change, else O(1)."""
        rest, drained_at_ms, _ = self.standing(now_ms=now_ms)
        if now_ms >= drained_at_ms:
            return rest
        return LoadView(
            rest.num_requests, rest.prefill_tokens, rest.context_tokens, rest.kv_used_share, rest.requests_share,
            rest.prefill_share, drained_at_ms + rest.queue_ms - now_ms, rest.num_decodes, rest.room_blocks,
        )  # fmt: skip

    def standing(self, *, now_ms: int) -> tuple[LoadView, float, float]:
        """What time alone does not change: (the view as it is when what was reported as queued is worked off, when
        that is, when the view changes by age alone). Until then queue_ms is longer by what is left of the time.
        """
        if self._drained is None or now_ms >= self._grows_old_at_ms:
            self._grow_old(now_ms)
            self._drained = self._view()
            self._drained_at_ms = self._queue_end_ms()
            self._grows_old_at_ms = self._next_growth_ms()
        return self._drained, self._drained_at_ms, self._grows_old_at_ms

    def _view(self) -> LoadView:
        report = self.report
        seen = _num_seen(report) if report else 0
        seen_context = max(0, report.running_context_tokens) if report else 0
        prefill = max(0, report.unfinished_prefill_tokens) if report else 0
        context = min(self._old_context_tokens, seen_context) + self._young_context_tokens
        num_requests = min(len(self._old), seen) + len(self._young)
        # who says what has come has what is on its way on top, whatever else it runs
        coming = (
            [stage for key, stage in self._coming.items() if key in self._young]
            if self._says_arrived()
            else []
        )
        context = max(seen_context + sum(stage.context_tokens for stage in coming), context)
        num_requests = max(seen + len(coming), num_requests) + len(self._unreported)
        queue_ms = 0.0
        for stage in self._unreported.values():
            prefill += stage.prefill_tokens
            context += stage.context_tokens
            queue_ms += stage.prefill_ms
        return LoadView(
            num_requests, prefill, context, _share(report.kv_used_share) if report else 0.0,
            num_requests / self.max_running, prefill / self.max_batched_tokens, queue_ms,
            num_requests if self.only_decodes else self._num_decodes(seen), self._room_blocks(seen),
        )  # fmt: skip

    def _says_arrived(self) -> bool:
        return self.report is not None and self.report.arrived is not None

    def _num_whole(self) -> int:
        """Whole requests that are in the report."""
        return len(self._colocated) - sum(key in self._colocated for key in self._unreported)

    def _room_blocks(self, seen: int) -> int | None:
        """As reported, less what may be needed by what was placed and is not in the report.

        Of hand-offs as many have come as the worker has requests that are no whole ones, nor others than those placed
        here, the first ones placed first.
        """
        if self.report is None or self.report.room is None:
            return None
        room = self.report.room
        come = max(0, seen - self._num_whole() - self._num_others)
        missing = len(self._old) + len(self._young) - come
        coming = {**self._unsure, **self._coming} if self._says_arrived() else self._young
        on_way = sum(stage.need_blocks for stage in islice(reversed(coming.values()), max(0, missing)))
        on_way += sum(stage.need_blocks for stage in self._unreported.values())
        return max(0, room.free_blocks) - max(0, room.owed_blocks) - on_way

    def _queue_end_ms(self) -> float:
        """When the worker has worked off what it said was queued, or what tokens it said were."""
        if self.report is None:
            return 0.0
        queued_ms = self.report.queued_prefill_ms
        if self.lent is not None and not self.only_decodes:  # there the prompts were computed elsewhere
            queued_ms = _tokens_ms(self.lent, self.report.unfinished_prefill_tokens)
        return self.reported_at_ms + max(0.0, queued_ms) if math.isfinite(queued_ms) else 0.0

    def _num_decodes(self, seen: int) -> int:
        """Of an instance that prefills too: what was placed to decode here, as long as the report allows it, and where
        nothing else runs, what the report has beyond that. Elsewhere that may be prompts that leave when they are done.
        """
        whole = self._num_whole()
        unreported = len(self._colocated) - whole
        others = self._num_others if self.only_whole else 0
        return min(len(self._old) + whole, seen) + others + len(self._young) + unreported

    def _next_growth_ms(self) -> float:
        """When _grow_old() has something to do again."""
        due_ms = [
            *(stage.placed_at_ms + self.arrive_ms for stage in islice(self._young.values(), 1)),
            *(stage.placed_at_ms + self.forget_ms for stage in islice(self._old.values(), 1)),
            *(placed_at_ms + self.forget_ms for placed_at_ms in islice(self._colocated.values(), 1)),
        ]
        return min(due_ms, default=math.inf)

    def _grow_old(self, now_ms: int) -> None:
        while self._young:
            key, stage = next(iter(self._young.items()))
            if stage.placed_at_ms + self.arrive_ms > now_ms:
                break
            # still among those that come, perhaps: a long prompt, and what it takes here is free until then
            self._old[key] = self._young.pop(key)
            self._young_context_tokens -= stage.context_tokens
            self._old_context_tokens += stage.context_tokens
        while self._old:
            key, stage = next(iter(self._old.items()))
            if stage.placed_at_ms + self.forget_ms > now_ms:
                break
            self.end(key)
        while self._colocated:
            key, placed_at_ms = next(iter(self._colocated.items()))
            if placed_at_ms + self.forget_ms > now_ms:
                break
            self.end(key)


def _num_seen(report: Report) -> int:
    return max(0, report.num_running) + max(0, report.num_waiting)


def _tokens_ms(model: CostModel, num_tokens: int) -> float:
    """As full steps and a rest, each as a prompt by itself. Grows with num_tokens.

    A guess: what is cached of the prompts counts as if it were not, what their attention takes beyond a step does not.
    """
    size = max(1, model.coefficients.max_batched_tokens)
    num_full, rest = divmod(max(0, num_tokens), size)
    return num_full * model.prefill_ms(size) + model.prefill_ms(rest)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 1.0
