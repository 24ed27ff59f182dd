"""Processes under measurement: started, waited for, their CPU and memory read from /proc, ended with us."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from loadtest.registry import ROOT
from shared import http_get
from shared.free_ports import free_port as free_port

DIE_WITH_PARENT = ROOT / "deploy" / "local" / "die_with_parent.py"
STOP_TIMEOUT_S = 10.0
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class StartFailed(Exception):
    """A process did not become ready; the message ends with its log."""


class Fleet:
    """Processes by name; leaving the context ends them all, the last started first."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.folder = log_dir
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Sequence[str]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready_url: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """begin() and wait_ready(). Raises: StartFailed."""
        self.begin(name, command, env=env)
        self.wait_ready(name, ready_url, timeout_s=timeout_s)

    def begin(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Start it and do not wait: several that take long start side by side."""
        with self._log_of(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**_environment(), **(env or {})},
                start_new_session=True,
            )
        self._commands[name] = command

    def wait_ready(self, name: str, ready_url: str, *, timeout_s: float = 60.0) -> None:
        """Until ready_url answers 200 (or, for tcp://, takes a connection; for unix://, is a socket).

        Raises: StartFailed with the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        while not _answers(ready_url):
            ended = self._running[name].poll() is not None
            if ended or time.monotonic() > deadline:
                tail = self._log_of(name).read_text(errors="replace")[-3000:]
                what = "ended" if ended else f"was not ready after {timeout_s:.0f} s"
                last = tail.strip().rpartition("\n")[2]  # first, as some show the beginning of this alone
                raise StartFailed(f"{name} {what}: {last[:160]}\n{shlex.join(self._commands[name])}\n{tail}")
            time.sleep(0.05)

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def cpu_us(self, name: str) -> int:
        """CPU time so far of the process and all its descendants, in steps of one clock tick."""
        return sum(process_cpu_us(pid) for pid in family(self.pid(name)))

    def stop(self, name: str) -> None:
        """SIGTERM, then SIGKILL for the whole session."""
        process = self._running.pop(name)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # nothing was left of it
            return

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._running)):
            self.stop(name)


def _environment() -> dict[str, str]:
    """Ours, without settings of a cluster that the caller may have: a measurement uses what it says."""
    return {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}  # noqa: TID251


def _answers(url: str) -> bool:
    if url.startswith("tcp://"):
        host, _, port = url.removeprefix("tcp://").partition(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            return False
        return True
    if url.startswith("unix://"):
        return Path(url.removeprefix("unix://")).is_socket()
    try:
        with http_get.open_url(url, timeout_s=2.0) as reply:
            return reply.status == 200
    except http_get.NO_ANSWER:
        return False


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the command's name: [0] state, [1] parent, [11] utime, [12] stime."""
    return (Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def family(root: int) -> list[int]:
    """A process and its living descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), int(_stat_fields(int(entry.name))[1])
            except OSError:  # it ended while we looked
                continue


def process_cpu_us(pid: int) -> int:
    """CPU time so far of one process, in steps of one clock tick; 0 when it has ended."""
    try:
        fields = _stat_fields(pid)
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) * _TICK_US


def pss_bytes(pid: int) -> int:
    """Proportional set size; 0 when the process has ended."""
    try:
        lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
