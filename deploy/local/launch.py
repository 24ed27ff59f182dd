"""Processes of the supervisor: by exec (this file) or forked from the engine zygote (zygote_client.py).

Every service leads its own session, dies with the supervisor and appends stdout and stderr to its log file.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

HERE = Path(__file__).resolve().parent
WRAPPER = (sys.executable, "-I", "-S", str(HERE / "die_with_parent.py"))
COPY_CHUNK_BYTES = 1 << 20
GUARD_RETRY_S = 1.0
# the last line of a traceback, also behind the mark that an engine core puts before its lines; the first of a crash
ERROR = re.compile(
    r"^(?:\([^)\n]*\) )?(?:(?:ERROR|CRITICAL) .*?\] )?"
    r"((?:(?:\w+\.)*\w*(?:Error|Exception)\b|Fatal Python error): \S.*)$",
    re.MULTILINE,
)
MAX_ERROR_CHARS = 400


class Launched(Protocol):
    """A running process. `on_exit(returncode)`, given at launch, is called once, from the event loop."""

    pid: int

    def send(self, signum: int) -> None:
        """Signal it; nothing happens if it is gone."""
        ...


class ExecProcess:
    """A child made by exec. Its exit is seen through a pidfd, without a thread and without SIGCHLD."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        on_exit: Callable[[int], None],
    ) -> None:
        """Raises: OSError when the process cannot be made, or not be watched; then there is none."""
        self._on_exit = on_exit
        with open_log(log) as out:
            self._process = subprocess.Popen(
                [*WRAPPER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._gone)

    def send(self, signum: int) -> None:
        """Signal the session's leader; SIGKILL goes to its whole process group."""
        if self._pidfd < 0:
            return
        if signum == signal.SIGKILL:
            kill_group(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        kill_group(self.pid)  # what it left behind; before the wait, while its pid cannot be reused
        returncode = self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        self._on_exit(returncode)


class Guard:
    """The process of guard.py, told which sessions live. Its death is seen at once, by the pipe to it.

    Another one learns the whole list; where the kernel refuses it, it is tried every GUARD_RETRY_S. Raises no OSError.
    """

    def __init__(self) -> None:
        self._leaders: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._start()

    def add(self, pid: int) -> None:
        """This session is ours."""
        self._leaders.add(pid)
        self._say(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """It ended and nothing of it is left."""
        self._leaders.discard(pid)
        self._say(f"-{pid}\n")

    def close(self) -> None:
        """End of file: the guard kills what is left, which is nothing after an orderly stop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._hang_up(self._process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=3)

    def _start(self) -> None:
        self._process = None
        loop = asyncio.get_running_loop()
        self._tried_s = loop.time()
        try:
            self._process = subprocess.Popen(
                # as arguments: it knows them from its first instruction, whatever becomes of this process
                [sys.executable, "-I", "-S", str(HERE / "guard.py"), *map(str, sorted(self._leaders))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            if self._process.stdin is not None:
                loop.add_reader(self._process.stdin, self._lost)
        except OSError:
            self._lost()

    def _say(self, lines: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(lines.encode())
            except OSError:
                self._lost()

    def _lost(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            self._hang_up(process)
            process.kill()
            process.wait()
        # not at once if it has ended at once, too
        at_s = self._tried_s + GUARD_RETRY_S
        self._timer = asyncio.get_running_loop().call_at(at_s, self._start)

    @staticmethod
    def _hang_up(process: "subprocess.Popen[bytes]") -> None:
        if process.stdin is not None:
            asyncio.get_running_loop().remove_reader(process.stdin)
            process.stdin.close()


def open_log(path: Path) -> IO[bytes]:
    """A log file for appending, readable by its owner only."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab", 0)


def cap_log(path: Path, cap_bytes: int) -> bool:
    """Keep a log file below its cap: its newest half moves to NAME.log.1 and the file starts again.

    Its writers hold it open with O_APPEND, so it is emptied in place; what they write between the copy
    and the cut is lost. So is what finds no room: the log may be what fills the disk. Returns whether it was cut.
    """
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        return False
    if size_bytes <= cap_bytes:
        return False
    with path.open("r+b") as log:
        log.seek(max(0, size_bytes - cap_bytes // 2))
        with contextlib.suppress(OSError), path.with_name(path.name + ".1").open("wb") as old:
            while chunk := log.read(COPY_CHUNK_BYTES):
                old.write(chunk)
        log.truncate(0)
    return True


def tail(path: Path, *, lines: int, start: int = 0, max_bytes: int = 64 << 10) -> list[str]:
    """The last lines of a log file, none from before offset `start`; empty when there is none."""
    text = _text(path, start, max_bytes, is_end=True)
    found = [line for line in text.splitlines() if line.strip()]
    return found[max(0, len(found) - lines) :]


def errors(path: Path, *, start: int = 0, most: int = 3, max_bytes: int = 4 << 20) -> list[str]:
    """The first errors that a log file names behind offset `start`, each once: the cause comes before its consequences.

    Where processes of one service end by each other, the last lines are about the last of them.
    """
    text = _text(path, start, max_bytes, is_end=False)
    found = dict.fromkeys(match[1].strip()[:MAX_ERROR_CHARS] for match in ERROR.finditer(text))
    return list(found)[:most]


def _text(path: Path, start: int, max_bytes: int, *, is_end: bool) -> str:
    """Of a log file behind offset `start`, at most so much, of the end or the beginning; "" when there is none."""
    try:
        with path.open("rb") as log:
            size_bytes = log.seek(0, os.SEEK_END)
            if start > size_bytes:  # the file was cut since
                start = 0
            log.seek(max(start, size_bytes - max_bytes) if is_end else start)
            return log.read(max_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def kill_group(leader: int) -> None:
    """SIGKILL every process of the leader's group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
