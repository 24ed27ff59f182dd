"""Clocks. Deciding code never reads one: a shell reads it and passes `now_ms` in."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic milliseconds of this host. Hosts share no clock: durations travel, times do not."""

    def now_ms(self) -> int: ...


class MonotonicClock:
    """The host's CLOCK_MONOTONIC, in whole milliseconds."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class ManualClock:
    """A clock for tests: it moves only when told, and never backwards."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by_ms: int) -> int:
        """Move on by `by_ms` and return the new time. Raises: ValueError if that would go backwards."""
        if by_ms < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-by_ms} ms")
        self._now_ms += by_ms
        return self._now_ms
