"""A link shows once what it can do: one transfer of some pages, timed, before anything depends on it.

UCX falls back silently: unexportable GPU memory goes at 0.3 GB/s, a missing ptrace permission turns CMA into TCP.
So a link under its floor fails loudly, with the path, the figure and the setting.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.transfer.errors import LinkTooSlow
from shared.transfer.interface import Link

REPEATS = 3
MAX_CACHED = 64


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was measured: the best of REPEATS, after one transfer that is not counted (`first_ms`)."""

    path: str
    gb_per_s: float
    first_ms: float
    num_bytes: int


def measure(
    link: Link,
    source: str,
    source_pages: Sequence[int],
    target: str,
    target_pages: Sequence[int],
    timeout_ms: int,
) -> SelfTest:
    """Pull these pages REPEATS + 1 times. The target pages are the caller's to overwrite.

    Raises: TransferError as of pull(), TransferRefused.
    """
    elapsed_us: list[int] = []
    num_bytes = 0
    for _ in range(REPEATS + 1):
        begun_s = time.monotonic()
        moved = link.pull(source, source_pages, target, target_pages, timeout_ms=timeout_ms).result()
        elapsed_us.append(max(1, round((time.monotonic() - begun_s) * 1e6)))
        num_bytes = moved.num_bytes
    best = min(elapsed_us[1:])
    return SelfTest(str(link.path), num_bytes / best / 1e3, elapsed_us[0] / 1e3, num_bytes)


def require(found: SelfTest, floor_gb_per_s: float) -> SelfTest:
    """The result, if it is good enough. A path that moves nothing (alias) has no floor.

    Raises: LinkTooSlow naming the setting.
    """
    if found.num_bytes and found.gb_per_s < floor_gb_per_s:
        raise LinkTooSlow(
            f"path {found.path} moves {found.gb_per_s:.2f} GB/s, the floor is {floor_gb_per_s:g}. Is the right device "
            "named (setting mempool.ucx_net_devices)? If this is all that the machine can do, lower "
            f"mempool.mover_floor_gb_per_s to {found.gb_per_s * 0.8:.2f}"
        )
    return found


class SelfTestCache:
    """Results in a file, by what decides them (boot, devices, path, page size), so that a restart need not repeat."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, SelfTest] = {}
        try:
            raw = json.loads(file.read_text())
            self._found = {str(key): SelfTest(**value) for key, value in raw.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._found = {}  # missing or of another version: measure again

    def get(self, key: str) -> SelfTest | None:
        """What was measured under this key."""
        return self._found.get(key)

    def put(self, key: str, found: SelfTest) -> None:
        """Keep it; the oldest goes when there are MAX_CACHED. A file that cannot be written costs a measurement."""
        self._found.pop(key, None)
        while len(self._found) >= MAX_CACHED:
            del self._found[next(iter(self._found))]
        self._found[key] = found
        rows = {each: asdict(value) for each, value in self._found.items()}
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(rows))
            partial.replace(self._file)
        except OSError:
            return
