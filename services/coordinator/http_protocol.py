"""uvicorn's HTTP protocol with a time for requests: by itself it waits for the rest of one for ever."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection whose request, head and body, is not whole REQUEST_S after its first byte; the first one's
    time begins with the connection. Between requests uvicorn's timeout_keep_alive counts."""

    REQUEST_S = 10.0  # members and mempools send theirs in one piece, and call again

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Nothing has come yet."""
        super().connection_made(transport)
        self._wait(self._half_is_over)

    def connection_lost(self, exc: Exception | None) -> None:
        """By either side."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of a request, or the rest of it."""
        super().data_received(data)
        cycle = self.cycle  # of the newest request whose head is whole
        is_whole = cycle is not None and not cycle.more_body and not cycle.response_complete
        if is_whole or self.transport.is_closing():
            self._forget()
        elif self._due is None:
            self._wait(self._half_is_over)

    def _wait(self, then: Callable[[], None]) -> None:
        self._due = self.loop.call_later(self.REQUEST_S / 2, then)

    def _half_is_over(self) -> None:
        """Where this process stood still, what came meanwhile is read before the other half is over."""
        self._wait(self._too_late)

    def _too_late(self) -> None:
        self._due = None
        self.transport.close()

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
