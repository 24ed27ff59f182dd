"""One sealed page in an index, and the stretch of consecutive blocks that it belongs to. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.ids import BlockHash, PageId


@dataclass(slots=True, eq=False)
class Entry:
    """One sealed page. `pins` counts what keeps it: leases, handoffs, engines, copies."""

    block_hash: BlockHash
    parent: BlockHash
    page: PageId
    valid_tokens: int  # fewer than a block's in a partial tail
    pins: int = 0
    branch: "Branch | None" = field(default=None, repr=False)  # None: not indexed
    position: int = 0  # in its branch, counted from branch.start

    @property
    def last_used(self) -> int:
        """Tick of the index, not time; of a block with successors perhaps too small, never too large."""
        return self.branch.last_used if self.branch is not None else 0

    def at(self, page: PageId) -> "Entry":
        """The same block in another page."""
        return Entry(self.block_hash, self.parent, page, self.valid_tokens)


class Branch:
    """Consecutive blocks; entries[i].position == start + i. `below`: branches that continue it at its end."""

    __slots__ = ("above", "below", "entries", "last_used", "leaving", "queued", "start")

    def __init__(self, entries: list[Entry], start: int, above: "Branch | None", last_used: int) -> None:
        self.entries = entries
        self.start = start
        self.above = above
        self.below: set[Branch] = set()
        self.last_used = last_used
        self.leaving = False  # its pages are being copied away
        self.queued = False  # has its one item in the index's heap

    def may_lose(self) -> bool:
        """Whether its last block can go: unpinned, and nothing that stays continues it."""
        if not self.entries or self.leaving or self.entries[-1].pins:
            return False
        return all(below.leaving for below in self.below)


def runs_of(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Stretches of blocks that follow each other."""
    first = 0
    for i in range(1, len(entries) + 1):
        if i == len(entries) or entries[i].parent != entries[i - 1].block_hash:
            yield entries[first:i]
            first = i
