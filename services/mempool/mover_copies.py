"""What the mover keeps of spaces and copies, what it answers, and how it refuses."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from services.mempool.mover_job import Job
from services.mempool.mover_layers import Feed, Sent
from services.mempool.mover_paths import Parts
from services.mempool.mover_regions import RankRegion
from services.mempool.mover_spaces import MappedSpace
from shared.errors import ClusterError, ResourceError
from shared.transfer.errors import TransferFailed, TransferRefused
from shared.transfer.interface import Moved
from shared.transfer.reslice import KvEnd

MAX_PAGES = 65_536  # of one copy
MAX_PARTS = 16  # source spaces of one copy


class MoverBusy(ResourceError):
    """As many copies are on their way as may be; ask again when one of them has ended."""

    code = "mover.busy"


class MoverClosed(ResourceError):
    """The mempool ends."""

    code = "mover.closed"
    retryable = False


@dataclass(frozen=True, slots=True)
class CopyDone:
    """The end of a copy. Without `code` every page is in place on every rank.

    With one, no target page may be used; those in `quarantined` may still be written.
    """

    copy_id: int
    num_bytes: int = 0
    elapsed_us: int = 0  # since copy(), waiting included
    path: str = ""
    code: str = ""
    reason: str = ""
    quarantined: tuple[int, ...] = ()
    sent: tuple[Sent, ...] = ()  # of a copy that went layer by layer

    @property
    def ok(self) -> bool:
        """Whether the targets may be sealed."""
        return not self.code


OnDone = Callable[[CopyDone], None]
OnSettled = Callable[[int, tuple[int, ...]], None]  # space, pages that nobody can write any more


@dataclass(slots=True, eq=False)
class Space:
    """From add_space() to remove_space()."""

    number: int
    regions: Sequence[RankRegion]
    end: KvEnd | None = None
    mapped: MappedSpace | None = None
    failure: ClusterError | None = None  # of the last attempt to map it
    is_tried: bool = False  # an attempt is under way
    num_failures: int = 0
    num_copies: int = 0
    on_removed: Callable[[], None] | None = None  # it is to go when its copies have ended

    @property
    def state(self) -> str:
        """In words, for /status."""
        if self.failure is not None:
            return f"failed: {self.failure.message}"
        return "mapping" if self.mapped is None else "mapped"


@dataclass(slots=True, eq=False)
class Copy:
    """From copy() to on_done."""

    copy_id: int
    target: int
    targets: Sequence[int]
    parts: Parts
    on_done: OnDone
    begun_s: float
    deadline_s: float
    feed: Feed | None = None  # it goes layer by layer
    raw: bool = False  # never cut anew
    timer: asyncio.TimerHandle | None = None
    job: Job | None = None  # once it runs
    num_pulls: int = 0  # while it runs
    in_doubt: set[tuple[int, int]] = field(
        default_factory=set
    )  # (rank, page) that it may still write, once ended
    spaces: set[int] = field(init=False)  # all that it touches

    def __post_init__(self) -> None:
        self.spaces = {self.target, *(source for source, _ in self.parts)}

    @property
    def elapsed_us(self) -> int:
        """Since copy()."""
        return round((time.monotonic() - self.begun_s) * 1e6)


@dataclass(slots=True)
class PathTotals:
    """Of one path, since the start."""

    copies: int = 0
    bytes: int = 0
    last_gb_per_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """What was copied, by path, and what failed, by code."""

    paths: dict[str, PathTotals] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def ok(self, copy: Copy, moved: Sequence[Moved]) -> CopyDone:
        """Count a copy that ended well."""
        num_bytes = sum(each.num_bytes for each in moved)
        path = "+".join(sorted({str(each.path) for each in moved}))
        totals = self.paths.setdefault(path, PathTotals())
        totals.copies += 1
        totals.bytes += num_bytes
        sent = () if copy.feed is None else tuple(copy.feed.sent)
        took_us = [(each.end_ns - each.begin_ns) / 1e3 for each in sent]
        elapsed_us = sum(took_us) if sent else max(each.elapsed_us for each in moved)
        totals.last_gb_per_s = num_bytes / max(1, elapsed_us) / 1e3
        return CopyDone(copy.copy_id, num_bytes, copy.elapsed_us, path, sent=sent)

    def failed(self, copy: Copy, error: BaseException, quarantined: Sequence[int]) -> CopyDone:
        """Count one that did not."""
        known = error if isinstance(error, ClusterError) else TransferFailed(repr(error))
        self.failures[known.code] = self.failures.get(known.code, 0) + 1
        return CopyDone(
            copy.copy_id, 0, copy.elapsed_us, "", known.code, known.message, tuple(sorted(quarantined))
        )

    def status(self) -> dict[str, Any]:
        """Plain."""
        paths = {path: asdict(totals) for path, totals in self.paths.items()}
        return {"paths": paths, "failures": dict(self.failures)}


def check_shape(targets: Sequence[int], parts: Parts) -> None:
    """Raises: TransferRefused for what is no copy, or too large a one."""
    counts = [len(pages) for _, pages in parts]
    if not 0 < len(targets) <= MAX_PAGES or not 0 < len(parts) <= MAX_PARTS:
        raise TransferRefused(f"{len(targets)} pages from {len(parts)} spaces in one copy")
    if sum(counts) != len(targets) or 0 in counts:
        raise TransferRefused(f"parts of {counts} for {len(targets)} pages")
