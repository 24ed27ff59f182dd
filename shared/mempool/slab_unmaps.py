"""Slabs whose memory goes back to the system, unmapped where an engine's steps feel it least.

The driver holds a lock for 14 to 135 us while it unmaps a slab; a thread that unmaps back to back doubles the steps
beside it, which launch kernels. So while steps are run, their own thread unmaps a few behind each launch, when it would
only wait for the GPU; without steps, a thread of its own does. docs/decisions/0013.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shared.errors import ClusterError

IDLE_S = 0.02  # without a step for so long, a thread of its own does what is left for steps to do
STEP_SHARE = 0.15  # of the time between two steps is for unmapping: 40 GiB/s in steps of 5 ms
MAX_STEP_S = 0.001
PAUSE_S = 50e-6  # of the thread, between two slabs: whoever launches kernels now goes first

logger = logging.getLogger(__name__)


class Unmapper(Protocol):
    """Raises ClusterError or OSError when the driver refuses; the slab stays mapped then."""

    def unmap(self, slabs: Sequence[int]) -> None:
        """No step touches these (in order), begun or to come. Those that are not mapped already are left out."""
        ...


class SlabUnmaps:
    """Of one rank. `lock` is held while slabs are unmapped; whoever maps some takes it too.

    Args:
        user: unmaps.
        say: told which slabs are unmapped, on the thread that did it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        user: Unmapper,
        say: Callable[[Sequence[int]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self._user, self._say, self._clock = user, say, clock
        self._waiting: deque[int] = deque()
        self._arrived = threading.Event()
        self._stepped_s = clock() - 2 * IDLE_S
        self._closed = False
        threading.Thread(target=self._work, name="quire-unmap", daemon=True).start()

    def add(self, slabs: Sequence[int]) -> None:
        """No step touches these, begun or to come."""
        self._waiting.extend(slabs)
        self._arrived.set()

    def step_launched(self) -> None:
        """By the thread of the steps, behind a step's last launch. Cost: 0.2 us when nothing waits, else STEP_SHARE of
        the time since the last step, MAX_STEP_S at most, and one slab at least."""
        now = self._clock()
        since, self._stepped_s = now - self._stepped_s, now
        if self._waiting and self.lock.acquire(blocking=False):
            try:
                self._unmap(now + min(MAX_STEP_S, STEP_SHARE * since), pause_s=0.0)
            finally:
                self.lock.release()

    def close(self) -> None:
        """The thread ends."""
        self._closed = True
        self._arrived.set()

    def _work(self) -> None:
        while not self._closed:
            self._arrived.wait()
            self._arrived.clear()
            while self._waiting and not self._closed:
                idle_s = self._clock() - self._stepped_s
                if idle_s < IDLE_S:
                    time.sleep(IDLE_S - idle_s)
                    continue
                with self.lock:
                    self._unmap(self._stepped_s + idle_s + MAX_STEP_S, PAUSE_S)

    def _unmap(self, until_s: float, pause_s: float) -> None:
        done: list[int] = []
        while self._waiting:
            slab = self._waiting.popleft()
            try:
                self._user.unmap([slab])
                done.append(slab)
            except (ClusterError, OSError) as error:  # the mempool waits for this process's end then
                logger.error("slab %d could not be unmapped: %s", slab, error)
            if self._clock() >= until_s:
                break
            if pause_s:
                time.sleep(pause_s)
        if done:
            self._say(done)
