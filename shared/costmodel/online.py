"""What a running engine teaches the model: a factor per kind of work, and the work that is still queued.

No clock here: times come in as now_ms. Robust against the odd step that a garbage collection or a neighbour held up:
the factor is the median of recent ratios, each clipped. A ratio counts by the work that it is of: what a short prompt
takes is mostly constant (wake-ups, cold caches, messages), and would be multiplied into the long ones, whose time is
what queues and eq 2 are about.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean, median

from shared.costmodel.model import CostModel

MAX_FACTOR = 4.0
WINDOW = 31  # ratios whose median counts
FULL_RATIOS = 9  # with fewer the missing ones count as 1: a first wild one changes nothing
NUM_LARGEST = 4  # none counts for more work than the fourth largest: a single one decides nothing
LEAST_MS = 0.05  # shorter measurements are the clock's
MAX_WINDOW_REQUESTS = 8  # a busy instance closes a measurement after so many prompts


def weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight above 0), at least one: half of the weight lies on either side. Equal weights: the median."""
    ordered = sorted(pairs)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for place, (value, weight) in enumerate(ordered):
        below += weight
        if below > half * (1 + 1e-12):
            return value
        if below >= half * (1 - 1e-12):
            return (value + ordered[min(place + 1, len(ordered) - 1)][0]) / 2
    return ordered[-1][0]


@dataclass(slots=True)
class OnlineCorrection:
    """Factor by which predictions of one kind are to be multiplied. Cost: 10 us an observation."""

    num_observed: int = 0
    factor: float = 1.0
    _ratios: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # and their ms
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, predicted_ms: float, measured_ms: float) -> None:
        """Args: predicted_ms: without the factor. Nonsense (not positive, not finite) is ignored."""
        if not (LEAST_MS <= predicted_ms < 1e9 and LEAST_MS <= measured_ms < 1e9):
            return
        self._errors.append(abs(predicted_ms * self.factor - measured_ms) / measured_ms)
        ratio = min(MAX_FACTOR, max(1 / MAX_FACTOR, measured_ms / predicted_ms))
        self._ratios.append((log(ratio), predicted_ms))
        self.num_observed += 1
        most_ms = sorted(ms for _, ms in self._ratios)[-NUM_LARGEST:][0]
        counted = [(value, min(ms, most_ms)) for value, ms in self._ratios]
        missing = FULL_RATIOS - len(counted)
        if missing > 0:
            counted += [(0.0, fmean(ms for _, ms in counted))] * missing
        self.factor = exp(weighted_median(counted))

    @property
    def error_ratio(self) -> float:
        """Median relative error of recent predictions, as they were corrected then; 0 before there are any."""
        return median(self._errors) if self._errors else 0.0


@dataclass(slots=True)
class _Prefill:
    num_tokens: int
    cached_tokens: int  # as far as known when it came


@dataclass(slots=True)
class PrefillLedger:
    """Unfinished prefills of one instance with their predicted work, and what they took in the end.

    What is measured is the instance, not one request: from the moment a prompt comes to an idle instance until none
    is left, or MAX_WINDOW_REQUESTS are done, predicted work stands against elapsed time. So prompts that share steps
    need no untangling. A span in which decodes ran too measures nothing, nor one in which a prompt was cached but for
    one token, as a hand-off is: that is a decode step to the engine, and its graph.
    """

    model: CostModel
    _open: dict[str, _Prefill] = field(default_factory=dict)
    _began_ms: float = 0.0
    _done_ms: float = 0.0
    _num_done: int = 0
    _spoilt: bool = False

    @property
    def queued_ms(self) -> float:
        """Predicted work of the unfinished prefills (MemServe's eq 1), uncorrected.

        Cost: that of CostModel.waiting_ms().
        """
        return self.model.waiting_ms([(item.num_tokens, item.cached_tokens) for item in self._open.values()])

    def begin(self, key: str, num_tokens: int, cached_tokens: int, now_ms: float) -> None:
        """A prompt enters the engine; `cached_tokens` as far as known."""
        if not self._open:
            self._restart(now_ms)
        self._open[key] = _Prefill(num_tokens, cached_tokens)

    def first_output(self, key: str, cached_tokens: int, now_ms: float) -> tuple[float, float] | None:
        """A prefill is done, and how much of it was cached is known.

        Returns: (predicted ms, measured ms) where a measurement ended with it.
        """
        item = self._open.pop(key, None)
        if item is None:
            return None
        if item.num_tokens - cached_tokens <= 1:
            self.spoil()
        self._done_ms += self.model.prefill_ms(item.num_tokens, cached_tokens)
        self._num_done += 1
        if self._open and self._num_done < MAX_WINDOW_REQUESTS:
            return None
        pair = None if self._spoilt else (self._done_ms, now_ms - self._began_ms)
        self._restart(now_ms)
        return pair

    def abandon(self, key: str, now_ms: float) -> None:
        """A request ended without its first token: the span measures nothing."""
        if self._open.pop(key, None) is not None:
            self._spoilt = True
            if not self._open:
                self._restart(now_ms)

    def spoil(self) -> None:
        """Something else than prefills ran meanwhile."""
        self._spoilt = True

    def _restart(self, now_ms: float) -> None:
        self._began_ms, self._done_ms, self._num_done, self._spoilt = now_ms, 0.0, 0, False
