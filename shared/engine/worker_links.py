"""How fast KV comes to this instance, by path: from what its mempool brought, for the scheduler's eq 2."""

import time
from collections import Counter, deque
from collections.abc import Callable
from statistics import median

from shared.costmodel.transfer import WINDOW, LinkMeter, careful_rate, faded
from shared.observe import metrics
from shared.wire.cost import LinkRate

MAX_SOURCES = 1_024  # mempools of other hosts that are remembered
FETCHED_BY = ("peer", "dram", "remote")  # paths by which bytes move


class _LinkGauges:
    """What eq 2 counts with, by path."""

    def __init__(self) -> None:
        label = ("path",)
        self._gb_per_s = metrics.gauge(
            "quire_worker_link_gb_per_s", "KV that comes to this instance, as measured lately.", label
        )
        self._latency_ms = metrics.gauge(
            "quire_worker_link_latency_ms", "Of such a transfer, whatever its size.", label
        )

    def set(self, path: str, rate: LinkRate) -> None:
        self._gb_per_s.labels(path).set(rate.gb_per_s)
        self._latency_ms.labels(path).set(rate.latency_ms)


class MeasuredLinks:
    """Used from the event loop. Args: clock_s: monotonic."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._meters: dict[str, LinkMeter] = {}
        self._seen_s: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}  # paths whose latency is shown by fetches alone
        self._met: dict[str, None] = {}  # sources, the oldest first
        self._num_came: Counter[str] = Counter()  # transfers that were measured, by path
        self._num_given_up: Counter[str] = Counter()
        self._found_ms: deque[float] = deque(maxlen=WINDOW)
        self._gauges = _LinkGauges()

    def called(self, source: str, num_bytes: int, ms: float) -> None:
        """A call that brought so much from the mempool of another host.

        The first from there is left out: the path was opened in it, which takes longer than many transfers.
        """
        if self._has_met(source) and self._meter("remote").observe(num_bytes, ms):
            self._saw("remote", self._num_came)

    def gave_up(self, source: str, num_bytes: int, ms: float) -> None:
        """Of what was wanted from there so much was still to come after `ms`, and nobody waited longer."""
        if self._has_met(source) and self._meter("remote").gave_up(num_bytes, ms):
            self._saw("remote", self._num_given_up)

    def _has_met(self, source: str) -> bool:
        """Before now."""
        if source in self._met:
            return True
        self._met[source] = None
        if len(self._met) > MAX_SOURCES:
            del self._met[next(iter(self._met))]
        return False

    def copied(self, path: str, num_bytes: int, ms: float, *, call_ms: float | None = None) -> None:
        """A copy within this host: `ms` has no waiting in it.

        Args: call_ms: the whole call, of a prompt that waited for nothing but pages and the copy. What calls take that
        bring nothing is none of the path's. None: a hand-off, which waits for the prompt's end too.
        """
        meter = self._meter(path, times_copies=True)
        if call_ms is not None and call_ms >= ms:  # a shorter one came to a copy that was under way
            meter.waited(max(0.0, call_ms - ms - (median(self._found_ms) if self._found_ms else 0.0)))
            self._waited_s[path] = self._clock_s()
        if meter.observe(num_bytes, ms):
            self._saw(path, self._num_came)

    def found(self, call_ms: float) -> None:
        """A call of a prompt that brought nothing: all of it was here, or nowhere."""
        self._found_ms.append(call_ms)

    def _saw(self, path: str, count: Counter[str]) -> None:
        self._seen_s[path] = self._clock_s()
        count[path] += 1

    def _meter(self, path: str, *, times_copies: bool = False) -> LinkMeter:
        meter = self._meters.get(path)
        if meter is None:
            meter = self._meters[path] = LinkMeter(careful_rate(path), times_copies)
        return meter

    def rates(self) -> dict[str, LinkRate]:
        """By path, of those that something came by; the longer ago, the more careful."""
        now_s = self._clock_s()
        return {
            path: faded(
                meter.rate, meter.careful, (now_s - self._seen_s[path]) * 1e3,
                (now_s - self._waited_s.get(path, self._seen_s[path])) * 1e3,
            )
            for path, meter in self._meters.items()
            if meter.rate is not None
        }  # fmt: skip

    def status(self) -> dict[str, dict[str, float]]:
        """What eq 2 counts with, by path: also the careful rate of one that nothing was measured of (both counts 0)."""
        rates = self.rates()
        return {
            path: {
                "gb_per_s": float(f"{rate.gb_per_s:.4g}"),
                "latency_ms": round(rate.latency_ms, 3),
                "num_measured": self._num_came[path],
                "num_given_up": self._num_given_up[path],
            }
            for path in (*FETCHED_BY, *(rates.keys() - {*FETCHED_BY}))
            for rate in (rates.get(path) or careful_rate(path),)
        }

    def update_gauges(self) -> None:
        """Of paths that something was measured of."""
        for path, rate in self.rates().items():
            self._gauges.set(path, rate)
