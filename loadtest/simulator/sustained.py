"""A rate that is sustained, not survived: a trace repeated until a queue that only grows must show; the search for it.

A finite trace replayed many times as fast is over before its backlog reaches the SLO: whatever rate it came at looks
kept. So copies of it follow one another at the same rate, and only what comes behind a warm-up counts. No I/O.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.reports.summary import Slo
from loadtest.simulator.request import SimRequest, faster
from shared.ids import BlockHash

LEAST_MS = 30_000.0  # of arrivals that count
LEAST_TTFTS = 10.0  # and so many times the limit: an overload of a tenth then fills it
MOST_MS = 600_000.0  # of warm-up, and of what counts: above a limit of 60 s small overloads do not show
WARM_TTFTS = 2.0
STEPS_PER_DOUBLING = 16  # rates that are tried: 4% apart, and the same ones for every layout and stretch
STRIDE = 4  # of the first look beside a rate; it doubles
MOST_DOUBLINGS = 10  # from the trace's own rate, either way
COPY_BYTES = 4  # of a block's name, in front: zeros in the trace itself


def rate_at(step: int) -> float:
    """Requests a second."""
    return 2.0 ** (step / STEPS_PER_DOUBLING)


def step_of(rate_per_s: float) -> int:
    """The nearest one. Raises: ValueError on a rate of 0."""
    return round(math.log2(rate_per_s) * STEPS_PER_DOUBLING)


@dataclass(frozen=True, slots=True)
class Load:
    """What is simulated for one rate; all but the last num_judged only warm up."""

    requests: list[SimRequest]
    num_judged: int

    def judged_ids(self) -> frozenset[int]:
        """Of the requests that count: by time, one tick of a trace may lie on both sides of the border."""
        return frozenset(request.request_id for request in self.requests[-self.num_judged :])


class EndlessTrace:
    """Copies of a stretch in a row, at its mean rate (where all of it comes at once: that of the trace it is from); the
    tokens, sessions and ids of each copy are its own.

    What counts is a whole number of copies, so that every request of the stretch weighs the same. The warm-up is twice
    the TTFT limit, or as long as a mean answer may take, up to LEAST_MS: before that, decodes are still becoming more.
    """

    def __init__(self, requests: Sequence[SimRequest], slo: Slo, rate_per_s: float) -> None:
        self.rate_per_s = rate_per_s
        self._stretch = list(requests)
        self._num_ids = max(request.request_id for request in requests) + 1
        self._copies = list(requests)  # as many as were needed so far
        answer_tokens = sum(request.output_tokens for request in requests) / len(requests)
        self._least_ms = min(MOST_MS, max(LEAST_MS, LEAST_TTFTS * slo.ttft_ms))
        self._warm_ms = min(
            MOST_MS, max(WARM_TTFTS * slo.ttft_ms, min(LEAST_MS, answer_tokens * slo.tpot_ms))
        )

    def num_at(self, rate_per_s: float) -> int:
        """Requests of at(rate_per_s)."""
        return sum(self._counts(rate_per_s))

    def at(self, rate_per_s: float) -> Load:
        """Cost: some microseconds a request."""
        num_warm, num_judged = self._counts(rate_per_s)
        while len(self._copies) < num_warm + num_judged:
            self._copies += self._copy(len(self._copies) // len(self._stretch))
        found = faster(self._copies[: num_warm + num_judged], rate_per_s / self.rate_per_s)
        return Load(found, num_judged)

    def _counts(self, rate_per_s: float) -> tuple[int, int]:
        """(warm-up, what counts). In requests, as the mean rate has them: bursts move no border."""
        n = len(self._stretch)
        copies = max(1, math.ceil(self._least_ms * rate_per_s / 1000 / n))
        return math.ceil(self._warm_ms * rate_per_s / 1000), copies * n

    def _copy(self, number: int) -> list[SimRequest]:
        n = len(self._stretch)
        later_ms, mark = number * n / self.rate_per_s * 1000, number.to_bytes(COPY_BYTES, "big")

        def fresh(blocks: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
            return tuple(BlockHash(mark + block[COPY_BYTES:]) for block in blocks)

        return [
            replace(
                request,
                request_id=request.request_id + number * self._num_ids,
                arrival_ms=request.arrival_ms + later_ms,
                blocks=fresh(request.blocks),
                output_blocks=fresh(request.output_blocks),
                session=request.session and f"{request.session}#{number}",
                depends_on=None if request.depends_on is None else request.depends_on + number * n,
            )
            for request in self._stretch
        ]


@dataclass(slots=True)
class Bracket:
    """What is known of one layout's highest step. low: held; high: did not; None: not known.

    bottom, top: what is tried at all. At the bottom without success the rate is 0; at the top it is "at least".
    """

    bottom: int
    top: int
    low: int | None = None
    high: int | None = None
    stride: int = STRIDE

    @property
    def is_done(self) -> bool:
        """Nothing is left to try."""
        if self.low is None:
            return self.high is not None and self.high <= self.bottom
        return self.low >= self.top if self.high is None else self.high - self.low <= 1

    @property
    def is_at_least(self) -> bool:
        """No rate was too much."""
        return self.low is not None and self.high is None

    @property
    def most(self) -> float:
        """Steps that it may yet turn out to hold lie below."""
        return math.inf if self.high is None else self.high

    def next_step(self, start: int) -> int:
        """Where to look: at the start, then further and further off, then in the middle."""
        if self.low is not None and self.high is not None:
            return (self.low + self.high) // 2
        if self.low is not None:
            return min(self.low + self.stride, self.top)
        if self.high is not None:
            return max(self.high - self.stride, self.bottom)
        return min(max(start, self.bottom), self.top)

    def note(self, step: int, *, holds: bool) -> None:
        """What came of it."""
        if self.low is not None or self.high is not None:
            self.stride *= 2
        if holds:
            self.low = step
        else:
            self.high = step
