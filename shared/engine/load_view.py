"""What vLLM's scheduler said last, and how long steps take."""

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from shared.engine.interface import DecodeStep, PromptStep
from shared.engine.step_listener import StepListener
from shared.observe.log import get_logger

_log = get_logger("engine.load_view")
IDLE_S = 1.0  # a longer gap between two steps is none


class LoadView(StatLoggerBase):
    """Keeps the last scheduler statistics; vLLM calls record() once per engine step, on the front's event loop.

    Args: unfinished_prefill, context_tokens: the engine's own, by request; read only. max_batched_tokens: of a step.
    """

    def __init__(
        self,
        unfinished_prefill: Mapping[str, int],
        context_tokens: Mapping[str, int],
        max_batched_tokens: int,
    ) -> None:
        self.running = self.waiting = 0
        self.kv_used_share = 0.0
        self.step_ms = 0.0
        self.preempted = 0
        self.listener = StepListener(_log)  # vLLM takes an exception in record() for its engine's death
        self._unfinished_prefill = unfinished_prefill
        self._context_tokens = context_tokens
        self._last: float | None = None
        self._max_batched_tokens = max_batched_tokens
        self._last_decoding = 0  # requests that decoded in the step before, if nothing else ran
        self._last_open = 0  # prompts that were not finished then
        self._before: tuple[float, int] | None = (
            None  # the step before, if only decodes ran: its time, how many
        )

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        now = time.perf_counter()
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_used_share = scheduler_stats.kv_cache_usage
        gap_s = now - self._last if self._last is not None else IDLE_S
        if gap_s < IDLE_S:
            self.step_ms += 0.1 * (gap_s * 1e3 - self.step_ms)
        self._last = now if self.running else None
        if iteration_stats is not None:
            self._note_prompt(gap_s, iteration_stats)
        self._note_decode(gap_s, iteration_stats)

    def _note_prompt(self, gap_s: float, stats: Any) -> None:
        """One prompt came to its first token, no other one was open, and it fitted into this step beside the decodes.

        Then the step computed all of it, however long it had waited before. It is told together with the step before,
        in which only decodes ran: vLLM launches a step before it takes the result of the one before, and a prompt's
        launch takes so long (no CUDA graph covers it) that the result comes late by most of what the prompt takes.
        """
        was_open, self._last_open = self._last_open, len(self._unfinished_prefill)
        before, self._before = self._before, None
        firsts = len(stats.time_to_first_tokens_iter)
        found, decodes = stats.prompt_token_stats, stats.num_generation_tokens - firsts
        if max(was_open, self._last_open) > 1 or decodes <= 0 or gap_s >= IDLE_S:
            return
        if not firsts:
            self._before = (gap_s, decodes)
        elif firsts == 1 and before is not None and 0 < found.computed <= self._max_batched_tokens - decodes:
            others = max(0, sum(self._context_tokens.values()) - found.total)
            ms = (before[0] + gap_s) * 1e3
            self.listener.tell(
                PromptStep(ms, found.computed, found.cached_tokens, decodes, others, before[1])
            )

    def _note_decode(self, gap_s: float, iteration_stats: Any) -> None:
        decoding = 0
        if (
            iteration_stats is not None
            and not self._unfinished_prefill
            and not iteration_stats.num_prompt_tokens
        ):
            decoding = iteration_stats.num_generation_tokens
        same, self._last_decoding = decoding == self._last_decoding, decoding
        if decoding and same and gap_s < IDLE_S:
            self.listener.tell(DecodeStep(gap_s * 1e3, decoding, sum(self._context_tokens.values())))

    def log_engine_initialized(self) -> None:
        """Nothing to log."""
