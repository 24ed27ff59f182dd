"""uvicorn's httptools protocol with the limits it lacks, and a way to write a response without a task switch.

Limits: bytes of a request's head, time to receive a head, idle time inside a body, and unsent bytes of a
reader that does not read. `Push` lets a callback of the event loop (a token that came from ZeroMQ) write
straight to the connection: one wake-up per token instead of three. It relies on the attributes of uvicorn's
RequestResponseCycle that `Push` names; tests/integration/test_gateway_protocol.py fails if an upgrade
changes them.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.http_errors import error_body

PUSH_KEY = "quire.push"
REFUSED_KEY = "quire.refused"
_CRLF = b"\r\n"
_REASONS = {
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


class Push:
    """Writes one response from plain callbacks. Every method is a no-op once the client is gone."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = b""  # of a stream whose first chunk has not come

    @property
    def gone(self) -> bool:
        """The client closed the connection, or the response is complete."""
        return self._cycle.disconnected or self._cycle.response_complete

    @property
    def started(self) -> bool:
        """The head of the response has been written."""
        return self._cycle.response_started

    def start_stream(self, headers: bytes) -> None:
        """Head of a chunked 200 response; it leaves with the first chunk. `headers`: whole lines, CRLF included."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.response_started = True
        cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        self._head = b"HTTP/1.1 200 OK\r\n%b%btransfer-encoding: chunked\r\n%b\r\n" % (
            _default_headers(cycle), headers, close,
        )  # fmt: skip

    def write(self, data: bytes) -> bool:
        """One chunk. Returns False when the reader is too slow: the caller then gives the stream up."""
        cycle = self._cycle
        if cycle.disconnected:
            return True
        if self._head:
            self._transport.write(b"%b%x\r\n%b\r\n" % (self._head, len(data), data))
            self._head = b""
            return True
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not cycle.flow.write_paused or self._transport.get_write_buffer_size() <= Limits.unsent_bytes

    def end_stream(self, last: bytes) -> None:
        """Last chunk, not empty, and end of the response."""
        if not self._cycle.disconnected:
            self._transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._head, len(last), last))
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
            % (status, _REASONS[status], _default_headers(cycle), headers, len(body), close, body)
        )
        self._complete()

    def cut(self) -> None:
        """Drop the connection with what is unsent."""
        self._transport.abort()

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()  # wakes the handler, which waits in receive()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()


class _DefaultHeaders:
    """uvicorn makes a new list of them every second."""

    pairs: list[tuple[bytes, bytes]] | None = None
    lines = b""


def _default_headers(cycle: RequestResponseCycle) -> bytes:
    if cycle.default_headers is not _DefaultHeaders.pairs:
        _DefaultHeaders.pairs = cycle.default_headers
        _DefaultHeaders.lines = b"".join([b"%b: %b\r\n" % pair for pair in cycle.default_headers])
    return _DefaultHeaders.lines


class GatewayProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False  # a request's first byte has come, its headers are not complete
        self._in_body = False
        self._head_bytes = 0  # in earlier pieces
        self._piece_bytes = 0
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects and says nothing is cut off like one that is slow."""
        super().connection_made(transport)
        self._arm(Limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer closed, or we did."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then see what the request still lacks."""
        self._piece_bytes = len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._disarm()
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > Limits.header_bytes:
                self._refuse(431, "header_too_large", f"The headers exceed {Limits.header_bytes} bytes.")
            elif self._timer is None:
                self._arm(Limits.header_timeout_s)
        elif self._in_body:
            self._arm(Limits.body_idle_timeout_s)

    def on_message_begin(self) -> None:
        """Parser callback."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Parser callback: hand the request to the application, unless its head is too large."""
        self._in_head = False
        self._in_body = True
        self._body_bytes = 0
        self._disarm()
        if self._head_bytes + self._piece_bytes > Limits.header_bytes and (
            len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers) > Limits.header_bytes
        ):
            self.scope[REFUSED_KEY] = True  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.scope[PUSH_KEY] = self.cycle  # type: ignore[typeddict-unknown-key]  # the handler makes a Push of it

    def on_body(self, body: bytes) -> None:
        """Parser callback. A refused body is drained, so that its sender reads the refusal, within limits."""
        self._body_bytes += len(body)
        if self._body_bytes > 4 * Limits.body_bytes:
            self.transport.close()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback."""
        self._in_body = False
        self._disarm()
        super().on_message_complete()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._timed_out)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # we are the slow side
            self._arm(Limits.body_idle_timeout_s)
        elif self._in_head or self._in_body:
            self._refuse(408, "request_timeout", "The request was not received in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer and close before the application saw a whole request."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error_body(message, "invalid_request_error", None, code)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
            )
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP."""
        self._refuse(400, "invalid_http", msg)
