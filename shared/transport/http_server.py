"""uvicorn as our services run it: who owns the process decides when it ends, and who does not read is given up."""

import contextlib
import time
from collections.abc import Generator
from typing import Generic, cast

import uvicorn

from shared.transport.unread import Conn, Unread

UNREAD_TICKS = 10  # a second of uvicorn's ticks


class HttpServer(uvicorn.Server, Generic[Conn]):
    """uvicorn without its signal handlers: it would end with the signal's status instead of 0.

    Args: unread_timeout_s: for so long a connection may take nothing of what is unsent; closing it would wait for that.
    """

    def __init__(self, config: uvicorn.Config, unread_timeout_s: float) -> None:
        super().__init__(config)
        self._unread = Unread(unread_timeout_s)

    @property
    def connections(self) -> set[Conn]:
        """Those that are open, or not sent yet: of the class that uvicorn was configured with."""
        return cast(set[Conn], self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second."""
        if counter % UNREAD_TICKS == 0:
            for each in self._unread.look(self.connections, time.monotonic()):
                self.give_up(each)
        return await super().on_tick(counter)

    def give_up(self, connection: Conn) -> None:
        """It took nothing for too long."""
        connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the handlers alone."""
        yield
