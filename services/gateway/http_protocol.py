"""uvicorn's httptools protocol with the limits it lacks, and without ASGI between a request and its answer.

Limits: bytes of a request's head and of what is no body in its body, time to receive a head, idle time and slowness
inside a body, time to read a body whose request is answered already, and unsent bytes of a reader that does not read,
see push.py, whose `Push` writes the answers. Requests that are refused here never reach the application, or not whole:
they are counted here, or their scope says it to who counts them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway import metrics
from services.gateway.http_errors import error_body, header_lines
from services.gateway.origins import Headers, Origins
from services.gateway.push import PUSH_KEY, REASONS, Limits, Watch

Direct = Callable[[dict[str, Any], bytes], Coroutine[Any, Any, None]]  # scope, body

REFUSED_KEY = "quire.refused"
REFUSED_STATUS_KEY = (
    "quire.refused_status"  # of a request that runs already: the answer that it got from here
)
NO_ROUTE = "other"
MIN_BODY_BYTES_PER_S = 500  # of a body that takes longer than its idle timeout; Apache's, too
MAX_QUEUED = 16  # requests of a connection behind the one that runs, and
MAX_QUEUED_BYTES = 1 << 20  # of their bodies; beyond either nothing more is read until the next one runs


class GatewayProtocol(HttpToolsProtocol):
    """One connection.

    A request for one of the application's `direct` paths (by their bytes; each takes scope and body) that comes in one
    piece, as nearly all do, is started without ASGI; every other one, and one that waits behind another on this
    connection, goes uvicorn's way. The keep-alive timer is not set anew for each request: it looks, when it is
    due, how long the connection has been idle. No other protocol is spoken here: a request that offers one (`Upgrade:
    h2c`, `websocket`) is answered as if it did not (RFC 9110, 7.8).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct_paths: dict[bytes, Direct] = getattr(self.app, "direct", {})
        self._origins: Origins = getattr(self.app, "origins", None) or Origins()
        self._direct: Direct | None = None  # of the request that is being read
        self._direct_body = b""
        self._task: asyncio.Task[None] | None = (
            None  # of the last direct request: loops only know tasks weakly
        )
        self._running: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait behind it
        self._idle_since_s = 0.0  # 0: a request is being served
        self._in_head = False  # a request's first byte has come, its headers are not complete
        self._in_body = False
        self._head_bytes = 0  # in earlier pieces
        self._piece_bytes = 0
        self._body_bytes = 0
        self._body_began_s = 0.0
        self._extra_bytes = 0  # in a body, since the last of its own: of pieces that hold none
        self._trailer_bytes = 0
        self._plain_head = b""  # of a request that offers another protocol, without the offer
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects and says nothing is cut off like one that is slow."""
        super().connection_made(transport)
        self._arm(Limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer closed, or we did."""
        self._disarm()
        super().connection_lost(exc)
        running, self._running = self._running, None
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True  # uvicorn tells the newest request only
            running.message_event.set()
        self.pipeline.clear()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    @property
    def is_answering(self) -> bool:
        """A request runs."""
        return self._running is not None and not self._running.response_complete

    def resume_writing(self) -> None:
        """The client has read: an idle connection is read from again, see on_response_complete()."""
        super().resume_writing()
        if not self.is_answering and not self.transport.is_closing():
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then see what the request still lacks."""
        self._piece_bytes, body_bytes, idle_since_s = len(data), self._body_bytes, self._idle_since_s
        self._feed(data)
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
            self._extra_bytes = self._extra_bytes + len(data) if self._body_bytes == body_bytes else 0
            if self._extra_bytes > Limits.header_bytes:
                self._refuse_trailers()
            elif not self._is_answered:  # else on_response_complete() has said how long it may last
                idle_s = Limits.body_idle_timeout_s
                due_s = self._body_began_s + idle_s + self._body_bytes / MIN_BODY_BYTES_PER_S
                self._arm(min(idle_s, due_s - self.loop.time()))
        elif not self._idle_since_s and not self.is_answering:
            self._idle_since_s = idle_since_s  # line ends before a request are none of it (RFC 9112, 2.2)

    def _feed(self, data: bytes) -> None:
        """uvicorn's data_received(), which would take what follows an offered protocol for the next request."""
        self._unset_keepalive_if_required()
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stop:
                    data = data[stop.args[0] :]
                if not self._plain_head:
                    self._refuse(405, "method_not_allowed", "This server is no proxy.")
                    return
                self.parser = httptools.HttpRequestParser(self)  # the old one awaits no body any more
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                head, self._plain_head = self._plain_head, b""
                self.parser.feed_data(head)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _without_offer(self) -> bytes:
        """The head that is complete, but for the protocol that it offers. Empty for CONNECT, which is no offer."""
        parser = self.parser
        if parser.get_method() == b"CONNECT":
            return b""
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    @property
    def _is_answered(self) -> bool:
        """Of the request whose body is being read; one that is `direct` has not begun yet."""
        return self._direct is None and self.cycle is not None and self.cycle.response_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback. Trailers are dropped: what the application has read of a request does not change."""
        if self._in_body:
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > Limits.header_bytes:
                self._refuse_trailers()
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_message_begin(self) -> None:
        """Parser callback. The scope is made when the path is known."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._idle_since_s = 0.0

    def on_headers_complete(self) -> None:
        """Parser callback: hand the request to the application, unless its head is too large."""
        direct, parser = self._direct_paths.get(self.url), self.parser
        assert parser is not None, "it called this"
        if self.transport.is_closing():  # what was before it in this piece was refused
            return
        if parser.should_upgrade():
            self._plain_head = self._without_offer()  # see _feed()
            return
        self._body_bytes, self._body_began_s = 0, self.loop.time()
        self._extra_bytes, self._trailer_bytes = -self._piece_bytes, 0  # this piece is none of them
        self._disarm()
        if (
            direct is not None
            and not self._head_is_too_large()
            and (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
        ):
            self._direct, self._direct_body = direct, b""
        else:
            self._start_asgi()
        self._in_head, self._in_body, self._head_bytes = False, True, 0

    def _default_headers(self) -> Headers:
        """uvicorn's own list, or a new one for a page that must hear whether it may read the answer."""
        usual, told = self.server_state.default_headers, self._origins.headers(self.headers)
        return [*usual, *told] if told else usual

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
        self.cycle.default_headers = self._default_headers()
        self._read_on()
        self.scope[PUSH_KEY] = self.cycle  # type: ignore[typeddict-unknown-key]  # the handler makes a Push of it

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """uvicorn's, for a request that need not wait or need no longer."""
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _read_on(self) -> None:
        """uvicorn stops reading behind a request that waits; it would not be seen then that the client leaves."""
        if (
            0 < len(self.pipeline) <= MAX_QUEUED
            and sum(len(cycle.body) for cycle, _ in self.pipeline) <= MAX_QUEUED_BYTES
            and not self.transport.is_closing()
        ):
            self.flow.resume_reading()

    def _leave_to_asgi(self) -> None:
        """The rest of a request comes later."""
        body, self._direct, self._direct_body = self._direct_body, None, b""
        if self.transport.is_closing():
            return
        self._start_asgi()
        if body:
            super().on_body(body)

    def _start_direct(self, direct: Direct) -> None:
        watch, parser = Watch(), self.parser
        assert parser is not None, "it called this"
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": self.url.decode(),
            "headers": self.headers,
        }
        self.cycle = self._running = watch.cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self._default_headers(),
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
        if self.transport.is_closing():
            return
        self._body_bytes += len(body)
        if self._body_bytes > 4 * Limits.body_bytes:
            self.transport.close()
        elif self._direct is not None:
            self._direct_body += body
        else:
            super().on_body(body)
            self._read_on()

    def on_message_complete(self) -> None:
        """Parser callback."""
        if self._in_head:  # nothing has begun, see on_headers_complete()
            return
        self._in_body = False
        self._disarm()
        if self._direct is None:
            if self.cycle.response_complete:
                self._become_idle()  # what came of the body behind the answer has ended that state
            super().on_message_complete()
            return
        direct, self._direct = self._direct, None
        if not self.transport.is_closing():
            self._start_direct(direct)

    def on_response_complete(self) -> None:
        """uvicorn's callback at the end of a response. Whoever does not read answers asks for no more of them."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.flow.write_paused:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()
        if self._in_body and self._is_answered:  # a refusal; the rest is read for so long that it is, too
            self._arm(Limits.body_idle_timeout_s)
        self._become_idle()

    def _become_idle(self) -> None:
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
        if self._in_body and self._is_answered:
            self.transport.close()
        elif self.flow.read_paused or self.pipeline:  # we are the slow side
            self._body_began_s = self.loop.time()
            self._arm(Limits.body_idle_timeout_s)
        elif self._in_head or self._in_body:
            self._refuse(408, "request_timeout", "The request was not received in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer and close before the application saw a whole request. Harmless when closing already."""
        self._disarm()
        if self.transport.is_closing():
            return
        running = self._running  # its answer has no place for another
        is_free = running is None or running.response_complete or not running.response_started
        if is_free and not (self._in_body and self._is_answered):
            self._count(status, code)
            body = error_body(message, "invalid_request_error", None, code)
            told = header_lines(self._origins.headers(self.headers) if self._in_head or self._in_body else [])
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n%b"
                b"content-length: %d\r\n\r\n%b" % (status, REASONS[status], told, len(body), body)
            )
        self.transport.close()

    def _count(self, status: int, code: str) -> None:
        """A refusal. Whoever has the request already counts it, and is told that its client did not leave."""
        metrics.ERRORS.labels(code).inc()
        if self._in_body and self._direct is None and self.cycle is self._running:
            self.cycle.scope[REFUSED_STATUS_KEY] = status  # type: ignore[typeddict-unknown-key]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            is_known = self._in_body and self.url in self._direct_paths
            metrics.REQUESTS.labels(self.url.decode() if is_known else NO_ROUTE, str(status)).inc()

    def _refuse_trailers(self) -> None:
        self._refuse(431, "header_too_large", f"The trailers exceed {Limits.header_bytes} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP."""
        self._refuse(400, "invalid_http", msg)
