"""How long this process and its children were ready to run and did not, because somebody else had the processor.

Linux counts it per thread (/proc/.../schedstat). A measurement during which it grew by much says more
about the machine's other work than about the engine.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def waited_ms() -> float:
    """Of all threads together, since they began; 0 where the kernel does not say. Cost: about 50 us a process."""
    total_ns = 0
    for pid in _family(os.getpid()):
        for task in _folders(f"/proc/{pid}/task"):
            try:
                total_ns += int((task / "schedstat").read_text().split()[1])
            except (OSError, ValueError, IndexError):
                continue  # a thread that has just ended
    return total_ns / 1e6


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in _folders(f"/proc/{pid}/task"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _family(int(child))


def _folders(path: str) -> list[Path]:
    try:
        return list(Path(path).iterdir())
    except OSError:
        return []
