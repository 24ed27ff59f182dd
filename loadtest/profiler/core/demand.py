"""How much KV a burst keeps alive if nobody waits for memory: what fair slices must hold somewhere (AQUA 4.1, 9.4).

A run without preemption shows when each request was served. Fair slices conserve work: what one request waits, another
is served. So the same run is dealt out again:

1. A prompt comes earlier by the time that it waited while memory was full (`full`), and no earlier than the engine
   could compute it: in the order of arrival, at the speed that the run showed where it was fastest (`prompt_speed`).
   Where the engine itself was the bound and memory was not, nothing comes earlier. Its KV is held from then on.
2. The tokens that were made are made at the same times, in equal shares for all whose prompts are there. With n of them
   each is given V' = rate/n, so that V, what a request that is always there would have been given, orders all ends: who
   came at V0 and wants w tokens leaves at V0 + w.

The sum over all requests is the demand; what exceeds the engine's own memory needs swap space. Both times of 1 are
early ones, and a prompt counts only once it is there: simulated, the peak is within 15% of what the same burst holds
where memory is unlimited (tests/unit/test_profiler.py). Cost: O(n log n).
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

LEAST_MS = 1e-3  # of a delivery: one token at once still has a rate
SLACK = 1e-7  # of V, for sums that are not exact
WINDOW_MS = 1_000.0  # longer than a step; shorter than a burst needs to fill the memory
Span = tuple[float, float]  # begin and end in ms


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request of a run. Times in ms from its beginning; first_ms: its first token."""

    arrival_ms: float
    first_ms: float
    end_ms: float
    prompt_tokens: int
    output_tokens: int


def fair_demand(
    served: Iterable[Served], full: Sequence[Span] = (), *, window_ms: float = WINDOW_MS
) -> list[tuple[float, float]]:
    """(time in ms, KV tokens of all requests in the system) at every change, in order of time; [] for no requests.

    Args: full: when requests waited for memory: apart from each other, in order of time. window_ms: of prompt_speed.
    Sharing of prefixes is not counted: where prompts share, less is held. Twice the same time: before and after.
    """
    requests = [one for one in served if one.output_tokens > 0]
    return _Replay(_ready(requests, full, prompt_speed(requests, window_ms))).run()


def prompt_speed(requests: Sequence[Served], window_ms: float) -> float:
    """Tokens/ms: most prompt tokens whose prompts were done within a window; 0 for no requests.

    Args: window_ms: over a long one memory was full for a part of it, and the engine looks slower than it is.
    """
    inside: deque[Served] = deque()
    tokens = best = 0
    for one in sorted(requests, key=lambda each: each.first_ms):
        inside.append(one)
        tokens += one.prompt_tokens
        while inside[0].first_ms <= one.first_ms - window_ms:
            tokens -= inside.popleft().prompt_tokens
        best = max(best, tokens)
    return best / window_ms


def peak_tokens(curve: Sequence[tuple[float, float]]) -> int:
    """The largest demand."""
    return max((round(tokens) for _, tokens in curve), default=0)


def swap_bytes(demand_tokens: int, bytes_per_token: float, pool_bytes: int) -> int:
    """What does not fit in the engine's own memory."""
    return max(0, round(demand_tokens * bytes_per_token) - pool_bytes)


def _ready(requests: Sequence[Served], full: Sequence[Span], speed: float) -> list[tuple[float, Served]]:
    """When each prompt is there, in order of these times."""
    full_ms = _Covered(full)
    out: list[tuple[float, Served]] = []
    done_ms = 0.0
    for one in sorted(requests, key=lambda each: each.arrival_ms):
        done_ms = max(done_ms, one.arrival_ms) + (one.prompt_tokens / speed if speed else 0.0)
        earliest_ms = max(done_ms, one.first_ms - full_ms.between(one.arrival_ms, one.first_ms))
        done_ms = min(earliest_ms, one.first_ms)
        out.append((done_ms, one))
    return sorted(out, key=lambda each: each[0])


class _Covered:
    """How much of a time lies within spans."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._begins = [begin for begin, _ in spans]
        self._spans = spans
        self._sums = [0.0, *accumulate(end - begin for begin, end in spans)]

    def between(self, from_ms: float, to_ms: float) -> float:
        return self._until(to_ms) - self._until(from_ms)

    def _until(self, at_ms: float) -> float:
        place = bisect_right(self._begins, at_ms)
        if not place:
            return 0.0
        begin, end = self._spans[place - 1]
        return self._sums[place - 1] + min(at_ms, end) - begin


class _Replay:
    """The fluid: rate(t) tokens/ms in equal shares to all members."""

    def __init__(self, ready: Sequence[tuple[float, Served]]) -> None:
        self._joins = ready
        changes: list[tuple[float, float, int]] = []
        for _, one in ready:
            end_ms = max(one.end_ms, one.first_ms + LEAST_MS)
            rate = one.output_tokens / (end_ms - one.first_ms)
            changes += [(one.first_ms, rate, 1), (end_ms, -rate, -1)]
        self._changes = sorted(changes)
        self._now_ms = 0.0
        self._rate, self._num_served = 0.0, 0
        self._given = 0.0  # V
        self._held = 0.0  # tokens of members: their prompts, and what each was given
        self._ends: list[tuple[float, int, Served]] = []  # members by the V at which they have all
        self._curve: list[tuple[float, float]] = []

    def run(self) -> list[tuple[float, float]]:
        joins, changes = iter(self._joins), iter(self._changes)
        coming, change = next(joins, None), next(changes, None)
        while change is not None or coming is not None:
            if coming is not None and (change is None or coming[0] <= change[0]):
                self._until(coming[0])
                self._join(coming[1])
                coming = next(joins, None)
            elif change is not None:
                self._until(change[0])
                self._num_served += change[2]
                self._rate = (
                    self._rate + change[1] if self._num_served else 0.0
                )  # no residue of sums when idle
                change = next(changes, None)
        for _, _, one in sorted(self._ends):  # what rounding left
            self._leave(one)
        return self._curve

    def _join(self, one: Served) -> None:
        self._note()
        heapq.heappush(self._ends, (self._given + one.output_tokens, len(self._curve), one))
        self._held += one.prompt_tokens
        self._note()

    def _leave(self, one: Served) -> None:
        self._note()
        self._held -= one.prompt_tokens + one.output_tokens
        self._note()

    def _until(self, at_ms: float) -> None:
        """Hand out what was made until then."""
        while self._ends and self._rate > 0 and self._now_ms < at_ms:
            num_members = len(self._ends)
            more = self._rate / num_members * (at_ms - self._now_ms)
            lacks = max(0.0, self._ends[0][0] - self._given)
            if lacks > more + SLACK:
                self._given += more
                self._held += more * num_members
                break
            self._given += lacks
            self._held += lacks * num_members
            self._now_ms = min(at_ms, self._now_ms + lacks * num_members / self._rate)
            self._leave(heapq.heappop(self._ends)[2])
        self._now_ms = max(self._now_ms, at_ms)

    def _note(self) -> None:
        self._curve.append((self._now_ms, max(0.0, self._held)))
