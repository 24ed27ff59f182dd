"""Metrics of every request, counted in plain numbers and handed to Prometheus' twice a second.

A request touches about twelve of them, at 1 to 3 us each in prometheus_client (a lock and, with several processes, a
write to a mapped file), 0.2 us here. One event loop owns them. A process that is killed takes what it counted since the
last settle() with it; /metrics settles those of the process that answers it first.
"""

from bisect import bisect_left

from prometheus_client import Counter, Gauge, Histogram

_ALL: "list[CountTally | LevelTally | HistogramTally]" = []


def settle() -> None:
    """Hand over what was counted. Cost: 1 us for each that changed."""
    for tally in _ALL:
        tally.settle()


class CountTally:
    """A counter without labels, or one of its children."""

    __slots__ = ("_counter", "_since")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._since = 0
        _ALL.append(self)

    def inc(self, amount: int = 1) -> None:
        """One more, or `amount`."""
        self._since += amount

    def settle(self) -> None:
        """See settle()."""
        if self._since:
            self._counter.inc(self._since)
            self._since = 0


class LevelTally:
    """A gauge that only this moves."""

    __slots__ = ("_gauge", "_level", "_told")

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._level = self._told = 0
        _ALL.append(self)

    def inc(self, amount: int) -> None:
        """By so much, possibly negative."""
        self._level += amount

    def settle(self) -> None:
        """See settle()."""
        if self._level != self._told:
            self._gauge.set(self._level)
            self._told = self._level


class HistogramTally:
    """A histogram without labels."""

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = [*histogram._upper_bounds]  # the last one is infinite
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        _ALL.append(self)

    def observe(self, value: float) -> None:
        """One observation, not NaN."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def settle(self) -> None:
        """See settle(). prometheus_client has no public way to observe many at once; its buckets are not cumulative."""
        if not any(self._counts):
            return
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._histogram._sum.inc(self._sum)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
