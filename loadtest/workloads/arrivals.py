"""Arrival times of open-loop load: Poisson, Gamma, on/off, a burst. Rates in requests/s, times in ms from 0.

Each is an endless, seeded row; `take` ends it by number or by time. A process that would never reach an end is refused
when it is made (ValueError).
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

RATES_PER_S = (1e-9, 1e9)  # with others sums of gaps are infinite, or stand still
MOST_IN_TIME = 1_000_000  # arrivals of a run that only time ends


class Arrivals(Protocol):
    """A process of arrivals."""

    def times_ms(self, rng: random.Random) -> Iterator[float]:
        """Growing times, without end."""
        ...


def take(arrivals: Arrivals, *seed: object, num_requests: int = 0, seconds: float = 0.0) -> list[float]:
    """Arrival times in ms up to whichever bound comes first.

    Raises: ValueError without a bound, or where seconds alone hold more than MOST_IN_TIME arrivals.
    """
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} seconds are no time that a run can take")
    if num_requests <= 0 and seconds <= 0:
        raise ValueError("say how many requests or how many seconds")
    rng = random.Random("-".join(str(word) for word in ("arrivals", *seed)))
    times = arrivals.times_ms(rng)
    if seconds > 0:
        times = itertools.takewhile(lambda at_ms: at_ms < seconds * 1000, times)
    found = list(itertools.islice(times, num_requests if num_requests > 0 else MOST_IN_TIME + 1))
    if num_requests <= 0 and len(found) > MOST_IN_TIME:
        raise ValueError(
            f"more than {MOST_IN_TIME:,} requests come in {seconds:g} s: say how many are wanted"
        )
    return found


def _rate(per_s: float) -> None:
    """Raises: ValueError."""
    least, most = RATES_PER_S
    if not least <= per_s <= most:
        raise ValueError(f"a rate of {per_s:g} requests/s must be above 0 and finite: {least:g} to {most:g}")


def _above_0(**numbers: float) -> None:
    """Raises: ValueError. With others time stands still, or goes backwards, and no bound is ever reached."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} {number:g} must be above 0 and finite")


@dataclass(frozen=True, slots=True)
class Poisson:
    """Gaps are exponential."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _rate(self.rate_per_s)

    def times_ms(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals."""
        at_ms = 0.0
        while True:
            at_ms += rng.expovariate(self.rate_per_s) * 1000
            yield at_ms


@dataclass(frozen=True, slots=True)
class Quantised:
    """Times of another process, rounded down to multiples of step_ms, as Mooncake's conversation trace has them."""

    inner: Arrivals
    step_ms: float

    def __post_init__(self) -> None:
        _above_0(step_ms=self.step_ms)

    def times_ms(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals."""
        for at_ms in self.inner.times_ms(rng):
            yield at_ms // self.step_ms * self.step_ms


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps under a slowly changing rate.

    shape: of the gaps; CV = shape ** -0.5 while the rate is steady. drift: coefficient of variation of the rate, drawn
    anew (lognormal) every drift_requests mean gaps. Counts of windows with m requests on average then have an
    index of dispersion of about 1/shape + m * drift².
    """

    rate_per_s: float
    shape: float
    drift: float = 0.0
    drift_requests: float = 600.0

    def __post_init__(self) -> None:
        _rate(self.rate_per_s)
        _above_0(shape=self.shape, drift_requests=self.drift_requests)

    def times_ms(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals."""
        sigma = math.sqrt(math.log1p(self.drift**2))
        period_ms = self.drift_requests / self.rate_per_s * 1000
        at_ms, until_ms, factor = 0.0, 0.0, 1.0
        while True:
            while at_ms >= until_ms:
                until_ms += period_ms
                factor = math.exp(rng.gauss(-sigma * sigma / 2, sigma)) if self.drift else 1.0
            mean_ms = 1000 / (self.rate_per_s * factor)
            at_ms += rng.gammavariate(self.shape, mean_ms / self.shape)
            yield at_ms


@dataclass(frozen=True, slots=True)
class OnOff:
    """A Markov-modulated Poisson process of two states: bursts at peak times the mean rate, and nothing between.

    dispersion: index of dispersion of the counts of windows with window_requests requests on average. Time is
    stretched with the rate, so that a slower run has the same bursts of as many requests.
    """

    rate_per_s: float
    peak: float
    dispersion: float
    window_requests: float

    def __post_init__(self) -> None:
        _rate(self.rate_per_s)
        _above_0(window_requests=self.window_requests)

    def switching_per_request(self) -> float:
        """Both leaving rates together, per mean gap, by the MMPP's index of dispersion. Raises: ValueError."""
        largest = 1 + (self.peak - 1) * self.window_requests
        if not self.peak > 1 or not 1 < self.dispersion < largest:
            raise ValueError(f"no on/off process has peak {self.peak} and dispersion {self.dispersion}")
        low, high = 1e-9, 1e6
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._dispersion(middle) > self.dispersion else (low, middle)
        return math.sqrt(low * high)

    def _dispersion(self, switching: float) -> float:
        span = switching * self.window_requests
        return 1 + 2 * (self.peak - 1) / switching * (1 + math.expm1(-span) / span)

    def times_ms(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals."""
        switching = self.switching_per_request()
        share_on = 1 / self.peak
        gap_ms = 1000 / self.rate_per_s
        mean_on_ms, mean_off_ms = (gap_ms / (switching * share) for share in (1 - share_on, share_on))
        at_ms = 0.0 if rng.random() < share_on else rng.expovariate(1 / mean_off_ms)
        while True:
            end_ms = at_ms + rng.expovariate(1 / mean_on_ms)
            while (at_ms := at_ms + rng.expovariate(self.peak / gap_ms)) < end_ms:
                yield at_ms
            at_ms = end_ms + rng.expovariate(1 / mean_off_ms)


@dataclass(frozen=True, slots=True)
class Burst:
    """AQUA 9.3: `warm` requests at the stable rate, then `factor` times the rate for burst_s, then the stable rate."""

    rate_per_s: float
    warm: int = 25
    factor: float = 2.0
    burst_s: float = 60.0

    def __post_init__(self) -> None:
        _rate(self.rate_per_s)
        _above_0(factor=self.factor)
        _rate(self.rate_per_s * self.factor)
        if self.warm < 0 or not 0 <= self.burst_s < math.inf:
            raise ValueError(
                f"{self.warm} requests and then a burst of {self.burst_s:g} s: neither may be below 0"
            )

    def times_ms(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals. The change of rate is exact: a gap that crosses it is drawn anew from there on."""
        at_ms = 0.0
        for _ in range(self.warm):
            at_ms += rng.expovariate(self.rate_per_s) * 1000
            yield at_ms
        end_ms = at_ms + self.burst_s * 1000
        while (at_ms := at_ms + rng.expovariate(self.rate_per_s * self.factor) * 1000) < end_ms:
            yield at_ms
        at_ms = end_ms
        while True:
            at_ms += rng.expovariate(self.rate_per_s) * 1000
            yield at_ms
