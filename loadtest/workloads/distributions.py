"""Distributions of lengths and gaps, by their quantiles: one uniform draw gives one value.

Draws are stratified (`Draws`): each of 64 equal shares of the distribution is hit once in 64 draws, in random order,
so that a workload of some hundred requests has the stated distribution and not a lucky sample of it.
"""

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
_HALF_MEAN_Z = 1 / math.sqrt(
    2 * math.pi
)  # of a standard normal: the mean of its positive half, times one half


class Distribution(Protocol):
    """Anything with quantiles."""

    def quantile(self, share: float) -> float:
        """The value below which `share` of all lie; 0 < share < 1."""
        ...


class Draws:
    """Stratified uniforms in (0, 1), without end."""

    def __init__(self, *seed: object, strata: int = 64) -> None:
        self._random = random.Random("-".join(str(word) for word in seed))
        self._strata = strata
        self._left: list[int] = []

    def __call__(self) -> float:
        """The next one."""
        if not self._left:
            self._left = list(range(self._strata))
            self._random.shuffle(self._left)
        share = (self._left.pop() + self._random.random()) / self._strata
        return min(max(share, 1e-9), 1 - 1e-9)

    def of(self, distribution: Distribution) -> float:
        """A value."""
        return distribution.quantile(self())

    def tokens(self, distribution: Distribution) -> int:
        """A length: at least 1."""
        return max(1, round(self.of(distribution)))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """ln x is normal with mean mu and standard deviation sigma; cut at low and high."""

    mu: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    @classmethod
    def of_mean(cls, mean: float, sigma: float) -> "Lognormal":
        """With that arithmetic mean."""
        return cls(math.log(mean) - sigma * sigma / 2, sigma)

    def quantile(self, share: float) -> float:
        """See Distribution."""
        return min(self.high, max(self.low, math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(share))))


@dataclass(frozen=True, slots=True)
class Knots:
    """Through stated quantiles: between them, and beyond, ln x is linear in the normal score of the share."""

    shares: tuple[float, ...]
    values: tuple[float, ...]
    low: float = 1.0
    high: float = math.inf

    def __post_init__(self) -> None:
        pairs = (self.shares, self.values)
        if len(self.shares) != len(self.values) or len(self.shares) < 2:
            raise ValueError("as many shares as values, and at least two")
        if any(list(row) != sorted(row) for row in pairs) or self.values[0] <= 0:
            raise ValueError("shares and values must grow, and values be above 0")

    @classmethod
    def stated(
        cls, p50: float, p90: float, p99: float, mean_of_log: float, high: float = math.inf
    ) -> "Knots":
        """From three quantiles and the mean of ln x, which fixes the lower half: half a lognormal of its own."""
        z90, z99 = _NORMAL.inv_cdf(0.9), _NORMAL.inv_cdf(0.99)
        slope = (math.log(p90) - math.log(p50)) / z90
        steep = (math.log(p99) - math.log(p90)) / (z99 - z90)
        density = _NORMAL.pdf(z90)
        upper = slope * (_HALF_MEAN_Z - density) + 0.1 * slope * z90 + steep * (density - 0.1 * z90)
        below = (math.log(p50) + upper - mean_of_log) / _HALF_MEAN_Z
        p01 = math.exp(math.log(p50) - below * z99)
        return cls((0.01, 0.5, 0.9, 0.99), (p01, p50, p90, p99), high=high)

    def quantile(self, share: float) -> float:
        """See Distribution."""
        at = bisect.bisect_left(self.shares, share)
        at = min(max(at, 1), len(self.shares) - 1)
        left, right = _NORMAL.inv_cdf(self.shares[at - 1]), _NORMAL.inv_cdf(self.shares[at])
        low, high = math.log(self.values[at - 1]), math.log(self.values[at])
        z = _NORMAL.inv_cdf(share)
        value = math.exp(low + (high - low) * (z - left) / (right - left))
        return min(self.high, max(self.low, value))


@dataclass(frozen=True, slots=True)
class Linear:
    """Through stated quantiles from share 0 to share 1, linear between them: for shares of something."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """See Distribution."""
        at = min(max(bisect.bisect_left(self.shares, share), 1), len(self.shares) - 1)
        left, right = self.shares[at - 1], self.shares[at]
        low, high = self.values[at - 1], self.values[at]
        return low + (high - low) * (share - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Bounded:
    """From low to high with the given mean: low + (high - low) * Beta(1, b), falling from low on."""

    low: float
    high: float
    mean: float

    def quantile(self, share: float) -> float:
        """See Distribution."""
        b = (self.high - self.low) / (self.mean - self.low) - 1
        return self.low + (self.high - self.low) * (1 - (1 - share) ** (1 / b))


@dataclass(frozen=True, slots=True)
class Exponential:
    """With that mean; 0 is always 0."""

    mean: float

    def quantile(self, share: float) -> float:
        """See Distribution."""
        return -self.mean * math.log1p(-share)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    value: float

    def quantile(self, share: float) -> float:
        """See Distribution."""
        del share
        return self.value


@dataclass(frozen=True, slots=True)
class OneOf:
    """A row of values, each as probable as it is frequent in it."""

    values: Sequence[float]

    def quantile(self, share: float) -> float:
        """See Distribution."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
