"""Processes of a test's, by /proc: `descendants(pid)`, `is_gone(pid)`, `stopped(module)`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """All below this process, each before its own; what ends meanwhile may be missing."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))

    def below(parent: int) -> list[int]:
        return [found for child in children.get(parent, ()) for found in (child, *below(child))]

    return below(pid)


def is_gone(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextmanager
def stopped(module: str) -> Iterator[None]:
    """Processes that run this module for the test, and theirs, stand still (SIGSTOP)."""
    first = [pid for pid in descendants(os.getpid()) if module in _words(pid)]
    assert first, module
    pids = {*first, *(child for pid in first for child in descendants(pid))}
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
