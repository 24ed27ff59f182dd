"""The processes of one gateway: one that serves, or several on one address of which one that ends starts again.

Of several each beats from its event loop into a pipe; one that was heard and is no more is killed: a probe of the
address asks any of them, and the others answer it.
"""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

from services.gateway import config
from services.gateway.config import GatewaySettings, split_listen
from services.gateway.core.beats import NO_BEATS, SILENT_S, Beats
from services.gateway.core.restarts import Restarts
from shared.errors import SettingsError
from shared.frame_room import with_frame_room

PR_SET_PDEATHSIG = 1
MANY_BEATS = 4096


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


def run_one(settings: GatewaySettings, listener: socket.socket, number: int, beats_fd: int = NO_BEATS) -> int:
    """One process, until its orderly end; the exit status. `beats_fd`: where it says that its loop runs."""
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
        return with_frame_room(uvloop.run, serve(settings, listener, beats_fd))
    finally:
        trace.shutdown()


def _run_child(settings: GatewaySettings, address: tuple[str, int], number: int, beats_fd: int) -> NoReturn:
    """In a forked process, until its end; with a listening socket of its own: the kernel spreads connections."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        parent = os.getppid()
        if sys.platform == "linux":  # no orphans when the parent is killed
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            config.go_on_in_metrics_of(number)
            own = config.with_listen(settings, f"{host}:{address[1]}")
            code = run_one(own, bind(own), number, beats_fd)
    except SettingsError as error:
        print(f"gateway: {error.message}", file=sys.stderr)  # noqa: T201 - the logger is not set up yet
    except BaseException:  # noqa: BLE001 - the process ends here; its log must say why
        traceback.print_exc()
    finally:
        os._exit(code)


class Children:
    """The processes of one gateway that live, by number."""

    def __init__(self, settings: GatewaySettings, address: tuple[str, int]) -> None:
        self._settings = settings
        self._address = address
        self._numbers: dict[int, int] = {}  # by pid
        self._pipes: dict[int, int] = {}  # by pid: its beats
        self._beats = Beats()

    def __len__(self) -> int:
        return len(self._numbers)

    def start(self, number: int) -> bool:
        """False: the system lets us have no more of them now, as stderr says."""
        ends: tuple[int, ...] = ()
        try:
            ends = hears, beats = os.pipe()
            for fd in ends:
                os.set_blocking(fd, False)
            pid = os.fork()
        except OSError as error:
            for fd in ends:
                os.close(fd)
            _say(f"process {number} cannot be started now: {error.strerror}; trying again")
            return False
        if not pid:
            for fd in (hears, *self._pipes.values()):
                os.close(fd)
            _run_child(self._settings, self._address, number, beats)
        os.close(beats)
        self._numbers[pid] = number
        self._pipes[pid] = hears
        return True

    def tell(self, signal_number: int) -> None:
        """All of them."""
        for pid in self._numbers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def kill_hung(self, now_s: float) -> None:
        """To be called every second at least."""
        for pid, fd in self._pipes.items():
            with suppress(BlockingIOError):
                if os.read(fd, MANY_BEATS):
                    self._beats.heard(self._numbers[pid], now_s)
        hung = self._beats.silent(now_s)
        for pid in [pid for pid, number in self._numbers.items() if number in hung]:
            number = self._numbers[pid]
            _say(f"process {number} (pid {pid}) hangs: its event loop did nothing for {SILENT_S:g} s; killed")
            self._beats.ended(number)
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """The number of one that has ended."""
        pid, _status = os.waitpid(-1, os.WNOHANG) if self._numbers else (0, 0)
        number = self._numbers.pop(pid, None)
        if number is not None:
            os.close(self._pipes.pop(pid))
            self._beats.ended(number)
            _forget_levels(number)
        return number


def _say(text: str) -> None:
    print(f"gateway: {text}", file=sys.stderr)  # noqa: T201 - the process that starts the others has no logger


def _forget_levels(number: int) -> None:
    """A process that is gone has no requests in flight; what it counted stays counted."""
    from prometheus_client.multiprocess import mark_process_dead  # imported here: after use_shared_metrics()

    mark_process_dead(number, config.shared_metrics_folder())


def run_many(settings: GatewaySettings, reserved: socket.socket) -> None:
    """N processes on one address; one that ends is started again. `reserved` holds the port, unlistened."""
    stopping: list[int] = []
    for caught in (signal.SIGTERM, signal.SIGINT):
        signal.signal(caught, lambda caught, _frame: stopping.append(caught))
    children = Children(settings, reserved.getsockname()[:2])
    due_s = dict.fromkeys(range(settings.processes), 0.0)  # of those that are to be started, by number
    restarts = Restarts()
    replacing = True
    while children or due_s:
        if stopping:
            children.tell(signal.SIGTERM)
            stopping.clear()
            due_s.clear()
            replacing = False
        now_s = time.monotonic()
        for number in [n for n, when_s in due_s.items() if when_s <= now_s]:
            del due_s[number]
            restarts.began(number, now_s)
            if not children.start(number):
                due_s[number] = restarts.ended(number, now_s)
        children.kill_hung(now_s)
        number = children.reap()
        if number is None:
            time.sleep(0.05)
        elif replacing:
            due_s[number] = restarts.ended(number, time.monotonic())
