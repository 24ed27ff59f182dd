"""Responses written from plain callbacks of the event loop, and the limits of what a client may send or leave unread.

`Push` lets a callback (a token that came from ZeroMQ) write straight to the connection: one wake-up per token
instead of three. It relies on the attributes of uvicorn's RequestResponseCycle that it names;
tests/integration/test_gateway_protocol.py fails if an upgrade changes them.
"""

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.gateway.http_errors import header_lines

PUSH_KEY = "quire.push"
_LAST_CHUNK = b"0\r\n\r\n"
REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 408: b"Request Timeout", 413: b"Content Too Large",
    429: b"Too Many Requests", 431: b"Request Header Fields Too Large", 500: b"Internal Server Error",
    502: b"Bad Gateway", 503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip


class Limits:
    """Set once per process before the server starts: uvicorn gives protocols no arguments of ours."""

    header_bytes = 16 << 10
    header_timeout_s = 10.0
    body_idle_timeout_s = 10.0
    unsent_bytes = 256 << 10
    body_bytes = 16 << 20  # the handler refuses more; what still comes then is dropped, up to four times this
    connections = 16_384  # see connections.py


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Push:
    """Writes one response from plain callbacks. Every method is a no-op once the client is gone."""

    __slots__ = ("_cycle", "_frame", "_head", "_largest", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._frame: Callable[[bytes], bytes] = _chunk
        self._head = b""  # of a stream whose first chunk has not come
        self._largest = 0  # chunk so far, in bytes

    @property
    def gone(self) -> bool:
        """The client closed the connection, or the response is complete."""
        return self._cycle.disconnected or self._cycle.response_complete

    @property
    def started(self) -> bool:
        """The head of the response has been written."""
        return self._cycle.response_started

    def start_stream(self, headers: bytes) -> None:
        """Head of a 200 response in chunks; it leaves with the first one. `headers`: whole lines, CRLF included.

        HTTP/1.0 knows no chunks: there the end of the connection is that of the response.
        """
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.response_started = True
        cycle.chunked_encoding = cycle.scope.get("http_version", "1.1") >= "1.1"
        cycle.waiting_for_100_continue = False
        self._frame = _chunk if cycle.chunked_encoding else bytes
        coding = b"transfer-encoding: chunked\r\n" if cycle.chunked_encoding else b""
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        self._head = b"HTTP/1.1 200 OK\r\n%b%b%b%b\r\n" % (_default_headers(cycle), headers, coding, close)

    def write(self, data: bytes) -> bool:
        """One chunk. Returns False when the reader is too slow: the caller then gives the stream up.

        The largest chunk is no sign of that: an echoed prompt alone can exceed what may be unsent.
        """
        cycle = self._cycle
        if cycle.disconnected:
            return True
        self._largest = max(self._largest, len(data))
        if self._head:
            self._transport.write(self._head + self._frame(data))
            self._head = b""
            return True
        self._transport.write(self._frame(data))
        unsent = self._transport.get_write_buffer_size() if cycle.flow.write_paused else 0
        return unsent - self._largest <= Limits.unsent_bytes

    def end_stream(self, last: bytes) -> None:
        """Last chunk, not empty, and end of the response."""
        if not self._cycle.disconnected:
            end = _LAST_CHUNK if self._cycle.chunked_encoding else b""
            self._transport.write(self._head + self._frame(last) + end)
            self._head = b""
            self._complete()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole response of known length."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        self._transport.write(
            b"HTTP/1.1 %d %b\r\n%b%bcontent-length: %d\r\n%b\r\n%b"
            % (status, REASONS[status], _default_headers(cycle), headers, len(body), close, body)
        )
        self._complete()

    def cut(self) -> None:
        """Drop the connection with what is unsent."""
        self._transport.abort()

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call it once if the client goes before the response is complete. Only of requests that came directly."""
        event = self._cycle.message_event
        assert isinstance(event, Watch)
        event.callback = callback
        if self._cycle.disconnected:
            event.set()

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()  # wakes the handler, which waits in receive()
        if not cycle.keep_alive:
            self._transport.close()
        done, cycle.on_response = cycle.on_response, _nothing
        done()


def _nothing() -> None:
    """In the place of a callback that has run."""


class Watch:
    """In the place of a cycle's event, where nobody waits in receive(): a callback for a client that goes."""

    __slots__ = ("callback", "cycle")

    def __init__(self) -> None:
        self.callback: Callable[[], None] | None = None
        self.cycle: RequestResponseCycle | None = None

    def set(self) -> None:
        """The client is gone, or the response is complete: then there is nothing to watch any more."""
        callback, self.callback = self.callback, None
        cycle = self.cycle
        if cycle is None:
            return
        if cycle.response_complete:
            self.cycle = None  # they name each other
        elif cycle.disconnected and callback is not None:
            self.cycle = None
            callback()


class _DefaultHeaders:
    """uvicorn makes a new list of them every second."""

    pairs: list[tuple[bytes, bytes]] | None = None
    lines = b""


def _default_headers(cycle: RequestResponseCycle) -> bytes:
    if cycle.default_headers is not _DefaultHeaders.pairs:
        _DefaultHeaders.pairs = cycle.default_headers
        _DefaultHeaders.lines = header_lines(cycle.default_headers)
    return _DefaultHeaders.lines
