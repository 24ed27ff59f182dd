"""Real service processes for tests: started on free ports, logs kept, killed, and nothing left behind.

Every process leads a session of its own, so that what it started can be found after its death, and dies
with the test run, however that ends.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from shared import http_get

READY_TIMEOUT_S = 120.0  # limits for what is broken: how fast it is on a busy machine proves nothing
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02
ROOT = Path(__file__).resolve().parents[2]


class ProcessFailed(AssertionError):
    """A service did not do what the test needs; the message ends with its log."""


def _die_with_parent() -> list[str]:
    """Words before a command, so that it dies with us.

    Not preexec_fn: it runs the fork handlers of every library in the child of a process with threads, and
    such a child can wait for ever for a lock that one of those threads held (seen with tracing's).
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def get_json(url: str, timeout_s: float = 30.0) -> tuple[int, Any]:
    """(status, body) of a GET; (0, None) when nobody answers."""
    try:
        with http_get.open_url(url, timeout_s=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _json_or_none(error.read())
    except http_get.NO_ANSWER:
        return 0, None


def _json_or_none(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def session_members(session_id: int) -> list[int]:
    """Live processes (zombies not counted) of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[3]) == session_id and fields[0] != "Z":
            found.append(int(entry.name))
    return found


@dataclass(slots=True)
class ServiceProcess:
    """One process: `command`, or a module of ours. Use as a context manager or call stop()."""

    name: str
    command: Sequence[str]
    log_path: Path
    admin_url: str = ""  # base URL of /ready; "": it has none
    env: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    sessions: list[int] = field(default_factory=list)  # every start of it led one

    @classmethod
    def of_module(
        cls, module: str, flags: Sequence[str], *, name: str, log_dir: Path, admin_url: str = "", **env: str
    ) -> "ServiceProcess":
        """`python -m module flags` with the interpreter that runs the tests."""
        return cls(name, [sys.executable, "-m", module, *flags], log_dir / f"{name}.log", admin_url, env)

    def start(self) -> "ServiceProcess":
        """Also starts it again after its end; the log is continued."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        env = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}  # noqa: TID251
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*_die_with_parent(), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**env, **self.env},
                start_new_session=True,
            )
        self.sessions.append(self.process.pid)
        return self

    @property
    def pid(self) -> int:
        """Of the newest start."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """It has not ended."""
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        """Everything that it wrote."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def fail(self, message: str) -> ProcessFailed:
        """An error that shows the end of the log."""
        return ProcessFailed(f"{self.name}: {message}\n--- log ---\n{self.log()[-6000:]}")

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> "ServiceProcess":
        """Until /ready answers 200. Raises: ProcessFailed."""
        self.wait_until(lambda: get_json(f"{self.admin_url}/ready")[0] == 200, "not ready", timeout_s)
        return self

    def wait_until(self, condition: Any, what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Poll while the process runs. Raises: ProcessFailed naming `what`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.running:
                assert self.process is not None
                raise self.fail(f"ended with {self.process.returncode} before: {what}")
            if time.monotonic() > deadline:
                raise self.fail(
                    f"{what} within {timeout_s} s; /ready says {get_json(f'{self.admin_url}/ready')}"
                )
            time.sleep(POLL_S)

    def status(self) -> dict[str, Any]:
        """/status. Raises: ProcessFailed."""
        code, body = get_json(f"{self.admin_url}/status")
        if code != 200:
            raise self.fail(f"/status answered {code}")
        return body

    def metric(self, name: str, *, default: float | None = None) -> float:
        """Sum over the labels of one metric of /metrics; 0.0 before any label has a value.

        Raises: ProcessFailed where it exports no such metric, unless there is a `default`.
        """
        with http_get.open_url(f"{self.admin_url}/metrics", timeout_s=30.0) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith((name + "{", name + " "))]
        if not found and not any(line.startswith(f"# TYPE {name} ") for line in lines):
            if default is None:
                raise self.fail(f"no metric {name}")
            return default
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def signal(self, number: int) -> None:
        """To the process itself, not to its children."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit status; negative: a signal. Raises: ProcessFailed when it does not end."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.fail(f"still runs after {timeout_s} s") from None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM and wait; after timeout_s SIGKILL and ProcessFailed."""
        if not self.running:
            return self.wait()
        self.signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except ProcessFailed:
            self.kill()
            raise

    def assert_no_orphans(self, within_s: float = 30.0) -> None:
        """Nothing that it ever started still runs. Kills what it finds, then raises ProcessFailed."""
        deadline = time.monotonic() + within_s
        while left := [pid for session in self.sessions for pid in session_members(session)]:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise self.fail(f"left processes behind: {left}")
            time.sleep(POLL_S)

    def __enter__(self) -> "ServiceProcess":
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.running:
            self.kill() if error is not None else self.stop()
        self.assert_no_orphans()
