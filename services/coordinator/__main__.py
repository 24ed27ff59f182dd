"""`python -m services.coordinator --listen 127.0.0.1:8103`: settings, clock, listener, core -> run."""

import ipaddress
import socket
import sys

import uvicorn
from fastapi import FastAPI

from services.coordinator import config
from services.coordinator.app import create_app
from services.coordinator.config import CoordinatorSettings
from services.coordinator.http_protocol import TimedProtocol
from services.coordinator.shell import Coordinator
from shared.errors import SettingsError
from shared.observe import log, service
from shared.observe.admin import parse_listen
from shared.transport.clock import MonotonicClock
from shared.transport.http_server import HttpServer
from shared.transport.unix_socket import take_all_descriptors

KEEP_ALIVE_S = 30
UNREAD_S = 10.0  # of a connection that takes nothing of its answers
MAX_CONNECTIONS = 2_048
BACKLOG = 512


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


def own_url(advertise: str, host: str, port: int) -> str:
    """Under which this coordinator is reached, and told from the others on its Redis.

    A wildcard is the same word on every host: with it as their names two coordinators would both lead.
    """
    if advertise:
        return advertise
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: FastAPI) -> uvicorn.Server:
    """What serves the application, to be told where."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
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
    return HttpServer[TimedProtocol](config, UNREAD_S)


async def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    take_all_descriptors()  # one a connection
    listener = bind(settings.listen)
    logger = log.get_logger("coordinator")
    host, port = listener.getsockname()[:2]
    url = own_url(settings.advertise, host, port)
    coordinator = Coordinator(settings, MonotonicClock(), url=url)
    server = server_of(create_app(coordinator, settings.api_keys, {url, own_url("", "::", port)}))

    def stop(_: object) -> None:
        server.should_exit = True

    ended = service.end_on_signal()
    service.end_on_bug("coordinator", ended)
    ended.add_done_callback(stop)
    await coordinator.start()
    logger.info("listening", address=f"{host}:{port}")
    logger.info("settings", **service.shown(settings))
    try:
        await server.serve(sockets=[listener])
        return ended.result() if ended.done() else 0
    finally:
        await coordinator.stop()
        logger.info("stopped")


if __name__ == "__main__":
    sys.exit(service.main("coordinator", config.load, run))
