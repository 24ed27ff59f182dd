"""Processes of a measurement that do what they are told: a JSON command a line in, a marked JSON line out.

    child = Child("consumer", ["loadtest.producers.lent_traffic"], log); child.ask("open", page_bytes=8 << 20) -> dict
    asyncio.run(serve({"open": open_it}))          in the process: each command names a coroutine function

What else a process prints goes to its log. One command is under way at a time.
"""

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.registry import ROOT

MARK = "@@answer "
STOP_S = 20.0
SETTLE_S = 10.0  # that a process whose command failed has to say why, until it ends
TAIL = 6_000  # characters of a log that an error shows
LINE = 400  # and of one line: an engine that dies prints its whole configuration behind the error

Handler = Callable[..., Awaitable[dict[str, Any]]]


class ChildFailed(Exception):
    """It ended, answered with an error, or not in time; the message ends with its log."""


class Child:
    """`python -m words`, from construction to close().

    Args: log: file of what it prints; env: beside this process's environment.
    """

    def __init__(
        self, name: str, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self._log = name, log
        self._answers: queue.Queue[str | None] = queue.Queue()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env=os.environ | dict(env or {}),  # noqa: TID251  a process's environment is its parent's
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    self._answers.put(line.removeprefix(MARK))
                else:
                    log.write(line)
        self._answers.put(None)

    def say(self, what: str, **arguments: Any) -> None:
        """Begin a command; answer() waits for its end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildFailed(f"{self.name} does not listen: {error}\n{self.tail()}") from error

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Of the command that was said last. Raises: ChildFailed."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildFailed(f"{self.name}: no answer within {timeout_s:.0f} s\n{self.tail()}") from None
        if line is None:
            raise ChildFailed(f"{self.name} ended\n{self.tail()}")
        found = json.loads(line)
        if "error" in found:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SETTLE_S)
            raise ChildFailed(f"{self.name}: {found['error']}\n{self.tail()}")
        return found

    def ask(self, what: str, *, timeout_s: float = 120.0, **arguments: Any) -> dict[str, Any]:
        """say() and answer()."""
        self.say(what, **arguments)
        return self.answer(timeout_s)

    def tail(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line[:LINE] for line in lines)[-TAIL:]

    def close(self) -> None:
        """Its input ends, which ends it; else it is killed. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:  # it is gone, and what was not read with it
                self._process.kill()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_S)  # a process that it forked may hold its output open
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


async def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer commands until the input ends. An exception of a handler is its answer, and ends the process."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        words = json.loads(line)
        try:
            answer = await handlers[words.pop("do")](**words)
        except Exception as error:
            print(MARK + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            raise
        print(MARK + json.dumps(answer), flush=True)
