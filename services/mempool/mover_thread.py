"""The thread that starts pulls, so that the event loop never waits for a driver call, and sees them to their end.

A pull between GPUs takes 0.02 to 6 ms. The transports' own threads look twice a millisecond at pulls that somebody
waits for elsewhere, and waking one costs as much as a page; here nobody waits, so this thread looks without sleep for
SPIN_S, giving the GIL away each time, then with naps: each look takes it from the loop, which has the blocks of a large
copy to deal with meanwhile. Only what has failed and must settle is handed over.

The loop orders the next copy while it deals with a thousand pages in one event. By Python's default it would keep the
GIL for 5 ms when this thread wants it, to wake and behind driver calls that take longer than a few us, and the copy
engines would idle: as long as this thread lives, the process's threads ask for their turns after SWITCH_S.
"""

import sys
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from shared.transfer.transfer_job import DrivenFuture
from shared.vital_thread import start_vital

# between looks at what somebody waits for here: a twentieth of the time waited, within these (on an H200 a layer of an
# 8B model takes 0.7 ms for 1K tokens)
MIN_NAP_S, MAX_NAP_S = 0.0001, 0.002
SPIN_S = 0.0003  # after the last start: 100 MB between two GPUs
# between looks at a pull after that: a tenth of the time waited, within these
MIN_LOOK_S, MAX_LOOK_S = 0.0001, 0.0005
JOIN_S = 5.0
SWITCH_S = 0.0001


class PullThread:
    """Owns its thread until close()."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: close() was called
        self._closing = False
        self._watched: list[DrivenFuture] = []
        self._awaited: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        self._thread = start_vital(self._run, name="mover", loss="no page would be copied any more")

    def post(self, action: Callable[[], None]) -> None:
        """Run it on the thread, in order. Actions do not raise; those posted after close() are dropped."""
        self._inbox.put(action)

    def watch(self, future: DrivenFuture) -> None:
        """On the thread: drive this one from now on."""
        self._watched.append(future)

    def when(self, condition: Callable[[], bool], action: Callable[[], None]) -> None:
        """On the thread: run `action` once `condition` is true. Neither raises; dropped by close()."""
        self._awaited.append((condition, action))

    def close(self) -> None:
        """Run what was posted, then end."""
        self._inbox.put(None)
        self._thread.join(JOIN_S)
        sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        since_s = time.monotonic()  # the last action
        while True:
            # behind close() there is nothing to wait for: nothing is posted any more
            actions = self._take(0.0 if self._closing else self._nap_s(time.monotonic() - since_s))
            if self._closing and not actions:
                for future in self._watched:
                    future.hand_over()
                return
            actions += self._due()
            for action in actions:
                action()
            if actions:
                since_s = time.monotonic()
            if self._watched:
                self._drive()

    def _nap_s(self, waited_s: float) -> float | None:
        """How long what is posted may be waited for now; None: until there is some."""
        nap_s = min(MAX_NAP_S, max(MIN_NAP_S, waited_s / 20)) if self._awaited else None
        if self._watched:
            look_s = min(MAX_LOOK_S, max(MIN_LOOK_S, waited_s / 10))
            nap_s = 0.0 if waited_s < SPIN_S else min(look_s, nap_s or look_s)
        return nap_s

    def _take(self, nap_s: float | None) -> list[Callable[[], None]]:
        """All that is posted, after a nap at most."""
        actions: list[Callable[[], None]] = []
        is_waiting = nap_s != 0.0
        if not is_waiting:
            time.sleep(0)  # gives the GIL away
        while is_waiting or not self._inbox.empty():
            try:
                action = self._inbox.get(is_waiting, nap_s)
            except Empty:
                break
            is_waiting = False
            if action is None:
                self._closing = True
            else:
                actions.append(action)
        return actions

    def _drive(self) -> None:
        """A step of each pull. One that has failed and only has to settle is its transport's."""
        now_s = time.monotonic()
        watched, self._watched = self._watched, []
        for future in watched:
            if future.drive is None or future.drive(now_s):
                continue
            if future.done():
                future.hand_over()
            else:
                self._watched.append(future)

    def _due(self) -> list[Callable[[], None]]:
        """What need not be waited for any more."""
        if not self._awaited:
            return []
        waiting, self._awaited = self._awaited, []
        due: list[Callable[[], None]] = []
        for condition, action in waiting:
            if condition():
                due.append(action)
            else:
                self._awaited.append((condition, action))
        return due
