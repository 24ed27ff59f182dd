"""The channel of the nine calls: a unix socket of its own, beside that of engines and clients."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.mempool.core.actions import Action, ApiSend
from services.mempool.core.mempool import Mempool
from services.mempool.processes import ProcessWatch
from shared.errors import Overloaded, PeerGone, PeerProtocolError
from shared.observe.log import get_logger
from shared.transport.clock import Clock
from shared.transport.unix_channel import UnixConnection, UnixServer
from shared.wire import mempool_api as wire

MAX_CONNECTIONS = 1_024

log = get_logger("mempool.api")


class ApiServer:
    """start() once, close() once; on the mempool's loop. Without a path it does nothing.

    Args: perform: carries out what a call has caused.
    """

    def __init__(
        self,
        path: Path | None,
        pool: Mempool,
        processes: ProcessWatch,
        clock: Clock,
        perform: Callable[[list[Action]], None],
        *,
        allowed_uids: frozenset[int] | None = None,
    ) -> None:
        self._pool = pool
        self._processes = processes
        self._clock = clock
        self._perform = perform
        self._connections: dict[int, UnixConnection[wire.FromMempoolApi]] = {}
        self._next_connection = 1 << 32  # apart from those of engines: ProcessWatch may go by them
        self.server: UnixServer[wire.ToMempoolApi, wire.FromMempoolApi] | None = None
        if path is not None:
            self.server = UnixServer(
                path,
                into=wire.TO_MEMPOOL_API,
                out=wire.FROM_MEMPOOL_API,
                on_message=self._on_message,
                on_connect=self._on_connect,
                on_disconnect=self._on_disconnect,
                allowed_uids=allowed_uids,
                max_connections=MAX_CONNECTIONS,
            )

    async def start(self) -> None:
        """Listen. Raises: SettingsError when the socket cannot be had."""
        if self.server is not None:
            await self.server.start()
            log.info("api_listening", socket=str(self.server.path))

    def close(self) -> None:
        """End every connection."""
        if self.server is not None:
            self.server.close()

    def status(self) -> dict[str, Any]:
        """For /status."""
        counters = dict(self._pool.api.api.counters)
        return {"connections": len(self._connections), "counters": counters}

    def send(self, action: ApiSend) -> None:
        """To a caller, if it is still there."""
        connection = self._connections.get(action.connection)
        if connection is None:
            return
        try:
            connection.send(action.message)
        except (PeerGone, Overloaded) as error:
            log.warning("caller_unreachable", connection=action.connection, code=error.code)
            connection.close()

    # -- events -----------------------------------------------------------------------------------

    def _on_connect(self, connection: UnixConnection[wire.FromMempoolApi]) -> None:
        connection.state = self._next_connection
        self._next_connection += 1
        self._connections[connection.state] = connection

    def _on_message(
        self,
        connection: UnixConnection[wire.FromMempoolApi],
        _seq: int,
        message: wire.ToMempoolApi,
        _raw: Sequence[bytes],
    ) -> None:
        number, now_ms = connection.state, self._clock.now_ms()
        if number not in self._connections:
            return
        try:
            if isinstance(message, wire.ApiHello):
                self._hello(connection, message)
            elif isinstance(message, wire.CopiedDirectly):
                self._pool.api.on_copied_directly(number, message)
            else:
                self._pool.api.on_call(number, message, now_ms)
        except PeerProtocolError as error:
            assert self.server is not None
            self.server.num_malformed += 1
            log.warning("peer_protocol_error", connection=number, pid=connection.peer.pid, reason=str(error))
            connection.close()
        self._perform(self._pool.after_api(now_ms))

    def _hello(self, connection: UnixConnection[wire.FromMempoolApi], hello: wire.ApiHello) -> None:
        if self._pool.api.knows(connection.state):
            raise PeerProtocolError("a second hello")
        process = self._processes.number_of(connection)
        if process is None:  # without its pidfd nobody could tell when it writes pages no more
            log.warning("caller_refused", code="peer.credentials", pid=connection.peer.pid)
            connection.close()
            return
        if not connection.peer.pid:  # what it maps by other connections counts as another process's
            self._pool.callers.computes([process])
        self._pool.api.connect(connection.state, hello, process)
        log.info(
            "caller_connects", connection=connection.state, pid=connection.peer.pid,
            peer_instance=hello.instance, receives=hello.receives,
        )  # fmt: skip

    def _on_disconnect(
        self, connection: UnixConnection[wire.FromMempoolApi], error: Exception | None
    ) -> None:
        if self._connections.pop(connection.state, None) is None:
            return
        log.info("caller_left", connection=connection.state, error=str(error or ""))
        self._pool.api.on_closed(connection.state)
        self._perform(self._pool.after_api(self._clock.now_ms()))
