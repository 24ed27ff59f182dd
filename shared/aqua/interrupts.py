"""Ctrl-C behind a change of several steps instead of within it. No torch."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptsWait:
    """For one `with`: an interrupt (SIGINT) that comes within the block is delivered at its end, once.

    One within another delivers to that one. Other threads than the main one are not interrupted, and a handler that is
    not Python's (the process ends, or nothing happens) is left alone: nothing is done then.
    Cost: two system calls, some 10 us.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._came = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(self, *_: object) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._came:
                handler(signal.SIGINT, None)
