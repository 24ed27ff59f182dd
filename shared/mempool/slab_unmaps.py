"""Slabs whose memory goes back to the system, unmapped where an engine's steps feel it least.

The driver holds a lock for 30 to 60 us while it unmaps a slab, for which kernels that are launched wait; and the thread
of the steps has no time left that it could give. So another thread does it, one slab at a time with pauses, at no more
than STEPS_BYTES_PER_S while steps are run; the user's calls need no interpreter lock. docs/decisions/0013.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shared.errors import ClusterError
from shared.vital_thread import end_process, start_vital

IDLE_S = 0.02  # without a step for so long, nobody minds how it is done
STEPS_BYTES_PER_S = 64 << 30  # 0.4 ms between two slabs of 32 MiB; and a turn of this thread for every batch
BATCH = 8  # slabs of which the mempool is told at once: 5 ms of 32 MiB each

logger = logging.getLogger(__name__)


class Unmapper(Protocol):
    """Raises ClusterError or OSError when the driver refuses; the slabs may stay mapped then."""

    def unmap(self, slabs: Sequence[int], bytes_per_s: int = 0) -> None:
        """No step touches these (in order), begun or to come. Those that are not mapped already are left out.

        Args: bytes_per_s: pauses between two make it no faster; 0: as fast as it goes.
        """
        ...


class SlabUnmaps:
    """Of one rank. `lock` is held while slabs are unmapped; whoever maps some takes it too.

    Args:
        user: unmaps.
        say: told which slabs are unmapped, on the thread that did it.
        clock: seconds, monotonic.
        on_bug: see start_vital().
    """

    def __init__(
        self,
        user: Unmapper,
        say: Callable[[Sequence[int]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_bug: Callable[[], None] = end_process,
    ) -> None:
        self.lock = threading.Lock()
        self._user, self._say, self._clock = user, say, clock
        self._waiting: deque[int] = deque()
        self._arrived = threading.Event()
        self._stepped_s = clock() - 2 * IDLE_S
        self._closed = False
        start_vital(
            self._work, name="quire-unmap", on_bug=on_bug, loss="memory that shall go would stay mapped here"
        )

    def add(self, slabs: Sequence[int]) -> None:
        """No step touches these, begun or to come."""
        self._waiting.extend(slabs)
        self._arrived.set()

    def step_launched(self) -> None:
        """By the thread of the steps, behind a step's last launch. Cost: 0.1 us."""
        self._stepped_s = self._clock()

    def close(self) -> None:
        """The thread ends."""
        self._closed = True
        self._arrived.set()

    def _work(self) -> None:
        while not self._closed:
            self._arrived.wait()
            self._arrived.clear()
            while self._waiting and not self._closed:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                with self.lock:
                    done = self._unmap(batch)
                if done:
                    self._say(done)

    def _unmap(self, batch: list[int]) -> list[int]:
        steps_run = self._clock() - self._stepped_s < IDLE_S
        try:
            self._user.unmap(batch, STEPS_BYTES_PER_S if steps_run else 0)
            return batch
        except (ClusterError, OSError) as error:
            logger.error("slabs %s could not be unmapped at once: %s", batch, error)
        done: list[int] = []
        for slab in batch:
            try:
                self._user.unmap([slab])
                done.append(slab)
            except (ClusterError, OSError) as error:  # the mempool waits for this process's end then
                logger.error("slab %d could not be unmapped: %s", slab, error)
        return done
