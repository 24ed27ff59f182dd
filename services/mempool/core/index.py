"""Sealed pages by block hash: a radix tree by parent links, with pins, evicted from its leaves. No I/O.

A block's hash covers its whole prefix, so the longest indexed prefix of a prompt is found by look-ups in a
dictionary; the parent links are there for eviction, which must not take a block away under its successors
(MemServe 4.2). A block may arrive before its parent: it is found once the parent is there.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.errors import InvariantBroken
from shared.ids import BlockHash, PageId


@dataclass(slots=True)
class Entry:
    """One sealed page. `pins` counts leases and handoffs that keep it; while positive it stays."""

    block_hash: BlockHash
    parent: BlockHash
    page: PageId
    valid_tokens: int  # fewer than a block's in a partial tail
    checksum: int = 0  # 0: not sampled
    pins: int = 0
    last_used: int = 0  # tick of the index, not time


class Index:
    """Hash -> entry. Names sealed pages only; the pool keeps the page table in step."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, Entry] = {}
        self._num_children: dict[BlockHash, int] = {}  # also of parents that are not indexed
        # (last_used, hash) of leaves that could go; stale items are skipped when they come up
        self._leaves: list[tuple[int, BlockHash]] = []
        self._tick = 0
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    def entries(self) -> Iterable[Entry]:
        """All of them, in no particular order."""
        return self._entries.values()

    def insert(self, entry: Entry) -> bool:
        """False, and nothing changed, when the hash is indexed already."""
        if entry.block_hash in self._entries:
            return False
        assert entry.pins == 0
        self._entries[entry.block_hash] = entry
        self._num_children[entry.parent] = self._num_children.get(entry.parent, 0) + 1
        self._touch([entry])
        return True

    def prefix(self, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Entries of the longest indexed prefix, marked as just used. Cost: one look-up per block."""
        found: list[Entry] = []
        for block_hash in hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            found.append(entry)
        self._touch(found)
        return found

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep them until the same number of unpin() calls."""
        for entry in entries:
            self.num_pinned += entry.pins == 0
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Raises: InvariantBroken on an entry without a pin."""
        for entry in entries:
            if entry.pins <= 0:
                raise InvariantBroken(f"page {entry.page} was unpinned more often than pinned")
            entry.pins -= 1
            if entry.pins == 0:
                self.num_pinned -= 1
                self._offer(entry)

    def evict(self) -> Entry | None:
        """Remove and return the least recently used leaf without a pin; None when every leaf is pinned.

        Cost: O(log n) amortized.
        """
        while self._leaves:
            last_used, block_hash = heapq.heappop(self._leaves)
            entry = self._entries.get(block_hash)
            if entry is not None and entry.last_used == last_used and self._can_go(entry):
                self._remove(entry)
                return entry
        return None

    def delete(self, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Remove and return the named blocks that have no pin; their successors stay until they age."""
        removed: list[Entry] = []
        for block_hash in hashes:
            entry = self._entries.get(block_hash)
            if entry is not None and entry.pins == 0:
                self._remove(entry)
                removed.append(entry)
        return removed

    def delete_unpinned(self) -> list[Entry]:
        """Remove everything that has no pin."""
        return self.delete([h for h, entry in self._entries.items() if entry.pins == 0])

    def _touch(self, entries: Sequence[Entry]) -> None:
        self._tick += 1
        for entry in entries:
            entry.last_used = self._tick
            self._offer(entry)

    def _can_go(self, entry: Entry) -> bool:
        return entry.pins == 0 and entry.block_hash not in self._num_children

    def _offer(self, entry: Entry) -> None:
        if self._can_go(entry):
            heapq.heappush(self._leaves, (entry.last_used, entry.block_hash))
            if len(self._leaves) > 4 * len(self._entries) + 64:
                self._leaves = [(e.last_used, h) for h, e in self._entries.items() if self._can_go(e)]
                heapq.heapify(self._leaves)

    def _remove(self, entry: Entry) -> None:
        assert entry.pins == 0
        del self._entries[entry.block_hash]
        left = self._num_children[entry.parent] - 1
        if left:
            self._num_children[entry.parent] = left
            return
        del self._num_children[entry.parent]
        parent = self._entries.get(entry.parent)
        if parent is not None:
            self._offer(parent)
