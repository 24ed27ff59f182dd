"""Processes of a test's, by /proc: `descendants(pid)`, `stopped(module)`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Of this process, whichever of its threads made them; what ends meanwhile may be missing."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = parents.get(pid, [])
    for child in found:  # grows meanwhile
        found += parents.get(child, [])
    return found


@contextmanager
def stopped(module: str) -> Iterator[None]:
    """Processes that run this module for the test, and theirs, stand still (SIGSTOP)."""
    first = [pid for pid in descendants(os.getpid()) if module in _words(pid)]
    assert first, module
    pids = {*first, *(below for pid in first for below in descendants(pid))}
    try:
        for pid in pids:
            _tell(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            _tell(pid, signal.SIGCONT)


def _tell(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []
