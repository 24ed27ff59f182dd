"""One gateway process: the application on uvicorn, and an orderly end.

A signal ends it with status 0. A background task that a bug ended does so with status 70 and sooner: who goes on
without it answers from what it knew then, as if all were well. Whoever started it starts it again.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket

import uvicorn

from services.gateway import metrics
from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
from services.gateway.connections import Connection, make_room, num_connections
from services.gateway.core.beats import BEAT_S, NO_BEATS
from services.gateway.deps import Gateway
from services.gateway.push import Limits
from shared.observe import service
from shared.observe.log import get_logger
from shared.transport.heap import settle_heap
from shared.transport.http_server import HttpServer
from shared.transport.unread import num_unsent
from shared.wire.requests import ALIVE_TIMEOUT_MS

DRAIN_POLL_S = 0.05
BACKLOG = 2_048
# after a bug: workers go on for so long for a gateway that says Alive no more
BROKEN_DRAIN_MS = ALIVE_TIMEOUT_MS
END_LIMIT_S = 10.0  # after a bug, for what follows the draining

_log = get_logger("gateway.server")


class _Server(HttpServer[Connection]):
    """SIGTERM first drains (see _drain)."""

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second."""
        if len(self.connections) > Limits.connections:
            make_room(self.connections)
        return await super().on_tick(counter)

    def give_up(self, connection: Connection) -> None:
        """It took nothing for too long."""
        metrics.SLOW_READERS.inc()
        super().give_up(connection)


def apply_limits(settings: GatewaySettings) -> None:
    """Hand the settings to the protocol class, which uvicorn constructs."""
    Limits.header_bytes = settings.max_header_bytes
    Limits.header_timeout_s = settings.header_timeout_ms / 1000
    Limits.body_idle_timeout_s = settings.body_idle_timeout_ms / 1000
    Limits.unsent_bytes = settings.slow_reader_bytes
    Limits.body_bytes = settings.max_body_bytes
    Limits.connections = num_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def make_server(gateway: Gateway) -> _Server:
    """A uvicorn server for the gateway's application, not started."""
    settings = gateway.settings
    apply_limits(settings)
    config = uvicorn.Config(
        create_app(gateway),
        interface="asgi3",
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        date_header=True,
        backlog=BACKLOG,
        timeout_keep_alive=-(-settings.keep_alive_timeout_ms // 1000),
        timeout_graceful_shutdown=1,  # the draining before it is what waits
    )
    return _Server(config, settings.unread_timeout_ms / 1000)


def beat(fd: int) -> None:
    """One byte now and every second that the running loop runs: who reads them knows that it does."""
    if fd == NO_BEATS:
        return
    with contextlib.suppress(OSError):  # nobody reads, now or any more
        os.write(fd, b".")
    asyncio.get_running_loop().call_later(BEAT_S, beat, fd)


async def serve(settings: GatewaySettings, listener: socket.socket, beats_fd: int = NO_BEATS) -> int:
    """Serve until SIGTERM, SIGINT or a bug in the background, then drain; the exit status. It beats meanwhile."""
    ended = service.end_on_signal()
    service.end_on_lost_task("gateway", ended)
    gateway = Gateway(settings)
    server = make_server(gateway)
    await gateway.start()
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    settle_heap()
    beat(beats_fd)
    host, port = listener.getsockname()[:2]
    _log.info("gateway_listening", address=f"{host}:{port}", model=settings.model_name)
    await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
    status = ended.result() if ended.done() else 0
    is_broken = status == service.EXIT_BUG
    if is_broken and settings.processes > 1 and server.started:
        for each in server.servers:  # the kernel gives connections to the other processes
            each.close()
    await _drain(gateway, server, is_broken)
    server.should_exit = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_LIMIT_S if is_broken else None):
            await running
            await gateway.stop()
    _log.info("gateway_stopped", status=status)
    return status


async def _drain(gateway: Gateway, server: _Server, is_broken: bool) -> None:
    """Refuse new requests (/ready says 503 and what is in flight), let those in flight finish and be read until the
    drain deadline, or a second signal.
    """
    loop, is_told_twice = asyncio.get_running_loop(), asyncio.Event()
    gateway.admission.draining = True
    limit_ms = gateway.settings.drain_deadline_ms
    if is_broken:
        limit_ms = min(limit_ms, BROKEN_DRAIN_MS)
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, is_told_twice.set)
    deadline = loop.time() + limit_ms / 1000
    _log.info("gateway_draining", in_flight=gateway.admission.num_running)
    # Polled: once in a process life.
    while in_flight := max(gateway.admission.num_running, num_unsent(server.connections)):
        gateway.in_flight = in_flight
        if is_told_twice.is_set() or loop.time() >= deadline:
            break
        await asyncio.sleep(DRAIN_POLL_S)
    if gateway.admission.num_running:
        _log.warning("drain_deadline_passed", in_flight=gateway.admission.num_running)
        await gateway.cluster.stop()
