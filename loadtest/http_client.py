"""A lean asyncio HTTP/1.1 client for measuring: one parser, one timestamp per arrival, kept connections.

General clients cost more CPU per event than the gateways that they measure here, and share its cores.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

HEAD_BYTES = 512  # of a request, at least as far as its host


@dataclass(slots=True)
class Reply:
    """One response. `pieces`: (arrival in seconds of time.perf_counter(), body bytes), as they came."""

    started: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    num_events: int = 0  # server-sent events so far

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def ok(self) -> bool:
        """A 200 whose stream, if it is one, is whole and free of errors."""
        if self.status != 200:
            return False
        body = self.body
        return not body.startswith(b"data:") or (
            b"data: [DONE]" in body[-64:] and b'data: {"error"' not in body
        )

    def ttft_ms(self) -> float:
        """From the request to the first event that shows text. Raises: ValueError when none does."""
        held = b""
        for at, data in self.pieces:
            held += data
            events = held.split(b"\n\n")
            held = events.pop()
            if any(_shows_text(event) for event in events):
                return (at - self.started) * 1000
        raise ValueError(f"no text in {self.body[:200]!r}")


def _shows_text(event: bytes) -> bool:
    data = event.strip().removeprefix(b"data: ")
    if not data.startswith(b"{"):
        return False
    choices: list[dict[str, Any]] = json.loads(data).get("choices") or []
    return any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)


class _Connection(asyncio.Protocol):
    """One request at a time. httptools calls the on_... methods."""

    def __init__(self) -> None:
        self.reply = Reply(0.0)
        self.open = True
        self._done: asyncio.Future[Reply] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def begin(self, request: bytes, reply: Reply) -> "asyncio.Future[Reply]":
        assert self._transport is not None
        self.reply = reply
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(exc or ConnectionError("closed before the end of the response"))

    def on_body(self, body: bytes) -> None:
        self.reply.pieces.append((self._now, body))
        self.reply.num_events += body.count(b"data: ")

    def on_message_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()
        keep = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        self._end(None)
        if not keep:
            self.close()

    def _end(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            if error is None:
                done.set_result(self.reply)
            else:
                done.set_exception(error)

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.close()


def is_refused(error: BaseException) -> bool:
    """Nobody listens there. Of a name with several addresses asyncio raises one error that lists theirs."""
    return isinstance(error, ConnectionRefusedError) or str(error).startswith("Multiple exceptions")


class Sends(Protocol):
    """What an open loop needs of a client: see Client."""

    def request_bytes(self, path: str, body: Mapping[str, Any]) -> bytes: ...

    async def post(self, request: bytes, *, timeout_s: float = ..., reply: Reply | None = ...) -> Reply: ...


class Client:
    """A pool of connections to one server."""

    def __init__(self, base_url: str, *, bearer: str = "") -> None:
        parts = urlsplit(base_url)
        if not parts.hostname or not parts.port:
            raise ValueError(f"{base_url!r} must name host and port")
        self._host, self._port = parts.hostname, parts.port
        self._authorization = f"authorization: Bearer {bearer}\r\n" if bearer else ""
        self._idle: list[_Connection] = []
        self._complained = False

    def complain(self, text: str) -> None:
        """Say why a request failed: the first one only, the others are counted by who sent them."""
        if not self._complained:
            self._complained = True
            print(f"  a request to port {self._port} failed: {text}", flush=True)

    def request_bytes(self, path: str, body: Mapping[str, Any]) -> bytes:
        """A POST, ready to send as often as wanted."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
            f"{self._authorization}content-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def wrote(self, request: bytes) -> bool:
        """Whether request_bytes() of a client of this server made it."""
        return f"\r\nhost: {self._host}:{self._port}\r\n".encode() in request[:HEAD_BYTES]

    async def post(self, request: bytes, *, timeout_s: float = 60.0, reply: Reply | None = None) -> Reply:
        """Send request_bytes() and wait for the end of the response. Connecting counts: who calls waits for it, too.

        Args: reply: filled while the response comes, for those who count events meanwhile.
        Raises: TimeoutError, OSError, httptools.HttpParserError.
        """
        reply = reply or Reply(0.0)
        reply.started = time.perf_counter()
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection()
                result = await connection.begin(request, reply)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if connection.open:
            self._idle.append(connection)
        return result

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        """Drop all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
