"""What this worker knows of its own speed: its cost model, corrections from what it measures, work that is queued."""

import time
from collections import deque
from typing import Any

import msgspec

from shared.costmodel.model import CostModel, StepShape
from shared.costmodel.online import OnlineCorrection, PrefillLedger
from shared.engine.interface import DecodeStep, EngineStep, KvUse
from shared.ids import RequestId
from shared.observe import metrics
from shared.wire.cost import CostCoefficients

KINDS = ("prefill", "decode")
MAX_ARRIVED = 1_024  # while there is no scheduler: by the time there is one, it counts none of them


class _KindMetrics:
    """Predicted against actual, of one kind of work."""

    def __init__(self, kind: str) -> None:
        label = ("kind",)
        self.predicted = metrics.counter(
            "quire_worker_cost_predicted_ms_total", "Work as the cost model predicted it.", label
        ).labels(kind)
        self.actual = metrics.counter(
            "quire_worker_cost_actual_ms_total", "The same work as it was measured.", label
        ).labels(kind)
        self.error = metrics.gauge(
            "quire_worker_cost_error_ratio", "Median relative error of recent predictions.", label
        ).labels(kind)
        self.correction = metrics.gauge(
            "quire_worker_cost_correction_ratio", "Factor on predictions, from recent measurements.", label
        ).labels(kind)


class WorkerCost:
    """Used from the event loop. Before use() it answers as an instance without a model does."""

    def __init__(self) -> None:
        self.coefficients: CostCoefficients | None = None
        self._model: CostModel | None = None
        self._ledger: PrefillLedger | None = None
        self._decoding: set[str] = set()
        self.arrived: deque[tuple[RequestId, int]] = deque(maxlen=MAX_ARRIVED)  # that no report has told of
        self.corrections = {kind: OnlineCorrection() for kind in KINDS}
        self._metrics = {kind: _KindMetrics(kind) for kind in KINDS}
        for shown in self._metrics.values():
            shown.correction.set(1.0)

    def use(self, coefficients: CostCoefficients | None) -> None:
        """Predict with these from now on. None: not at all."""
        self.coefficients = coefficients
        self._model = CostModel(coefficients) if coefficients is not None else None
        self._ledger = PrefillLedger(self._model) if self._model is not None else None

    @property
    def queued_prefill_ms(self) -> float:
        """Predicted work of the unfinished prefills, corrected."""
        return self._ledger.queued_ms * self.corrections["prefill"].factor if self._ledger else 0.0

    def compute_ms(self, num_tokens: int, cached_tokens: int) -> float:
        """What a prompt of which so much is cached takes this engine, corrected. 0.0: there is no model yet."""
        if self._model is None:
            return 0.0
        return self._model.prefill_ms(num_tokens, cached_tokens) * self.corrections["prefill"].factor

    # -- attempts ---------------------------------------------------------------------------------------

    def begin(
        self, key: str, num_tokens: int, cached_tokens: int, placed: tuple[RequestId, int] | None = None
    ) -> None:
        """The engine gets a prompt of which so much is held already, as far as known.

        Args: placed: as the scheduler knows it (request, attempt); None: it does not count it as a prompt.
        """
        if placed is not None:
            self.arrived.append(placed)
        if self._ledger is not None:
            self._ledger.begin(key, num_tokens, cached_tokens, _now_ms())
            if self._decoding:
                self._ledger.spoil()

    def first_output(self, key: str, use: KvUse, *, decodes_on: bool) -> None:
        """Its first output is here, and with it what was cached. `decodes_on`: more will follow."""
        if self._ledger is None:
            return
        pair = self._ledger.first_output(key, use.tokens_engine + use.tokens_pool, _now_ms())
        if pair is not None:
            self._observe("prefill", *pair)
        if decodes_on:
            self._decoding.add(key)
            self._ledger.spoil()

    def end(self, key: str) -> None:
        """The request left the engine, however."""
        self._decoding.discard(key)
        if self._ledger is not None:
            self._ledger.abandon(key, _now_ms())

    def on_step(self, step: EngineStep) -> None:
        """The engine measured a step: of decodes alone, or of a prompt beside decodes.

        Of the latter what the decodes add, and their step before, is taken away, as predicted and corrected. A prompt
        that does not at least double the step says too little of prompts: a step of one token reads the weights too.
        Nor does a step that took less than what its decodes are predicted to add.
        """
        if self._model is None:
            return
        if isinstance(step, DecodeStep):
            predicted_ms = self._model.decode_step_ms(step.num_requests, step.context_tokens)
            self._observe("decode", predicted_ms, step.ms)
            return
        chunks = ((step.new_tokens, step.past_tokens),)
        prompt_ms = self._model.step_ms(StepShape(chunks))
        whole_ms = self._model.step_ms(StepShape(chunks, step.num_decodes, step.context_tokens))
        if whole_ms >= 2 * self._model.decode_step_ms(step.num_decodes, step.context_tokens):
            decodes_ms = whole_ms - prompt_ms
            if step.decodes_before:
                decodes_ms += self._model.decode_step_ms(step.decodes_before, step.context_tokens)
            rest_ms = step.ms - decodes_ms * self.corrections["decode"].factor
            if rest_ms > 0:
                self._observe("prefill", prompt_ms, rest_ms)

    def _observe(self, kind: str, predicted_ms: float, measured_ms: float) -> None:
        correction, shown = self.corrections[kind], self._metrics[kind]
        shown.predicted.inc(predicted_ms * correction.factor)
        shown.actual.inc(measured_ms)
        correction.observe(predicted_ms, measured_ms, _now_ms())
        shown.error.set(correction.error_ratio)
        shown.correction.set(correction.factor)

    def age(self) -> None:
        """Before a report: corrections that nothing confirms any more go."""
        for kind, correction in self.corrections.items():
            correction.age(_now_ms())
            self._metrics[kind].correction.set(correction.factor)

    # -- what others ask --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Coefficients, corrections and errors, for /status."""
        if self.coefficients is None:
            return {"coefficients": None}
        return {
            "coefficients": msgspec.to_builtins(self.coefficients),
            "queued_prefill_ms": round(self.queued_prefill_ms, 3),
            "corrections": {
                kind: {
                    "factor": round(correction.factor, 4),
                    "error_ratio": round(correction.error_ratio, 4),
                    "num_observed": correction.num_observed,
                }
                for kind, correction in self.corrections.items()
            },
        }


def _now_ms() -> float:
    return time.perf_counter() * 1e3
