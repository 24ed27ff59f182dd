"""The small HTTP listener of services that are not HTTP servers: /health, /ready, /metrics, /status.

Written on asyncio streams because it answers four fixed GETs: a framework would cost its imports in every
worker. One request per connection, bounded in size, time and number. Where there are too many, the newest is heard and
the one that has been silent longest is closed: a supervisor that is not answered kills the service.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from shared.errors import SettingsError
from shared.observe import metrics

MAX_HEAD_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64  # beyond, one is closed for each that comes
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}

Answer = tuple[int, str, bytes]


def parse_listen(listen: str) -> tuple[str, int]:
    """("127.0.0.1", 8106) of "127.0.0.1:8106". Raises: SettingsError."""
    host, sep, port = listen.rpartition(":")
    if not sep or not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"listen address {listen!r}: want host:port, e.g. 127.0.0.1:8106")
    return host.strip("[]"), int(port)


class AdminServer:
    """`ready()` -> (is ready, details); `status()` -> any JSON. Both run on the loop and must not wait."""

    def __init__(
        self,
        listen: str,
        *,
        ready: Callable[[], tuple[bool, dict[str, Any]]],
        status: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.address = listen  # after start(): the real one, also when port 0 was asked for
        self._ready = ready
        self._status = status
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, bool] = {}  # oldest first: whether its request has come

    async def start(self) -> None:
        """Raises: SettingsError when the address is wrong or taken."""
        host, port = parse_listen(self.address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise SettingsError(f"cannot listen on {self.address}: {error.strerror}") from error
        name = self._server.sockets[0].getsockname()
        self.address = f"{host}:{name[1]}"

    async def stop(self) -> None:
        """Harmless when stopped already."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            self._close_oldest()
        self._open[writer] = False
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                if writer in self._open:
                    self._open[writer] = True
                writer.write(_encode(*self._answer(head)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return  # nothing can be said to a client that does not speak HTTP, does not read or left
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()  # harmless behind a close that is complete

    def _close_oldest(self) -> None:
        """Who has not asked first; then who has not read its answer."""
        silent = (each for each, has_asked in self._open.items() if not has_asked)
        oldest = next(silent, None) or next(iter(self._open))
        del self._open[oldest]
        oldest.transport.abort()

    def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1"):
            return 400, "text/plain", b"bad request\n"
        if words[0] not in (b"GET", b"HEAD"):
            return 405, "text/plain", b"only GET\n"
        path = words[1].split(b"?")[0]
        if path == b"/health":
            return 200, "application/json", b'{"status":"ok"}'
        if path == b"/ready":
            is_ready, details = self._ready()
            return 200 if is_ready else 503, "application/json", _json({"ready": is_ready, **details})
        if path == b"/metrics":
            return 200, metrics.CONTENT_TYPE, metrics.render()
        if path == b"/status" and self._status is not None:
            return 200, "application/json", _json(self._status())
        return 404, "text/plain", b"not found\n"


def _json(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


def _encode(status: int, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
