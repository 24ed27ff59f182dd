"""What lies unsent in the buffers of connections: whoever does not read it is given up, whoever does has its time.

Also what is begun may be unread for good: the next answer on a connection waits until the one before has been read. A
stream grows while its reader takes nothing, and is cut off by its bytes (services/gateway/push.py).
"""

import asyncio
import sys
from collections.abc import Iterable
from contextlib import suppress
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Protocol, TypeVar


class Connection(Protocol):
    """Of a client."""

    transport: asyncio.Transport


Conn = TypeVar("Conn", bound=Connection)


def num_unsent(connections: Iterable[Connection]) -> int:
    """Connections of which something is unsent."""
    return sum(1 for each in connections if each.transport.get_write_buffer_size())


def in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that it holds beside the buffer's until the client has them: it takes more from there in leaps of a MB."""
    out = bytearray(4)
    with suppress(OSError, ValueError):  # closed meanwhile
        ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, out)
    return int.from_bytes(out, sys.byteorder)


class Unread:
    """Connections that took nothing for a while, nor were written to. look() every second or so; a microsecond each."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[Connection, tuple[int, float]] = {}  # bytes unsent, since when so many

    def look(self, connections: Iterable[Conn], now_s: float) -> list[Conn]:
        """Those whose time is over."""
        before, self._waiting = self._waiting, {}
        over: list[Conn] = []
        for each in connections:
            num_bytes = each.transport.get_write_buffer_size()
            if not num_bytes:
                continue
            num_bytes += in_kernel(each.transport)
            was_bytes, since_s = before.get(each, (0, now_s))
            if num_bytes != was_bytes:
                since_s = now_s
            self._waiting[each] = num_bytes, since_s
            if now_s - since_s >= self._timeout_s:
                over.append(each)
        return over
