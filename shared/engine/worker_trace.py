"""Times of one attempt: its spans and its receipt are computed from the same marks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from shared.engine.interface import KvUse
from shared.engine.worker_pages import NOTHING_BROUGHT
from shared.ids import InstanceId
from shared.observe.trace import Span, start_span
from shared.wire.requests import Generate, StageReceipt


@dataclass(slots=True)
class _Phases:
    """Ends of the phases, ns after receipt. A request asks the pool, waits in the engine, computes."""

    fetched: int
    scheduled: int
    first: int
    ended: int


class AttemptClock:
    """Marks are ns after receipt, on the monotonic clock; spans get wall times computed from them."""

    def __init__(
        self, message: Generate, instance: InstanceId, num_prompt_tokens: int, page_path: str = "memfd"
    ) -> None:
        self._page_path = page_path  # of blocks that are copied from pages
        self._wall_ns = time.time_ns()
        self._start_ns = time.perf_counter_ns()
        self._message = message
        self._instance = instance
        self._num_prompt_tokens = num_prompt_tokens
        self._asked_pool = False
        self._fetched = self._submitted = self._first = 0
        self.num_output_tokens = 0
        self.brought = NOTHING_BROUGHT
        self.room_wait_ms = 0.0  # before its pages were asked for
        self.span: Span = start_span(
            message.stage,
            parent=message.traceparent,
            attributes={
                "quire.request_id": message.request_id,
                "quire.attempt": message.attempt,
                "quire.instance": instance,
                "quire.prompt_tokens": num_prompt_tokens,
            },
            start_ns=self._wall_ns,
        )

    def _now(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def mark_submitted(self, *, asked_pool: bool) -> None:
        """The engine gets the request now."""
        self._submitted = self._now()
        self._asked_pool = asked_pool

    def mark_first(self) -> None:
        """The first output is here."""
        self._first = self._now()
        if self._message.stage != "prefill":
            self.span.event("decode.first_token", {"quire.request_id": self._message.request_id})

    @property
    def ttft_ms(self) -> float:
        """Receipt to first output, 0 when there was none."""
        return self._first / 1e6

    def _phases(self, use: KvUse) -> _Phases:
        ended = self._now()
        first = self._first or ended
        # The engine copies pages before it schedules the request, so its queue time contains the copy.
        fetched = min(first, self._submitted + int(use.fetch_ms * 1e6))
        scheduled = min(first, self._submitted + int(max(use.queue_ms, use.fetch_ms) * 1e6))
        return _Phases(fetched, max(fetched, scheduled), first, ended)

    def receipt(self, use: KvUse) -> StageReceipt:
        """What the attempt took and where its KV came from."""
        phases, message = self._phases(use), self._message
        peer, dram, remote = self.brought.tokens(use.tokens_pool)
        computed_until = phases.first if message.stage == "prefill" else phases.ended
        return StageReceipt(
            instance=self._instance,
            stage=message.stage,
            queue_ms=_ms(phases.scheduled - phases.fetched),
            fetch_ms=_ms(phases.fetched - self._room_wait_ns(phases)),
            compute_ms=_ms(computed_until - phases.scheduled),
            prompt_tokens=self._num_prompt_tokens,
            tokens_engine=use.tokens_engine,
            tokens_pool=use.tokens_pool,
            tokens_computed=use.tokens_computed,
            blocks_moved=use.blocks_moved,
            blocks_reused=use.blocks_reused,
            bytes_moved=use.bytes_moved,
            path=self._page_path if use.blocks_moved else "",
            handoff_mode=message.handoff.mode if message.handoff is not None else "",
            tokens_peer=peer,
            tokens_dram=dram,
            tokens_remote=remote,
            bytes_fetched=self.brought.num_bytes,
            fetch_path=self.brought.path,
            room_wait_ms=_ms(self._room_wait_ns(phases)),
            prefill_ms=_ms(phases.first - phases.scheduled) if message.stage == "colocated" else 0.0,
            step_ms=_ms((phases.ended - phases.first) // (self.num_output_tokens - 1))
            if self._has_steps()
            else 0.0,
        )

    def _has_steps(self) -> bool:
        """Of several choices nobody knows which one ended when."""
        return self._first > 0 and self.num_output_tokens > 1 and self._message.sampling.n == 1

    def _room_wait_ns(self, phases: _Phases) -> int:
        return min(int(self.room_wait_ms * 1e6), phases.fetched)

    def end(self, use: KvUse, *, error: str = "") -> None:
        """Record the phases as children of the stage's span, then the span itself."""
        phases = self._phases(use)
        if error:
            self.span.fail(error)
        if self.span.recording:
            self.span.set("quire.output_tokens", self.num_output_tokens)
            decoding = self._message.stage == "decode"
            waited = self._room_wait_ns(phases)
            if waited:
                self._child("decode.room", 0, waited)
            if self._asked_pool or self._message.handoff is not None:
                moved = {
                    "bytes": use.bytes_moved,
                    "path": self._page_path if use.blocks_moved else "none",
                    "blocks_moved": use.blocks_moved,
                    "blocks_reused": use.blocks_reused,
                    "blocks_failed": use.failed_blocks,
                    "tokens_pool": use.tokens_pool,
                    "tokens_computed": use.tokens_computed,
                    "fetch_path": self.brought.path,
                    "fetch_bytes": self.brought.num_bytes,
                }
                self._child("handoff.transfer" if decoding else "kv.fetch", waited, phases.fetched, moved)
            self._child("decode.queue" if decoding else "prefill.queue", phases.fetched, phases.scheduled)
            if not decoding and self._first:
                tokens = {"tokens_computed": use.tokens_computed, "tokens_engine": use.tokens_engine}
                self._child("prefill.compute", phases.scheduled, phases.first, tokens)
            if use.times_parked:
                self.span.set("quire.times_parked", use.times_parked)
            for at_ns in use.preempted_ns:
                self.span.event("preempt", at_ns=at_ns)
            for swap in use.swaps:
                self._wall_child(
                    f"kv.swap_{swap.way}", swap.begin_ns, swap.end_ns, {"blocks": swap.num_blocks}
                )
        self.span.end(self._wall_ns + phases.ended)

    def _child(
        self, name: str, start: int, end: int, attributes: Mapping[str, int | str] | None = None
    ) -> None:
        self._wall_child(name, self._wall_ns + start, self._wall_ns + end, attributes)

    def _wall_child(
        self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, int | str] | None
    ) -> None:
        span = start_span(
            name,
            parent=self.span.traceparent,
            attributes={"quire.request_id": self._message.request_id, **(attributes or {})},
            start_ns=start_ns,
        )
        span.end(end_ns)


def _ms(nanoseconds: int) -> float:
    return round(max(0, nanoseconds) / 1e6, 3)
