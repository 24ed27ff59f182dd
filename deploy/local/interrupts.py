"""Ctrl-C, SIGTERM and a closed terminal as one thing, which comes when it can be answered."""

import signal
import threading
from types import FrameType
from typing import Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context in which each of them is a KeyboardInterrupt: none before let(), then at once.

    So no process is lost between its start and the code that would end it. What is ignored, as under nohup, stays so.
    """

    def __init__(self) -> None:
        self._came = False
        self._is_let = False
        self._before: list[tuple[int, object]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # nobody else may set handlers
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before.append((number, signal.signal(number, self._on_signal)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  as it came from there
        self._before.clear()

    def let(self) -> None:
        """From now on. Raises: KeyboardInterrupt where one has come already."""
        self._is_let = True
        if self._came:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        if self._is_let:
            raise KeyboardInterrupt
