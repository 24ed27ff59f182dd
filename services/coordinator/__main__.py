"""`python -m services.coordinator --listen 127.0.0.1:8103`: settings, clock, listener, core -> run."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Generator

import msgspec
import uvicorn

from services.coordinator import config
from services.coordinator.app import create_app
from services.coordinator.config import CoordinatorSettings
from services.coordinator.shell import Coordinator
from shared.errors import SettingsError
from shared.observe import log, trace
from shared.observe.admin import parse_listen
from shared.transport.clock import MonotonicClock

EXIT_SETTINGS = 2
KEEP_ALIVE_S = 30
MAX_CONNECTIONS = 2_048
BACKLOG = 512


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would end with the signal's status instead of 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the handlers alone."""
        yield


def bind(listen: str) -> socket.socket:
    """The listening address, taken. Raises: SettingsError naming it."""
    host, port = parse_listen(listen)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # whoever connects while the journal is read waits instead of being refused
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"setting coordinator.listen: cannot listen on {listen}: {error.strerror}; "
            "choose another with --listen HOST:PORT"
        ) from error
    listener.setblocking(False)
    return listener


async def run(settings: CoordinatorSettings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    logger = log.get_logger("coordinator")
    coordinator = Coordinator(settings, MonotonicClock())
    server = _Server(
        uvicorn.Config(
            create_app(coordinator, settings.api_keys),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    host, port = listener.getsockname()[:2]
    await coordinator.start()
    logger.info("listening", address=f"{host}:{port}")
    shown = msgspec.to_builtins(settings)
    logger.info(
        "settings", **{**shown, "api_keys": len(settings.api_keys), "redis_url": bool(settings.redis_url)}
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        await coordinator.stop()
        logger.info("stopped")


def main() -> int:
    """Exit status 0 after a signal, 2 on wrong settings."""
    if not __debug__:
        print("quire does not run with -O: it relies on its assertions", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    try:
        settings = config.load(sys.argv[1:])
        listener = bind(settings.listen)
        log.setup("coordinator", settings.instance, settings.log_level)
        trace.setup(
            "coordinator",
            settings.instance,
            endpoint=settings.trace_endpoint,
            directory=settings.trace_dir,
            sample_ratio=settings.trace_sample_ratio,
        )
        asyncio.run(run(settings, listener))
    except SettingsError as error:
        print(f"coordinator: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS
    trace.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
