"""Waiting on an event loop to the microsecond, for load generators.

libuv rounds timers to milliseconds, so that arrivals at 1,000 a second would come in bursts, one a millisecond, and the
queueing of a burst would be measured. A timerfd wakes the loop when it is due, without spinning.
"""

import asyncio
import ctypes
import os
import random
import time
from collections.abc import AsyncIterator

CLOCK_MONOTONIC = 1
ABSOLUTE = 1
TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Moment), ("value", _Moment))


class PreciseTimer:
    """One waiter at a time. Use as a context manager on a running loop. Raises: OSError where there is no timerfd."""

    def __enter__(self) -> "PreciseTimer":
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.Future[None] | None = None
        self._fd = _checked(_libc.timerfd_create(CLOCK_MONOTONIC, TFD_FLAGS))
        self._loop.add_reader(self._fd, self._on_due)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_due(self) -> None:
        os.read(self._fd, 8)
        if self._due is not None and not self._due.done():
            self._due.set_result(None)

    async def until(self, due_s: float) -> None:
        """Until time.monotonic() is so much, or at once where it is already. Cost: two system calls."""
        if time.monotonic() >= due_s:
            return
        self._due = self._loop.create_future()
        seconds = int(due_s)
        value = _Moment(seconds, int((due_s - seconds) * 1e9) or 1)
        setting = _Setting(_Moment(0, 0), value)
        _checked(_libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(setting), None))
        await self._due


async def poisson(rng: random.Random, rate_per_s: float, count: int) -> AsyncIterator[float]:
    """Waits for each of so many arrivals; yields when it was due, by time.monotonic()."""
    with PreciseTimer() as timer:
        due_s = time.monotonic()
        for _ in range(count):
            due_s += rng.expovariate(rate_per_s)
            await timer.until(due_s)
            yield due_s


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
