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
HALF_LIFE_MS = 60_000.0  # of a ratio's weight: a wrong factor keeps away the requests that would correct it
NUM_LARGEST = 4  # none counts for more work than the fourth largest: a single one decides nothing
LEAST_MS = 0.05  # shorter measurements are the clock's
MAX_WINDOW_REQUESTS = 8  # a busy instance closes a measurement after so many prompts
SAME_STEP_MS = 1.0  # first outputs that follow each other sooner are of one step


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
    # with what was predicted for each, and when it came
    _ratios: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, predicted_ms: float, measured_ms: float, now_ms: float = 0.0) -> None:
        """Args: predicted_ms: without the factor. Nonsense (not positive, not finite) is ignored."""
        if not (LEAST_MS <= predicted_ms < 1e9 and LEAST_MS <= measured_ms < 1e9):
            return
        self._errors.append(abs(predicted_ms * self.factor - measured_ms) / measured_ms)
        ratio = min(MAX_FACTOR, max(1 / MAX_FACTOR, measured_ms / predicted_ms))
        self._ratios.append((log(ratio), predicted_ms, now_ms))
        self.num_observed += 1
        self.age(now_ms)

    def age(self, now_ms: float) -> None:
        """Time went by: what is old counts for less, and the factor goes back to 1 with the last of it."""
        if not self._ratios:
            return
        most_ms = sorted(ms for _, ms, _ in self._ratios)[-NUM_LARGEST:][0]
        lives = [0.5 ** (max(0.0, now_ms - at_ms) / HALF_LIFE_MS) for _, _, at_ms in self._ratios]
        counted = [
            (ratio[0], min(ratio[1], most_ms) * life) for ratio, life in zip(self._ratios, lives, strict=True)
        ]
        missing = FULL_RATIOS - sum(lives)
        if missing > 0:
            counted.append((0.0, fmean(min(ms, most_ms) for _, ms, _ in self._ratios) * missing))
        self.factor = exp(weighted_median([pair for pair in counted if pair[1] > 0]))

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
    is left, or the step ends in which MAX_WINDOW_REQUESTS are done, predicted work stands against elapsed time: as
    queued_ms would have said it of these prompts, shared steps counted once. A span in which decodes ran too measures
    nothing, nor one in which a prompt was cached but for one token, as a hand-off is: that is a decode step to the
    engine, and its graph.
    """

    model: CostModel
    _open: dict[str, _Prefill] = field(default_factory=dict)
    _began_ms: float = 0.0
    _began_idle: bool = True  # otherwise behind a step, which hides launches
    _done: list[tuple[int, int]] = field(default_factory=list)  # (tokens, cached), in the order of their ends
    _last_ms: float = 0.0  # when the last of them ended
    _spoilt: bool = False  # until then
    _spoilt_since: bool = False

    @property
    def queued_ms(self) -> float:
        """Predicted work of the unfinished prefills (MemServe's eq 1), uncorrected.

        Cost: that of CostModel.waiting_ms().
        """
        return self.model.waiting_ms([(item.num_tokens, item.cached_tokens) for item in self._open.values()])

    def begin(self, key: str, num_tokens: int, cached_tokens: int, now_ms: float) -> None:
        """A prompt enters the engine; `cached_tokens` as far as known."""
        if not self._open:
            self._restart(now_ms, idle=True)
        self._open[key] = _Prefill(num_tokens, cached_tokens)

    def first_output(self, key: str, cached_tokens: int, now_ms: float) -> tuple[float, float] | None:
        """A prefill is done, and how much of it was cached is known.

        Returns: (predicted ms, measured ms) where a measurement ended with it.
        """
        item = self._open.pop(key, None)
        if item is None:
            return None
        pair = None
        is_full = len(self._done) >= MAX_WINDOW_REQUESTS and now_ms - self._last_ms > SAME_STEP_MS
        if is_full and self._open:  # it is another step's: what is measured ended with the one before
            pair, since = self._measured(), self._spoilt_since
            self._restart(self._last_ms, idle=False)
            self._spoilt = since
        self._spoilt |= self._spoilt_since or item.num_tokens - cached_tokens <= 1
        self._spoilt_since = False
        self._done.append((item.num_tokens, cached_tokens))
        self._last_ms = now_ms
        return pair if self._open else self._measured()

    def abandon(self, key: str, now_ms: float) -> None:
        """A request ended without its first token: the span measures nothing."""
        if self._open.pop(key, None) is not None:
            self._spoilt_since = True
            if not self._open:
                self._restart(now_ms, idle=True)

    def spoil(self) -> None:
        """Something else than prefills ran meanwhile."""
        self._spoilt_since = True

    def _measured(self) -> tuple[float, float] | None:
        if self._spoilt:
            return None
        predicted_ms = (self.model.waiting_ms if self._began_idle else self.model.batch_ms)(self._done)
        return predicted_ms, self._last_ms - self._began_ms

    def _restart(self, now_ms: float, *, idle: bool) -> None:
        self._began_ms, self._began_idle, self._done = now_ms, idle, []
        self._spoilt = self._spoilt_since = False
