"""The KV memory of one instance: what requests write (private tokens), sealed blocks by name, host memory behind.

Both tiers are the mempool's own radix index (services/mempool/core/radix.py), so that what goes first is what goes
first in production. Counted are tokens: a trace's block of 512 tokens stands for the engine's smaller ones.
"""

from collections.abc import Callable, Sequence
from itertools import count

from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from shared.ids import BlockHash, PageId

ROOT = BlockHash(b"")  # before the first block of every prompt
Told = Callable[[Sequence[BlockHash]], None]


def tokens_of(entries: Sequence[Entry]) -> int:
    """Tokens that these blocks hold."""
    return sum(entry.valid_tokens for entry in entries)


class BlockStore:
    """Args:
    capacity_tokens: of the memory in which the engine works; dram_tokens: of the tier behind it, 0 for none.
    on_stored: in the engine's memory now; on_evicted: no more; on_removed: in neither tier any more.
    """

    def __init__(
        self,
        block_tokens: int,
        capacity_tokens: int,
        dram_tokens: int,
        on_stored: Told,
        on_evicted: Told,
        on_removed: Told,
    ) -> None:
        self.block_tokens = block_tokens
        self.capacity_tokens = capacity_tokens
        self.private_tokens = 0
        self.indexed_tokens = 0
        self.pinned_tokens = 0
        self.promised_tokens = 0  # what requests may come to have in all (held.py)
        self.num_evicted = 0
        self.num_refused = 0  # reserve() that found no room: somebody waits for memory
        self._dram_capacity_tokens = dram_tokens
        self._dram_used_tokens = 0
        self._index = Index()
        self._dram = Index()
        self._on_stored = on_stored
        self._on_evicted = on_evicted
        self._on_removed = on_removed
        self._pages = count()

    @property
    def room_tokens(self) -> int:
        """What could still be reserved, everything that nobody pins evicted."""
        return self.capacity_tokens - self.private_tokens - self.pinned_tokens

    @property
    def used_share(self) -> float:
        """Of the memory that requests hold now."""
        return (self.private_tokens + self.pinned_tokens) / self.capacity_tokens

    def match(self, blocks: Sequence[BlockHash]) -> list[Entry]:
        """Leading blocks in the engine's memory, marked as used."""
        return self._index.prefix(blocks) if blocks else []

    def match_dram(self, blocks: Sequence[BlockHash]) -> int:
        """Tokens of the leading ones of these blocks that lie in host memory, marked as used."""
        return tokens_of(self._dram.prefix(blocks)) if blocks and self._dram_capacity_tokens else 0

    def pin(self, entries: Sequence[Entry]) -> None:
        """Keep them until unpin()."""
        for entry in entries:
            if not entry.pins:
                self.pinned_tokens += entry.valid_tokens
        self._index.pin(entries)

    def unpin(self, entries: Sequence[Entry]) -> None:
        """They may be evicted again, unless somebody else pins them."""
        self._index.unpin(entries)
        for entry in entries:
            if not entry.pins:
                self.pinned_tokens -= entry.valid_tokens

    def reserve(self, num_tokens: int) -> bool:
        """Private memory for so many tokens; what was used longest ago makes room. False: nothing changed."""
        if num_tokens > self.room_tokens:
            self.num_refused += 1
            return False
        self.private_tokens += num_tokens
        self._make_room()
        return True

    def release(self, num_tokens: int) -> None:
        """Private memory that nobody needs any more."""
        self.private_tokens -= num_tokens
        assert self.private_tokens >= 0

    def seal(self, parent: BlockHash, blocks: Sequence[BlockHash], num_tokens: int) -> list[Entry]:
        """Name consecutive blocks that were written in private memory; they come back pinned.

        Args: num_tokens: of all these blocks, the last one perhaps partial; as many private tokens are released.
        Memory of a block that was named before is free again: its entry is used.
        """
        pages = [PageId(next(self._pages)) for _ in blocks]
        last = num_tokens - (len(blocks) - 1) * self.block_tokens
        entries = self._index.insert_path(
            parent, blocks, pages, self.block_tokens, last_tokens=last % self.block_tokens
        )
        fresh = [entry for entry, page in zip(entries, pages, strict=True) if entry.page == page]
        self.release(num_tokens)
        self.indexed_tokens += tokens_of(fresh)
        self.pin(entries)
        if fresh:
            self._on_stored([entry.block_hash for entry in fresh])
        return entries

    def keep(self, parent: BlockHash, blocks: Sequence[BlockHash], num_tokens: int) -> bool:
        """Name blocks that came from elsewhere and that no request uses yet. False where there is no room."""
        if not self.reserve(num_tokens):
            return False
        self.unpin(self.seal(parent, blocks, num_tokens))
        return True

    def _make_room(self) -> None:
        while self.private_tokens + self.indexed_tokens > self.capacity_tokens:
            entry = self._index.evict()
            assert entry is not None, "room was counted before"
            self.indexed_tokens -= entry.valid_tokens
            self.num_evicted += 1
            self._on_evicted((entry.block_hash,))
            if not self._to_dram(entry):
                self._on_removed((entry.block_hash,))

    def _to_dram(self, entry: Entry) -> bool:
        """The evicted block is copied behind; whether it is there."""
        if entry.valid_tokens > self._dram_capacity_tokens:
            return False
        if entry.block_hash in self._dram:
            self._dram.prefix((entry.block_hash,))
            return True
        self._dram.insert(Entry(entry.block_hash, entry.parent, entry.page, entry.valid_tokens))
        self._dram_used_tokens += entry.valid_tokens
        while self._dram_used_tokens > self._dram_capacity_tokens:
            gone = self._dram.evict()
            assert gone is not None, "nothing in host memory is pinned"
            self._dram_used_tokens -= gone.valid_tokens
            if gone.block_hash not in self._index:
                self._on_removed((gone.block_hash,))
        return True
