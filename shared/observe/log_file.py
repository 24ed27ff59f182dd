"""The end of the log: bytes to stderr, which is a file on a disk that may be full."""

from collections.abc import Callable
from typing import Any, TextIO


class LogFile:
    """Lines that the stream refuses are counted and lost; they never cost who logs them anything.

    It writes behind the stream's buffers: those keep what was refused and say it much later.

    Args:
        told: the line that says how many were lost, written once there is room again.
    """

    def __init__(self, stream: TextIO, told: Callable[[int], bytes]) -> None:
        self.num_lost = 0  # since the last line that was written
        buffer: Any = stream.buffer
        self._raw = getattr(buffer, "raw", buffer)
        self._told = told
        self._is_torn = False  # a full disk takes a part of a line, too

    def write(self, line: bytes) -> int:
        """A whole line, its newline included; one thread at a time (structlog has a lock)."""
        try:
            if self.num_lost:
                self._put(self._told(self.num_lost))
                self.num_lost = 0
            self._put(line)
        except (OSError, ValueError):  # ValueError: it is closed
            self.num_lost += 1
        return len(line)

    def flush(self) -> None:
        """Nothing waits here."""

    def _put(self, line: bytes) -> None:
        left = memoryview(b"\n" + line if self._is_torn else line)
        while left:
            written = self._raw.write(left)
            if not written:
                raise BlockingIOError("the stream takes nothing now")
            left = left[written:]
            self._is_torn = len(left) > 0
