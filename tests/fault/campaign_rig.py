"""The conductor's hold on the campaign's processes: start, command, kill -9, SIGSTOP ... SIGCONT, cut a socket."""

import contextlib
import ctypes
import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from tests.fault.campaign_actors import BLOCK_BYTES, NUM_RANKS
from tests.integration.mempool_rig import ROOT

NUM_PAGES = 40
PAGE_BYTES = 8192
assert BLOCK_BYTES <= PAGE_BYTES
ANSWER_S = 60.0  # nothing that an actor does may take longer, on whatever machine
START_S = 60.0
ATTACH_S = 30.0
PAUSE_S = 0.003
POLLS = frozenset(("is_lost", "reattach"))
SYS_PIDFD_GETFD = 438
A_LIBRARYS = re.compile(r"[EWI]\d{4} [\d:.]+ |\[\d+\.\d+\] .* UCX ")  # a line of NIXL's, or UCX's


class Gone(Exception):
    """The process died before it answered."""


class Refused(Exception):
    """The command met a mempool that refused it or was not there."""


class Clock:
    """Wakes stopped processes when their time has come, while the conductor waits for anything at all."""

    def __init__(self) -> None:
        self.stopped: dict[int, tuple[float, Process]] = {}
        self.trace: deque[str] = deque(maxlen=120)  # what happened last
        self.guard: Callable[[], None] = lambda: None  # raises Gone when there is nothing to wait for
        self.during: Callable[[], None] | None = None  # done once, while the next command is under way

    def stop(self, process: "Process", for_s: float) -> None:
        process.signal(signal.SIGSTOP)
        self.stopped[process.pid] = (time.monotonic() + for_s, process)

    def tick(self) -> None:
        now = time.monotonic()
        for pid, (due, process) in list(self.stopped.items()):
            if now >= due:
                del self.stopped[pid]
                process.signal(signal.SIGCONT)

    def wake(self, process: "Process") -> None:
        if self.stopped.pop(process.pid, None) is not None:
            process.signal(signal.SIGCONT)

    def wake_all(self) -> None:
        for _, process in self.stopped.values():
            process.signal(signal.SIGCONT)
        self.stopped.clear()

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Seconds until the condition held. Raises: AssertionError after timeout_s."""
        began = time.monotonic()
        while not condition():
            self.tick()
            took_s = time.monotonic() - began
            assert took_s < timeout_s, f"{what}: not within {timeout_s} s"
            time.sleep(PAUSE_S)
        return time.monotonic() - began

    def until_attached(self, condition: Callable[[], bool], what: str) -> None:
        """As until(), for what needs the services. Raises: Gone when one of them is dead."""

        def is_so() -> bool:
            self.guard()
            return condition()

        self.until(is_so, what, ATTACH_S)


class Process:
    """One forked process, known by its pidfd from its birth on."""

    def __init__(
        self, zygote: "Zygote", order: dict[str, Any], log: Path, control: socket.socket | None
    ) -> None:
        self.role: str = order["role"]
        self.killed_at = 0.0
        self.known_to = -1  # of an actor: Service.since of the mempool that knows this process
        with log.open("ab") as stderr:
            fds = [stderr.fileno()] + ([control.fileno()] if control is not None else [])
            self.pid = zygote.fork(order, fds)
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # dead already
            self.pidfd = -1

    @property
    def alive(self) -> bool:
        return self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]

    def signal(self, number: int) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """kill -9, and wait until the kernel says that it is dead."""
        self.killed_at = time.monotonic()
        self.signal(signal.SIGKILL)
        if self.pidfd >= 0:
            assert select.select([self.pidfd], [], [], 30.0)[0], f"{self.role} survived SIGKILL"

    @property
    def killed_s(self) -> float:
        """When it was, in wall time."""
        return time.time() - (time.monotonic() - self.killed_at)

    def is_stopped(self) -> bool:
        """Whether no thread of it runs now."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return True

    def cut(self, path: Path | None) -> int:
        """Shut down its sockets that are connected to `path`, or were accepted there; None: all of TCP. How many."""
        count = 0
        libc = ctypes.CDLL(None, use_errno=True)
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{self.pid}/fd/{name}").startswith("socket:"):
                    continue
                fd = libc.syscall(SYS_PIDFD_GETFD, self.pidfd, int(name), 0)
                if fd < 0:
                    code = ctypes.get_errno()
                    if code in (errno.EPERM, errno.ENOSYS):
                        raise CutForbidden(os.strerror(code))
                    continue
                count += _shut(socket.socket(fileno=fd), path)
        return count

    def close(self) -> None:
        if self.pidfd >= 0:
            self.kill()
            os.close(self.pidfd)
            self.pidfd = -1


class CutForbidden(Exception):
    """This kernel or container lets nobody reach into another process."""


