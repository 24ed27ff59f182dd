"""uvicorn's httptools protocol with the limits it lacks, and without ASGI between a request and its answer.

Limits: bytes of a request's head, time to receive a head, idle time inside a body, and unsent bytes of a
reader that does not read. `Push` lets a callback of the event loop (a token that came from ZeroMQ) write
straight to the connection: one wake-up per token instead of three. It relies on the attributes of uvicorn's
RequestResponseCycle that `Push` names; tests/integration/test_gateway_protocol.py fails if an upgrade
changes them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.http_errors import error_body

Direct = Callable[[dict[str, Any], bytes], Coroutine[Any, Any, None]]  # scope, body

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

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call it once if the client goes before the response is complete. Only of requests that came directly."""
        event = self._cycle.message_event
        assert isinstance(event, _Watch)
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


class _Watch:
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
        _DefaultHeaders.lines = b"".join([b"%b: %b\r\n" % pair for pair in cycle.default_headers])
    return _DefaultHeaders.lines


class GatewayProtocol(HttpToolsProtocol):
    """One connection.

    A request for one of the application's `direct` paths (by their bytes; each takes scope and body) that comes in one
    piece, as nearly all do, is started without ASGI; every other one, and one that waits behind another on this
    connection, goes uvicorn's way. The keep-alive timer is not set anew for each request: it looks, when it is
    due, how long the connection has been idle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct_paths: dict[bytes, Direct] = getattr(self.app, "direct", {})
        self._direct: Direct | None = None  # of the request that is being read
        self._direct_body = b""
        self._task: asyncio.Task[None] | None = (
            None  # of the last direct request: loops only know tasks weakly
        )
        self._idle_since_s = 0.0  # 0: a request is being served
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
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then see what the request still lacks."""
        self._piece_bytes = len(data)
        super().data_received(data)
        if self._direct is not None:  # more is to come
            self._leave_to_asgi()
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
        """Parser callback. The scope is made when the path is known."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Parser callback: hand the request to the application, unless its head is too large."""
        self._in_head = False
        self._in_body = True
        self._body_bytes = 0
        self._disarm()
        direct, parser = self._direct_paths.get(self.url), self.parser
        assert parser is not None, "it called this"
        if (
            direct is not None
            and not self._head_is_too_large()
            and (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and not parser.should_upgrade()
        ):
            self._direct, self._direct_body = direct, b""
        else:
            self._start_asgi()

    def _head_is_too_large(self) -> bool:
        """Counted only where the pieces, which may hold a body, too, leave a doubt."""
        return self._head_bytes + self._piece_bytes > Limits.header_bytes and (
            len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers) > Limits.header_bytes
        )

    def _start_asgi(self) -> None:
        """uvicorn's on_headers_complete(), behind what its on_message_begin() would have done."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        if self._head_is_too_large():
            self.scope[REFUSED_KEY] = True  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.scope[PUSH_KEY] = self.cycle  # type: ignore[typeddict-unknown-key]  # the handler makes a Push of it

    def _leave_to_asgi(self) -> None:
        """The rest of a request comes later."""
        body, self._direct, self._direct_body = self._direct_body, None, b""
        if self.transport.is_closing():
            return
        self._start_asgi()
        if body:
            super().on_body(body)

    def _start_direct(self, direct: Direct) -> None:
        watch, parser = _Watch(), self.parser
        assert parser is not None, "it called this"
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": self.url.decode(),
            "headers": self.headers,
        }
        self.cycle = watch.cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=watch,  # type: ignore[arg-type]
            expect_100_continue=False,
            keep_alive=parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.more_body = False
        scope[PUSH_KEY] = self.cycle
        body, self._direct_body = self._direct_body, b""
        self._task = self.loop.create_task(direct(scope, body))

    def on_body(self, body: bytes) -> None:
        """Parser callback. A refused body is drained, so that its sender reads the refusal, within limits."""
        self._body_bytes += len(body)
        if self._body_bytes > 4 * Limits.body_bytes:
            self.transport.close()
        elif self._direct is not None:
            self._direct_body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback."""
        self._in_body = False
        self._disarm()
        if self._direct is None:
            super().on_message_complete()
            return
        direct, self._direct = self._direct, None
        if not self.transport.is_closing():
            self._start_direct(direct)

    def on_response_complete(self) -> None:
        """uvicorn's callback at the end of a response."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch_idle(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        """uvicorn's, before every piece of data and at the end: the timer stays, it will find the connection busy."""
        self._idle_since_s = 0.0

    def _watch_idle(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """The timer is due: close the connection if it has been idle for so long."""
        self.timeout_keep_alive_task = None
        if not self._idle_since_s or self.transport.is_closing():
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._watch_idle(left_s)
        else:
            self.transport.close()

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
