"""transfer(): how long bytes take on each path, for eq 2 of MemServe 5.3.1. Pure arithmetic."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from shared.wire.cost import LinkRate

BYTES_PER_MS = 1e6  # of 1 GB/s
# Until somebody has measured: what a path reaches at least on any hardware of its kind.
CAREFUL_RATES: Mapping[str, LinkRate] = {
    "alias": LinkRate(gb_per_s=1000.0, latency_ms=0.1),  # mapping only
    "peer": LinkRate(gb_per_s=5.0, latency_ms=1.0),
    "dram": LinkRate(gb_per_s=5.0, latency_ms=1.0),
    "remote": LinkRate(gb_per_s=1.0, latency_ms=2.0),
}
LEAST_BYTES = 1 << 20  # a shorter transfer says something of the latency only
RECENT = 5  # transfers whose median rate counts: a link that has changed is known after three
UNLIKE = 2.0  # times the bytes, of two that are compared
WINDOW = 9  # lines whose median is the latency, which changes less than the rate
FULL_WINDOW = 5  # with fewer it is the careful one
MAX_AGE = 128  # a line with so many newer transfers is of another time
FADE_HALF_LIFE_MS = 60_000.0
LEAST_GB_PER_S = 1e-6  # a link that brings nothing has a rate too, from which it can fade


def careful_rate(path: str) -> LinkRate:
    """Of a path that nobody has measured; an unknown one counts as "remote"."""
    return CAREFUL_RATES.get(path) or CAREFUL_RATES["remote"]


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Measured rates by path ("alias", "peer", "dram", "remote"); paths that are missing count as careful."""

    rates: Mapping[str, LinkRate] = field(default_factory=dict[str, LinkRate])

    def transfer_ms(self, path: str, num_bytes: int) -> float:
        """Time of one transfer. An unknown path counts as "remote"; nothing to move costs nothing."""
        if num_bytes <= 0:
            return 0.0
        rate = self.rates.get(path) or careful_rate(path)
        return rate.latency_ms + num_bytes / (max(rate.gb_per_s, LEAST_GB_PER_S) * BYTES_PER_MS)