def _shut(sock: socket.socket, path: Path | None) -> int:
    with sock:
        if sock.family not in ((socket.AF_INET, socket.AF_INET6) if path is None else (socket.AF_UNIX,)):
            return 0
        try:
            peer = sock.getpeername()
        except OSError:  # not connected: a listener
            return 0
        if path is not None and str(path) not in (peer, sock.getsockname()):
            return 0
        sock.shutdown(socket.SHUT_RDWR)
        return 1


class Actor(Process):
    """A process of campaign_actors.py. One command at a time."""

    def __init__(self, zygote: "Zygote", order: dict[str, Any], log: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(zygote, order, log, theirs)
        theirs.close()
        self._clock = zygote.clock
        self._asked: str = ""
        self.was_attached = self.role in ("front", "host-front", "copy")  # these attach by themselves

    def begin(self, name: str, *args: Any) -> None:
        """Send a command. Raises: Gone."""
        assert not self._asked, f"{self._asked} is not answered yet"
        if name not in POLLS:
            said = " ".join(str(arg)[:60] for arg in args)
            self._clock.trace.append(f"{self.role} {self.pid}: {name} {said}")
        try:
            self._socket.send(msgspec.msgpack.encode([name, *args]))
        except OSError:
            raise Gone(f"{self.role} is gone") from None
        self._asked = name

    def end(self) -> Any:
        """Its answer. Raises: Gone; Refused; AssertionError when none comes."""
        name, self._asked = self._asked, ""
        deadline = time.monotonic() + ANSWER_S
        while not select.select([self._socket], [], [], 0.002 if self._clock.stopped else 0.05)[0]:
            self._clock.tick()
            assert time.monotonic() < deadline, f"{self.role} hangs in {name}"
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            raise Gone(f"{self.role} died in {name}")
        went_well, answer = msgspec.msgpack.decode(data)
        if not went_well:
            raise Refused(answer)
        self.was_attached |= name == "attach"
        return answer

    def ask(self, name: str, *args: Any) -> Any:
        """begin() and end()."""
        self.begin(name, *args)
        during, self._clock.during = self._clock.during, None
        if during is not None:
            during()
        return self.end()

    def close(self) -> None:
        super().close()
        self._socket.close()


class Zygote:
    """campaign_zygote.py as a child."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.campaign_zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
        theirs.close()

    def fork(self, order: dict[str, Any], fds: list[int]) -> int:
        """The pid of the new process."""
        socket.send_fds(self._control, [msgspec.msgpack.encode(order)], fds)
        return msgspec.msgpack.decode(self._control.recv(1 << 16))

    def close(self) -> None:
        self._control.close()
        self._process.wait(timeout=60)


class LogFile:
    """A service's JSON lines, read as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict] = []
        path.touch()
        self._file = path.open()
        self._rest = ""
        self._other_lines: list[str] = []  # a traceback

    def read(self) -> list[dict]:
        """All lines so far."""
        *whole, self._rest = (self._rest + self._file.read()).split("\n")
        self.lines += [json.loads(line) for line in whole if line.startswith("{")]
        said = [line for line in whole if line and not line.startswith("{")]
        self._other_lines += [line for line in said if not A_LIBRARYS.match(line)]  # of a peer that is gone
        return self.lines

    def has(self, since: int, event: str, **fields: object) -> bool:
        """Whether such a line came after line number `since`."""
        found: Iterable[dict] = self.read()[since:]
        return any(
            line["event"] == event and all(line.get(key) == value for key, value in fields.items())
            for line in found
        )

    def close(self) -> None:
        self._file.close()

    def bug(self) -> str:
        """What the service says of an error of its own; "" so far."""
        self.read()
        found = [str(line.get("exception", line)) for line in self.lines if line["level"] == "error"]
        return "\n".join([*self._other_lines, *found])


class Service:
    """The mempool or the keeper, over its restarts."""

    def __init__(self, zygote: Zygote, role: str, folder: Path, ready: str, flags: dict[str, object]) -> None:
        self.name = role
        self.socket = folder / f"{role}.sock"
        self.log = LogFile(folder / f"{role}.log")
        self.process: Process | None = None
        self.since = 0  # number of the first log line of the present process
        self._zygote = zygote
        self._ready = ready
        flags = {"socket": self.socket} | flags
        self._order = {"role": role, "flags": [w for k, v in flags.items() for w in (f"--{k}", str(v))]}

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> float:
        """As its supervisor would, after its end. Seconds until it serves."""
        if self.process is not None:
            self.process.close()
        self.since = len(self.log.read())
        self.process = Process(self._zygote, self._order, self.log.path, None)
        return self._zygote.clock.until(self._serves, f"{self.name} serves", START_S)

    def _serves(self) -> bool:
        assert self.alive, f"{self.name} ended: {self.log.bug()}"
        return self.log.has(self.since, self._ready)


def mempool_flags(keeper: Path) -> dict[str, object]:
    """Settings of the campaign's mempool."""
    return {
        "keeper-socket": keeper,
        "admin-listen": "127.0.0.1:0",
        "capacity-bytes": NUM_PAGES * PAGE_BYTES * NUM_RANKS,
        "idle-punch-ms": 40,  # memory of free pages goes back in every pause
    }
