"""Blocks whose bytes are not to be trusted any more leave the index, whoever pins their pages. No I/O.

What nobody pins goes at once. What somebody pins stays where it is in the tree, under a name that nobody asks for, and
goes as every block does when its last pin has ended.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from services.mempool.core.entry import Branch, Entry
from shared.ids import BlockHash

# of all indexes: a condemned block leaves for another one, which may condemn its next copy
_numbers = count(1)


class Watch(Protocol):
    """Whoever publishes what is indexed. A block is told as removed before its page can be free."""

    def stored(self, entries: Sequence[Entry]) -> None: ...

    def removed(self, entries: Sequence[Entry]) -> None: ...


class Condemned(ABC):
    """See Index, which has these."""

    watch: Watch | None
    _entries: dict[BlockHash, Entry]

    @abstractmethod
    def delete(self, hashes: Sequence[BlockHash]) -> list[Entry]:
        """See Index."""

    def _forget(self, entries: Sequence[Entry]) -> None:
        """The blocks are not found here any more."""
        for entry in entries:
            del self._entries[entry.block_hash]
        if self.watch is not None:
            self.watch.removed(entries)

    def condemn(self, block_hash: BlockHash) -> tuple[list[Entry], list[Entry]]:
        """Nobody finds this block any more, nor what was computed from it: the blocks behind it.

        Returns: blocks that are removed, and those that are pinned, under other names.
        Cost: one step per block.
        """
        known = self._entries.get(block_hash)
        if known is None or known.branch is None:
            return [], []
        path = _behind(known, known.branch)
        removed = self.delete([entry.block_hash for entry in path])
        pinned = [entry for entry in path if entry.branch is not None]
        names: dict[BlockHash, BlockHash] = {}
        for entry in pinned:
            seed = b"condemned:%d:%d:" % (next(_numbers), entry.page) + entry.block_hash
            name = names[entry.block_hash] = BlockHash(hashlib.sha256(seed).digest())
            self._forget([entry])
            entry.block_hash, entry.parent = name, names.get(entry.parent, entry.parent)
            self._entries[name] = entry
        return removed, pinned


def _behind(entry: Entry, branch: Branch) -> list[Entry]:
    """The block and all that continue it, each behind the one that it continues."""
    found = branch.entries[entry.position - branch.start :]
    waiting = list(branch.below)
    while waiting:
        branch = waiting.pop()
        found += branch.entries
        waiting += branch.below
    return found
