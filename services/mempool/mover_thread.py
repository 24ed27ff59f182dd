"""The thread that starts pulls, so that the event loop never waits for a driver call, and sees short ones to their end.

A pull between GPUs takes 0.1 to 1 ms. The transports' own threads look twice a millisecond at pulls that somebody
waits for elsewhere; here nobody waits, so this thread looks without sleep for SPIN_S, giving the GIL away each time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from shared.transfer.transfer_job import DrivenFuture

# between looks at what somebody waits for here: a twentieth of the time waited, within these (on an H200 a layer of an
# 8B model takes 0.7 ms for 1K tokens)
MIN_NAP_S, MAX_NAP_S = 0.0001, 0.002
SPIN_S = 0.003  # after the last start: 1 GB between two GPUs
JOIN_S = 5.0


class PullThread:
    """Owns its thread until close()."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._watched: list[DrivenFuture] = []
        self._awaited: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run it on the thread, in order. Actions do not raise; those posted after close() are dropped."""
        with self._changed:
            self._inbox.append(action)
            self._changed.notify()

    def watch(self, future: DrivenFuture) -> None:
        """On the thread: look at this one for a while."""
        self._watched.append(future)

    def when(self, condition: Callable[[], bool], action: Callable[[], None]) -> None:
        """On the thread: run `action` once `condition` is true. Neither raises; dropped by close()."""
        self._awaited.append((condition, action))

    def close(self) -> None:
        """Run what was posted, then end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        until_s, due_s = 0.0, time.monotonic()
        while True:
            with self._changed:
                if not self._watched:
                    waited_s = time.monotonic() - due_s
                    nap_s = min(MAX_NAP_S, max(MIN_NAP_S, waited_s / 20)) if self._awaited else None
                    self._changed.wait_for(lambda: bool(self._inbox) or self._closing, nap_s)
                actions = list(self._inbox)
                self._inbox.clear()
                if self._closing and not actions:
                    return
            actions += self._due()
            if actions:
                due_s = time.monotonic()
            for action in actions:
                action()
            now_s = time.monotonic()
            if actions:
                until_s = now_s + SPIN_S
            for future in self._watched:
                if future.drive is not None:
                    future.drive(now_s)
            keep = now_s < until_s
            self._watched = [future for future in self._watched if keep and not future.done()]
            if self._watched:
                time.sleep(0)

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
