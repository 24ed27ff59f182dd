"""One pipelined Redis connection on the running asyncio loop, for callers with a deadline of milliseconds.

Replies come in the order of the commands, so a call that gave up leaves its place in the queue and its late
reply is dropped; the connection stays whole. It reconnects by itself. A look-up through it costs a third of
what redis.asyncio takes, and a server that is down costs a comparison. RESP2, encoded and parsed by hiredis.
"""

import asyncio
import hashlib
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import hiredis

from shared.background_task import begin_task
from shared.errors import Overloaded, PeerError, PeerGone, PeerProtocolError, PeerTimeout, SettingsError

CONNECT_TIMEOUT_S = 1.0
RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 2.0
MAX_IN_FLIGHT = 1024
STALL_S = 5.0  # no reply for so long while one is due: the connection is given up
DEFAULT_PORT = 6379

Word = bytes | str | int | float


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where and as whom: redis://[user:password@]host[:port][/db], rediss:// with TLS, unix:///path[?db=n]."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str = ""  # of a unix socket; then host and port do not matter
    db: int = 0
    user: str = ""
    password: str = ""
    tls: bool = False


def parse_redis_url(url: str) -> RedisAddress:
    """Raises: SettingsError with an example that works."""
    wrong = SettingsError("redis_url is no redis:// address; try redis://127.0.0.1:8104/0")
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
        db = parts.query.removeprefix("db=") if parts.scheme == "unix" else parts.path.strip("/")
        number = int(db or 0)
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.path or parts.hostname) or number < 0:
        raise wrong
    if parts.scheme != "unix" and not parts.hostname:
        raise wrong
    return RedisAddress(
        host=parts.hostname or "",
        port=port,
        path=parts.path if parts.scheme == "unix" else "",
        db=number,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme == "rediss",
    )


class Script:
    """A Lua script, called by its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisRefused(PeerProtocolError):
    """The server answered with an error."""


class _Asked(NamedTuple):
    """A command whose reply has not come. Times are the loop's."""

    future: asyncio.Future[Any]
    sent_s: float
    due_s: float


