"""`python -m services.gateway --listen 127.0.0.1:8000 --model-dir ...`: settings, processes, run."""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

from services.gateway import config
from services.gateway.config import GatewaySettings, split_listen
from services.gateway.core.restarts import Restarts
from shared.errors import SettingsError
from shared.frame_room import with_frame_room
from shared.own_folder import OwnFolder

PR_SET_PDEATHSIG = 1


def bind(settings: GatewaySettings) -> socket.socket:
    """The listening address, taken. Raises: SettingsError naming the address."""
    host, port = split_listen(settings.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.processes > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"setting gateway.listen: cannot listen on {settings.listen}: {error.strerror}; "
            "choose another with --listen HOST:PORT"
        ) from error
    listener.setblocking(False)
    return listener


def run_one(settings: GatewaySettings, listener: socket.socket, number: int) -> int:
    """One process, until its orderly end; the exit status."""
    import uvloop  # imported here: after use_shared_metrics(), and in each child

    from services.gateway.server import serve
    from shared.observe import log, trace

    instance = settings.instance if settings.processes == 1 else f"{settings.instance}.{number}"
    log.setup("gateway", instance, settings.log_level)
    trace.setup(
        "gateway",
        instance,
        endpoint=settings.trace_endpoint,
        directory=settings.trace_dir,
        sample_ratio=settings.trace_sample_ratio,
    )
    try:
        return with_frame_room(uvloop.run, serve(settings, listener))
    finally:
        trace.shutdown()


def _child(settings: GatewaySettings, address: tuple[str, int], number: int) -> int:
    """Fork a process with a listening socket of its own: the kernel spreads connections over them."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        parent = os.getppid()
        if sys.platform == "linux":  # no orphans when the parent is killed
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            own = config.with_listen(settings, f"{host}:{address[1]}")
            code = run_one(own, bind(own), number)
    except SettingsError as error:
        print(f"gateway: {error.message}", file=sys.stderr)  # noqa: T201 - the logger is not set up yet
    except BaseException:  # noqa: BLE001 - the process ends here; its log must say why
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget_levels(pid: int) -> None:
    """A process that is gone has no requests in flight; what it counted stays counted."""
    from prometheus_client.multiprocess import mark_process_dead  # imported here: after use_shared_metrics()

    mark_process_dead(pid, config.shared_metrics_folder())


def run_many(settings: GatewaySettings, reserved: socket.socket) -> None:
    """N processes on one address; one that ends is started again. `reserved` holds the port, unlistened."""
    address = reserved.getsockname()[:2]
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _frame: stopping.append(caught))
    children: dict[int, int] = {}
    due_s = dict.fromkeys(range(settings.processes), 0.0)  # of those that are to be started, by number
    restarts = Restarts()
    replacing = True
    while children or due_s:
        if stopping:
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            stopping.clear()
            due_s.clear()
            replacing = False
        now_s = time.monotonic()
        for number in [n for n, when_s in due_s.items() if when_s <= now_s]:
            del due_s[number]
            children[_child(settings, address, number)] = number
            restarts.began(number, now_s)
        pid, _status = os.waitpid(-1, os.WNOHANG) if children else (0, 0)
        if not pid:
            time.sleep(0.05)
            continue
        _forget_levels(pid)
        number = children.pop(pid, None)
        if number is not None and replacing:
            due_s[number] = restarts.ended(number, time.monotonic())


def main(argv: list[str]) -> int:
    """Exit status: 0 after an orderly end, 2 when a setting is wrong, 70 after a bug of ours."""
    try:
        settings = config.load(argv)
        listener = bind(settings)
        if settings.processes == 1:
            return run_one(settings, listener, 0)
        folder = OwnFolder("quire-gateway-metrics-")
        try:
            config.use_shared_metrics(folder.path)
            run_many(settings, listener)
        finally:
            folder.remove()
    except SettingsError as error:
        print(f"gateway: {error.message}", file=sys.stderr)  # noqa: T201 - for whoever started it by hand
        return 2
    return 0


if __name__ == "__main__":
    if sys.flags.optimize:
        sys.exit("gateway: run without -O, assertions guard invariants")
    sys.exit(main(sys.argv[1:]))
