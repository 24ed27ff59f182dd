"""Engine processes that import vLLM all at once and are made one after the other, each with a mempool of its own.

    waiting = Waiting(folder); waiting.begin(name, words); found = waiting.measure(name, 120, in_pages=True)

A process gets `OUT.json --go FILE --mempool-socket PATH` behind its words, makes its engine when the file appears, and
leaves its result in OUT.json.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.registry import ROOT

TAIL = 2_500  # characters of a log that an error shows


class EngineFailed(RuntimeError):
    """It ended badly or not in time; the message ends with its log."""


class Waiting:
    """Args: folder: of results, logs and sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, name: str, words: Sequence[str]) -> None:
        """`python -m words`, not waited for."""
        more = ["--go", str(self._at(f"{name}.go")), "--mempool-socket", str(self._at(f"{name}.sock"))]
        with self._at(f"{name}.log").open("wb") as log:
            self._begun[name] = subprocess.Popen(
                [sys.executable, "-m", *words, str(self._at(f"{name}.json")), *more],
                stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            )  # fmt: skip

    def measure(self, name: str, timeout_s: float, *, in_pages: bool) -> dict[str, Any]:
        """Its turn: its result. Raises: EngineFailed."""
        process = self._begun.pop(name)
        pool = self._pool(name) if in_pages else None
        status: int | str = ""
        try:
            self._at(f"{name}.go").touch()
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"took more than {timeout_s:.0f} s"
        finally:
            end(process)
            if pool is not None:
                end(pool)
        out = self._at(f"{name}.json")
        if status or not out.exists():
            tail = self._at(f"{name}.log").read_text(errors="replace")[-TAIL:]
            raise EngineFailed(f"{name}: {status}\n{tail}")
        return json.loads(out.read_text())

    def _pool(self, name: str) -> subprocess.Popen[bytes]:
        socket = self._at(f"{name}.sock")
        words = [
            sys.executable,
            "-m",
            "services.mempool",
            "--socket",
            str(socket),
            "--admin-listen",
            "127.0.0.1:0",
        ]
        with self._at(f"{name}-mempool.log").open("wb") as log:
            pool = subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + 20
        while not socket.exists() and time.monotonic() < deadline and pool.poll() is None:
            time.sleep(0.05)
        return pool

    def _at(self, name: str) -> Path:
        return self._folder / name

    def close(self) -> None:
        """End those that were never measured."""
        for process in self._begun.values():
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