class _Connection(asyncio.Protocol):
    """Bytes to replies. One per TCP connection; a new connection gets a new one."""

    def __init__(self, on_lost: Callable[["_Connection"], None]) -> None:
        self.waiting: deque[_Asked] = deque()
        self._timer: asyncio.TimerHandle | None = (
            None  # one for all: most replies come long before their deadline
        )
        self._timer_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader()
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while True:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError:
                self.abort()
                return
            if reply is False or not self.waiting:
                return
            future = self.waiting.popleft().future
            if not future.done():
                if isinstance(reply, hiredis.ReplyError):
                    future.set_exception(RedisRefused(str(reply)))
                else:
                    future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.waiting:
            future = self.waiting.popleft().future
            if not future.done():
                future.set_exception(PeerGone("Redis closed the connection"))
        self._on_lost(self)

    def ask(self, words: tuple[Word, ...], timeout_s: float) -> asyncio.Future[Any]:
        """A command's reply. Its exceptions: those of RedisLink.call()."""
        assert self._transport is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        now_s = self._loop.time()
        asked = _Asked(future, now_s, now_s + timeout_s)
        self.waiting.append(asked)
        self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]  its stub says 1-tuple
        if self._timer is None:
            self._arm(asked.due_s)
        elif asked.due_s < self._timer_s:
            self._timer.cancel()
            self._arm(asked.due_s)
        return future

    def _arm(self, due_s: float) -> None:
        self._timer_s = due_s
        self._timer = self._loop.call_at(due_s, self._expire)

    def _expire(self) -> None:
        """Give up what is overdue; its place in the queue stays, for its late reply."""
        self._timer = None
        now_s = self._loop.time()
        next_s = 0.0
        for future, sent_s, due_s in self.waiting:
            if future.done():
                continue
            if due_s <= now_s:
                text = f"no answer from Redis within {(due_s - sent_s) * 1000:.0f} ms"
                future.set_exception(PeerTimeout(text))
            elif not next_s or due_s < next_s:
                next_s = due_s
        if self.waiting and now_s - self.waiting[0].sent_s > STALL_S:
            with suppress(RuntimeError):  # the loop is closing
                self.abort()
        elif next_s:
            self._arm(next_s)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RedisLink:
    """open() once, then call(); every call has its own deadline. on_up() runs after each new connection."""

    def __init__(self, url: str, *, on_up: Callable[[], None] | None = None) -> None:
        self.address = parse_redis_url(url)
        self.last_error = ""
        self._on_up = on_up
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._was_up = asyncio.Event()

    @property
    def up(self) -> bool:
        """Connected and logged in."""
        return self._connection is not None

    def open(self) -> None:
        """Start connecting, and go on for as long as the link is open. Never waits."""
        if self._task is None:
            self._task = begin_task(self._keep(), "redis-link")

    async def wait_up(self, timeout_ms: int) -> bool:
        """Whether it is connected within the time."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._was_up.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Drop the connection; calls that wait end with PeerGone. Harmless when closed already."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def call(self, *words: Word, timeout_ms: float) -> Any:
        """One command's reply; bytes are not decoded.

        Raises: PeerGone when down; PeerTimeout; Overloaded at MAX_IN_FLIGHT; RedisRefused on an error reply.
        After PeerTimeout or PeerGone the command may or may not have run.
        """
        return await self._ask(words, timeout_ms)

    def _ask(self, words: tuple[Word, ...], timeout_ms: float) -> asyncio.Future[Any]:
        connection = self._connection
        if connection is None:
            raise PeerGone("Redis is not connected")
        if len(connection.waiting) >= MAX_IN_FLIGHT:
            raise Overloaded("too many commands wait for Redis", retry_after_ms=100)
        return connection.ask(words, timeout_ms / 1000)

    async def run(self, script: Script, *args: Word, timeout_ms: float) -> Any:
        """A script without declared keys, by digest; loaded on the first use after a server's start.

        Both calls that this may take share one deadline. Raises: as call().
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await self._ask(("EVALSHA", script.sha, 0, *args), timeout_ms)
        except RedisRefused as error:
            if not error.message.startswith("NOSCRIPT"):
                raise
        left_ms = timeout_ms - 1000 * (loop.time() - began_s)
        return await self._ask(("EVAL", script.source, 0, *args), max(0.0, left_ms))

    async def _keep(self) -> None:
        wait_s = RECONNECT_MIN_S
        while True:
            self._lost.clear()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    connection = await self._connect()
            except (OSError, TimeoutError, ValueError, PeerError) as error:
                # ValueError: a name that no host can have
                self.last_error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(wait_s)
                wait_s = min(RECONNECT_MAX_S, 2 * wait_s)
                continue
            wait_s = RECONNECT_MIN_S
            self.last_error = ""
            self._connection = connection
            self._was_up.set()
            if self._on_up is not None:
                self._on_up()
            await self._lost.wait()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        where = self.address

        def make() -> _Connection:
            return _Connection(self._forget)

        if where.path:
            transport, connection = await loop.create_unix_connection(make, where.path)
        else:
            context = ssl.create_default_context() if where.tls else None
            transport, connection = await loop.create_connection(make, where.host, where.port, ssl=context)
        try:
            if where.password:
                login = (where.user, where.password) if where.user else (where.password,)
                await connection.ask(("AUTH", *login), CONNECT_TIMEOUT_S)
            # A server that still loads its file accepts connections and refuses this one command.
            await connection.ask(("SELECT", where.db), CONNECT_TIMEOUT_S)
            await connection.ask(("EXISTS", "quire"), CONNECT_TIMEOUT_S)
        except BaseException:
            transport.abort()
            raise
        return connection

    def _forget(self, connection: _Connection) -> None:
        if connection is self._connection or self._connection is None:
            self._connection = None
            self._was_up.clear()
            self._lost.set()
