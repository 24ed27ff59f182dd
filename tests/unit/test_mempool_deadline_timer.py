"""Deadlines are kept without looking for the next one at every event."""

import asyncio
import time

import pytest

from services.mempool import deadline_timer
from services.mempool.deadline_timer import DeadlineTimer

PATIENCE_S = 60


class Watch:
    """A clock of the loop's time, a deadline that a test sets, and what came of it."""

    def __init__(self) -> None:
        self.deadline_ms: int | None = None
        self.num_looks, self.fired_ms = 0, []
        self.fired, self.looked = asyncio.Event(), asyncio.Event()
        self.timer = DeadlineTimer(self, self._next, self._due)

    def now_ms(self) -> int:
        return int(time.monotonic() * 1000)

    def _next(self) -> int | None:
        self.num_looks += 1
        self.looked.set()
        return self.deadline_ms

    def _due(self) -> None:
        self.fired_ms.append(self.now_ms())
        self.deadline_ms = None
        self.fired.set()


@pytest.fixture
async def watch():
    made = Watch()
    yield made
    made.timer.close()


async def test_many_events_look_once(watch):
    for _ in range(1000):
        watch.timer.look()
    assert watch.num_looks == 0, "the event itself does not pay"
    async with asyncio.timeout(PATIENCE_S):
        await watch.looked.wait()
    await asyncio.sleep(10 * deadline_timer.LOOK_S)
    assert watch.num_looks == 1


@pytest.mark.parametrize("in_ms", [-5, 0, 1, 30])
async def test_a_deadline_fires_once_and_not_before_its_time(watch, in_ms):
    watch.deadline_ms = due_ms = watch.now_ms() + in_ms
    watch.timer.look()
    async with asyncio.timeout(PATIENCE_S):
        await watch.fired.wait()
    await asyncio.sleep(0.01)
    assert len(watch.fired_ms) == 1
    assert watch.fired_ms[0] >= due_ms - 2  # both clocks cut to milliseconds


async def test_an_earlier_deadline_takes_the_place_of_a_later_one(watch):
    watch.deadline_ms = watch.now_ms() + 60_000
    watch.timer.look()
    await asyncio.sleep(10 * deadline_timer.LOOK_S)
    watch.deadline_ms = watch.now_ms() + 5
    watch.timer.look()
    async with asyncio.timeout(PATIENCE_S):
        await watch.fired.wait()


async def test_nothing_is_due_after_the_close(watch):
    watch.deadline_ms = watch.now_ms() + 500
    watch.timer.look()
    await watch.looked.wait()
    watch.timer.look()
    watch.timer.close()
    fired_ms = list(watch.fired_ms)  # none, unless this process stood still
    await asyncio.sleep(0.6)
    assert watch.fired_ms == fired_ms
