"""Page-locking of host memory, a chunk at a time and in moments without copies. What is locked: mover_spaces.py.

While the driver locks a chunk (0.1 s) whatever else this process asks of the GPU waits for it: copies of a burst would
stand still for a second each. So a chunk waits for a moment in which nothing is copied, but not for ever: until it is
locked, copies of that memory take a slower way. Memory that goes to the system for long (*rests*) is not locked.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MOST_WAIT_S = 2.0
POLL_S = 0.005


class Pinning:
    """Args:
    pin_some: locks the next chunk, on the background thread: in how many seconds it has more to do; None: nothing.
    is_copying: asked on the loop.
    unpin: ends it for a space, on the background thread. resting: spaces that pin_some leaves out.
    on_unlocked: on the loop, when copies need not wait for a space any more (is_unlocking()).
    """

    def __init__(
        self,
        pin_some: Callable[[], float | None],
        is_copying: Callable[[], bool],
        background: ThreadPoolExecutor,
        loop: asyncio.AbstractEventLoop,
        unpin: Callable[[int], None] = lambda _: None,
        resting: set[int] | None = None,
        on_unlocked: Callable[[], None] = lambda: None,
    ) -> None:
        self._pin_some, self._is_copying = pin_some, is_copying
        self._background, self._loop = background, loop
        self._unpin, self._on_unlocked = unpin, on_unlocked
        self._unlocking = Counter[int]()  # by space, how often the background thread has yet to unlock it
        self.resting = set[int]() if resting is None else resting
        self._later: asyncio.TimerHandle | None = None  # for memory that the driver refused
        self.num_waits = 0  # chunks that gave way to copies

    def begin(self) -> None:
        """From any thread; harmless when nothing is to be locked, or was begun before."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._next, 0.0)

    def rest(self, number: int) -> None:
        """Nothing is copied from or to this space before wake(); what the background thread is told next finds it
        unlocked. On the loop."""
        if number not in self.resting:
            self.resting.add(number)
            with contextlib.suppress(RuntimeError):  # close() came
                self._background.submit(self._unlock, number)
                self._unlocking[number] += 1

    def is_unlocking(self, number: int) -> bool:
        """Whether its memory is yet to be unlocked, though it may be awake again: a copy begun now would lose it on the
        way. What waits behind that counts on it, so a wake() does not call it off. On the loop."""
        return number in self._unlocking

    def wake(self, number: int) -> None:
        """It is locked again, as every space; copies begin as soon as it is not is_unlocking(). On the loop."""
        if number in self.resting:
            self.resting.discard(number)
            self.begin()

    def _unlock(self, number: int) -> None:
        """In the background."""
        try:
            self._unpin(number)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._unlocked, number)

    def _unlocked(self, number: int) -> None:
        self._unlocking[number] -= 1
        if not self._unlocking[number]:
            del self._unlocking[number]
            self._on_unlocked()

    def _next(self, waited_s: float) -> None:
        if self._is_copying() and waited_s < MOST_WAIT_S:
            self.num_waits += waited_s == 0.0
            self._loop.call_later(POLL_S, self._next, waited_s + POLL_S)
            return
        with contextlib.suppress(RuntimeError):  # close() came
            self._background.submit(self._one)

    def _one(self) -> None:
        """In the background."""
        wait_s = self._pin_some()
        if wait_s == 0.0:
            self.begin()
        elif wait_s is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._try_later, wait_s)

    def _try_later(self, wait_s: float) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = self._loop.call_later(wait_s, self._next, 0.0)
