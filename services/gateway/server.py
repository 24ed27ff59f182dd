"""One gateway process: the application on uvicorn, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator

import uvicorn

from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
from services.gateway.deps import Gateway
from services.gateway.http_protocol import GatewayProtocol, Limits
from shared.observe.log import get_logger
from shared.transport.heap import settle_heap

DRAIN_POLL_S = 0.05
BACKLOG = 2_048

_log = get_logger("gateway.server")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM first drains (see _drain)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the handlers alone."""
        yield


def apply_limits(settings: GatewaySettings) -> None:
    """Hand the settings to the protocol class, which uvicorn constructs."""
    Limits.header_bytes = settings.max_header_bytes
    Limits.header_timeout_s = settings.header_timeout_ms / 1000
    Limits.body_idle_timeout_s = settings.body_idle_timeout_ms / 1000
    Limits.unsent_bytes = settings.slow_reader_bytes
    Limits.body_bytes = settings.max_body_bytes


def make_server(gateway: Gateway) -> uvicorn.Server:
    """A uvicorn server for the gateway's application, not started."""
    settings = gateway.settings
    apply_limits(settings)
    config = uvicorn.Config(
        create_app(gateway),
        interface="asgi3",
        http=GatewayProtocol,
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
    return _Server(config)


async def serve(settings: GatewaySettings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return."""
    gateway = Gateway(settings)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = make_server(gateway)
    await gateway.start()
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    settle_heap()
    host, port = listener.getsockname()[:2]
    _log.info("gateway_listening", address=f"{host}:{port}", model=settings.model_name)
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await _drain(gateway)
    server.should_exit = True
    await running
    await gateway.stop()
    _log.info("gateway_stopped")


async def _drain(gateway: Gateway) -> None:
    """Refuse new requests (/ready says 503), let those in flight finish until the drain deadline."""
    gateway.admission.draining = True
    deadline = asyncio.get_running_loop().time() + gateway.settings.drain_deadline_ms / 1000
    _log.info("gateway_draining", in_flight=gateway.admission.num_running)
    # Polled: at most a second of it, once in a process life.
    while gateway.admission.num_running and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(DRAIN_POLL_S)
    if gateway.admission.num_running:
        _log.warning("drain_deadline_passed", in_flight=gateway.admission.num_running)
        await gateway.cluster.stop()