@dataclass(slots=True)
class LinkMeter:
    """What one path's transfers show of it: ms = latency + bytes / rate. Robust against the odd one that was held up.

    The rate is the median of the last few transfers. The latency is where lines through transfers of unlike sizes that
    followed each other meet no bytes, their median; until there are FULL_WINDOW, the careful one. No transfer is in two
    lines: one that was held up would make a latency of its own. It is shorter than whole transfers: lines that begin
    later than two of the last few took are of another time, and are forgotten.

    Args: times_copies: what is observed are copies alone, without the latency of who waited for them: waited() says it.
    Cost: some 10 us an observation; holds RECENT transfers, twice, and WINDOW latencies.
    """

    careful: LinkRate
    times_copies: bool = False
    rate: LinkRate | None = None  # None: nothing that says something was seen
    # bytes, ms, and whether all of them came
    _last: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=RECENT))
    # of those that are in no line, since the last line
    _no_line: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    _num_seen: int = 0  # transfers that were tried for lines
    # and _num_seen then
    _latencies: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, num_bytes: int, ms: float) -> bool:
        """One more transfer. False: ignored, as short ones and nonsense (not positive, not finite) are."""
        if num_bytes < LEAST_BYTES or not (isfinite(ms) and ms > 0.0):
            return False
        if not self.times_copies:
            self._compare(num_bytes, ms)
        self._last.append((num_bytes, ms, True))
        if not self.times_copies:
            self._forget_disproved()
        self._say()
        return True

    def waited(self, ms: float) -> None:
        """Where copies are timed: who waited for one took so much longer than it. The median of the last few counts.

        Ignored where it makes no sense.
        """
        if isfinite(ms) and ms >= 0.0:
            self._latencies.append((ms, self._num_seen))
            while len(self._latencies) > FULL_WINDOW:
                self._latencies.popleft()

    def gave_up(self, num_bytes: int, ms: float) -> bool:
        """So much had not come after `ms`: the link is at most as fast, and counts for half as fast as it was thought.

        The half, because how slow it is shows in no transfer that is given up: one that saves more than anybody waits
        would be tried for good. Never raises the rate: what is counted is no faster than the median. A bound is no
        end of a line, nor does it bound a latency. False as observe().
        """
        if num_bytes < LEAST_BYTES or not (isfinite(ms) and ms > 0.0):
            return False
        thought = self.rate or self.careful
        slower = max(thought.gb_per_s / 2, min(thought.gb_per_s, LEAST_GB_PER_S))
        waited_ms = 0.0 if self.times_copies else thought.latency_ms
        counted_ms = max(ms, waited_ms + num_bytes / (slower * BYTES_PER_MS))
        self._last.append((num_bytes, counted_ms, False))
        self._say()
        return True

    def _say(self) -> None:
        """The rate, of what is known."""
        latency_ms = (
            median(ms for ms, _ in self._latencies)
            if len(self._latencies) >= FULL_WINDOW
            else self.careful.latency_ms
        )
        latency_ms = max(0.0, latency_ms)
        waited_ms = 0.0 if self.times_copies else latency_ms
        # of one that took no longer than the latency all may have been bytes: the link is at least as fast; and no jump
        # behind it, or what took a little longer would say that bytes take no time
        ms_per_byte = median(
            max(took - waited_ms, min(took, waited_ms)) / size for size, took, _ in self._last
        )
        self.rate = LinkRate(gb_per_s=1 / (ms_per_byte * BYTES_PER_MS), latency_ms=latency_ms)

    def _compare(self, num_bytes: int, ms: float) -> None:
        """With those that are in no line yet, for the latency."""
        self._num_seen += 1
        while self._latencies and self._num_seen - self._latencies[0][1] > MAX_AGE:
            self._latencies.popleft()
        found: list[float] = []
        for size, took in self._no_line:
            if max(size, num_bytes) >= UNLIKE * min(size, num_bytes):
                ms_per_byte = (ms - took) / (num_bytes - size)
                if ms_per_byte > 0.0:  # otherwise one of them was held up
                    found.append(ms - ms_per_byte * num_bytes)
        if found:
            self._latencies.append((median(found), self._num_seen))
            self._no_line.clear()
        else:
            self._no_line.append((num_bytes, ms))

    def _forget_disproved(self) -> None:
        """Latencies that two transfers were shorter than. One may have come by an earlier call, for the most part."""
        quickest = sorted(took for _, took, came in self._last if came)[:2]
        if len(quickest) == 2 and self._latencies:
            took_ms = quickest[1]
            if max(self._latencies)[0] >= took_ms:
                kept = [line for line in self._latencies if line[0] < took_ms]
                self._latencies = deque(kept, maxlen=WINDOW)


def faded(rate: LinkRate, careful: LinkRate, age_ms: float, latency_age_ms: float | None = None) -> LinkRate:
    """What to say of a link that was last seen so long ago.

    Where it was slower than careful, eq 2 may not use it any more, and nothing would show that it is quick again (or
    that it was never that slow): it comes back to careful by half of the way, in ratios, each half-life. A link far too
    slow is so tried again seldom. The rate and the latency each for itself: either alone can refuse every fetch. What
    was better than careful stays as it was seen: it is used.

    Args: latency_age_ms: where something else shows the latency than the rate; None: the same.
    """

    def kept_of(since_ms: float) -> float:
        return 0.5 ** (max(0.0, since_ms) / FADE_HALF_LIFE_MS)

    kept = kept_of(age_ms)
    gb_per_s, latency_ms = rate.gb_per_s, rate.latency_ms
    if 0.0 < gb_per_s < careful.gb_per_s:
        gb_per_s = careful.gb_per_s * (gb_per_s / careful.gb_per_s) ** kept
    if 0.0 < careful.latency_ms < latency_ms:
        kept = kept_of(age_ms if latency_age_ms is None else latency_age_ms)
        latency_ms = careful.latency_ms * (latency_ms / careful.latency_ms) ** kept
    return LinkRate(gb_per_s=gb_per_s, latency_ms=latency_ms)


def should_fetch(
    transfer_ms: float, exec_ms: float, exec_with_more_ms: float, *, margin: float = 1.0
) -> bool:
    """MemServe eq 2: fetch what another instance has, instead of computing it, where that is no slower.

    Args: exec_ms: with what is here; exec_with_more_ms: with what would be here after the transfer.
    """
    return transfer_ms * margin <= exec_ms - exec_with_more_ms
