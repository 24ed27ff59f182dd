"""When the pool has something to do without an event. Looking for the next one costs as much as a copy's start."""

import asyncio
from collections.abc import Callable

from shared.transport.clock import Clock

LOOK_S = 0.001  # deadlines are in whole milliseconds


class DeadlineTimer:
    """look() after every event, close() once; on one loop. However many events there are, it looks once in LOOK_S.

    Args: next_deadline_ms: None: there is none; due: called at a deadline, or a little before or after it.
    """

    def __init__(
        self, clock: Clock, next_deadline_ms: Callable[[], int | None], due: Callable[[], None]
    ) -> None:
        self._clock, self._next_deadline_ms, self._due = clock, next_deadline_ms, due
        self._looking: asyncio.Handle | None = None
        self._timer: tuple[float, asyncio.Handle] | None = None  # uvloop makes no timer of what is due now

    def look(self) -> None:
        """Something has happened: the next deadline may be another."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        due_ms = self._next_deadline_ms()
        if due_ms is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0, due_ms - self._clock.now_ms()) / 1000
        if self._timer is not None:
            if self._timer[0] <= at + 0.001:
                return
            self._timer[1].cancel()
        self._timer = at, loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._due()

    def close(self) -> None:
        """Nothing is due any more."""
        if self._looking is not None:
            self._looking.cancel()
        if self._timer is not None:
            self._timer[1].cancel()
