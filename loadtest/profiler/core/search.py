"""The highest rate that keeps an SLO: doubling and halving, a binary search, then single steps (AQUA 4.1).

    low --(kept: double | missed: halve)--> bracket --(halve its width)--> knee --(repeat both sides)--> found
                                                                             ^  one step up or down  |
                                                                             '-----------------------'
Rates are multiples of a step. The knee's two sides, the rate that is kept and the next one, are decided by majority of
several runs; a side that turns out otherwise moves the knee by a step, the paper's "linear search with increments and
decrements". A rate's verdict never changes once a majority has it, so the knee moves in one direction only and it ends.
"""

import math
from collections import Counter
from dataclasses import dataclass

from shared.errors import SettingsError

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Rates in requests/s.

    low, high: where the search begins (AQUA: 1 and 10); most: no higher rate is tried. repeats: of the runs that decide
    each side of the knee, odd. max_runs: in all. Raises: SettingsError naming what is out of range.
    """

    step: float = 0.5
    low: float = 1.0
    high: float = 10.0
    most: float = 256.0
    repeats: int = 3
    max_runs: int = 60

    def __post_init__(self) -> None:
        if not 0 < self.step <= self.low <= self.high <= self.most:
            raise SettingsError(
                f"rates must be 0 < step <= low <= high <= most, not {self.step:g}, {self.low:g}, {self.high:g}, "
                f"{self.most:g}; try 0.5, 1, 10, 256"
            )
        if not math.isfinite(self.most / self.step):
            raise SettingsError(f"most must be a number of steps, not {self.most:g}; try 256")
        if self.repeats < 1 or self.repeats % 2 == 0:
            raise SettingsError(
                f"repeats must be odd, so that there is a majority, not {self.repeats}; try 3"
            )
        if self.max_runs < 1:
            raise SettingsError(f"max_runs must be at least 1, not {self.max_runs}; try 60")


@dataclass(frozen=True, slots=True)
class Found:
    """rate_per_s: the highest rate that is kept; 0: not even one step. settled: both sides of the knee have a majority.

    reason: in words, where it is not settled or where nothing higher was tried; else "".
    """

    rate_per_s: float
    settled: bool
    num_runs: int
    reason: str = ""


class RateSearch:
    """Ask `next_rate()`, run it, `record()` whether it kept the SLO; None ends it, and `found()` says the rest.

    Cost: about 2 log2(rates) runs to the knee and 2 * repeats - 2 more there, for a system without noise.
    """

    def __init__(self, limits: SearchLimits) -> None:
        self._limits = limits
        self._kept: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()
        self._most = int(limits.most / limits.step + ROUNDING)
        self._first = max(1, int(limits.low / limits.step + ROUNDING))
        self._second = min(self._most, max(self._first, int(limits.high / limits.step + ROUNDING)))
        self._low: int | None = None  # highest that was kept while the bracket was sought, and
        self._high: int | None = None  # lowest that was missed
        self._knee: int | None = None  # once the bracket is one step wide
        self._num_runs = 0

    @property
    def num_runs(self) -> int:
        """Recorded so far."""
        return self._num_runs

    def next_rate(self) -> float | None:
        """The rate to run now; None: the search has ended."""
        place = self._next() if self._num_runs < self._limits.max_runs else None
        return None if place is None else round(place * self._limits.step, 9)

    def record(self, rate_per_s: float, *, kept: bool) -> None:
        """What became of a run at a rate that next_rate() gave."""
        place = round(rate_per_s / self._limits.step)
        (self._kept if kept else self._missed)[place] += 1
        self._num_runs += 1
        if self._knee is not None:
            return
        if kept:
            self._low = max(place, self._low or 0)
        else:
            self._high = min(place, self._high or place)
        low = 0 if self._high == 1 else self._low
        if low is not None and (low == self._most or self._high == low + 1):
            self._knee = low

    def found(self) -> Found:
        """The answer so far; final once next_rate() gave None."""
        knee = (self._low or 0) if self._knee is None else self._knee
        rate = round(knee * self._limits.step, 9)
        settled = self._knee is not None and self._next() is None
        if not settled:
            return Found(rate, False, self._num_runs, f"the search ended after {self._num_runs} runs")
        reason = (
            f"{self._limits.most:g} requests/s is the highest rate that is tried"
            if knee == self._most
            else ""
        )
        return Found(rate, True, self._num_runs, reason)

    # -- which comes next ------------------------------------------------------------------------

    def _next(self) -> int | None:
        return self._bracket() if self._knee is None else self._confirm()

    def _bracket(self) -> int:
        low, high = self._low, self._high
        if low is None:
            return self._first if high is None else max(1, high // 2)
        if high is None:
            return self._second if low < self._second else min(self._most, low * 2)
        return (low + high) // 2

    def _confirm(self) -> int | None:
        """Walk to where the rate is kept and the next one is not, each by majority."""
        while True:
            knee = self._knee
            assert knee is not None
            if knee > 0:
                verdict = self._majority(knee)
                if verdict is None:
                    return knee
                if not verdict:
                    self._knee = knee - 1
                    continue
            if knee == self._most:
                return None
            verdict = self._majority(knee + 1)
            if verdict is None:
                return knee + 1
            if not verdict:
                return None
            self._knee = knee + 1

    def _majority(self, place: int) -> bool | None:
        """Whether the rate is kept; None: no side has a majority of `repeats` yet."""
        need = self._limits.repeats // 2 + 1
        if self._kept[place] >= need:
            return True
        return False if self._missed[place] >= need else None
