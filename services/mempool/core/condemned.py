"""Blocks whose bytes are not to be trusted any more leave the index, whoever pins their pages. No I/O.

What nobody pins goes at once. What somebody pins stays where it is in the tree, under a name that nobody asks for, and
goes as every block does when its last pin has ended. So do twins: an engine may have computed one from such bytes.
What an engine still computes from a condemned block that it has in use gets such a name when it is sealed.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from services.mempool.core.entry import Branch, Entry
from services.mempool.core.twins import Twins
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
    twins: Twins
    condemned: dict[BlockHash, list[Entry]]
    _entries: dict[BlockHash, Entry]
    _roots: dict[BlockHash, set[Branch]]

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
        """Nobody finds this block any more, nor what was computed from it: the blocks behind it, and their twins.

        Returns: blocks that are removed, and those that are pinned, twins among them, under other names.
        Cost: one step per block, and per twin of the space.
        """
        path, suspects = self._computed_from(block_hash)
        removed = self.delete([entry.block_hash for entry in path])
        pinned = [entry for entry in path if entry.branch is not None]
        names: dict[BlockHash, BlockHash] = {}
        for entry in pinned:
            name = names[entry.block_hash] = new_name(entry)
            self._forget([entry])
            entry.block_hash, entry.parent = name, names.get(entry.parent, entry.parent)
            self._entries[name] = entry
        self._drop_unused()
        for old, name in names.items():
            self.condemned.setdefault(old, []).append(self._entries[name])
        twins = self.twins.rename(suspects, new_name)
        for old, twin in twins:
            self.condemned.setdefault(old, []).append(twin)
        return removed, pinned + [twin for _, twin in twins]

    def condemn_late(self, entry: Entry, known: Entry) -> None:
        """This block, which is not indexed yet, was computed from the condemned block `known`."""
        self.condemned.setdefault(entry.block_hash, []).append(entry)
        entry.block_hash, entry.parent = new_name(entry), known.block_hash

    def _drop_unused(self) -> None:
        """Of condemned blocks those that nobody has any more."""
        for old, entries in list(self.condemned.items()):
            entries[:] = [entry for entry in entries if entry.pins or entry.block_hash in self.twins.pages]
            if not entries:
                del self.condemned[old]

    def _computed_from(self, block_hash: BlockHash) -> tuple[list[Entry], set[BlockHash]]:
        """What is indexed of the block and of all that continue it, and the names of these, those of twins included."""
        path: list[Entry] = []
        names: set[BlockHash] = set()
        twins = self.twins.by_parent()
        waiting = [block_hash]
        while waiting:
            name = waiting.pop()
            if name in names:
                continue
            known, heads = self._entries.get(name), list[Entry]()
            if known is not None:
                heads = [known]
            elif name in self.twins.pages:  # what continues it waits for it to be indexed
                heads = [branch.entries[0] for branch in self._roots.get(name, ())]
            behind = [entry for head in heads for entry in _behind(head) if entry.block_hash not in names]
            path += behind
            found = [name, *(entry.block_hash for entry in behind)]
            names.update(found)
            waiting += [twin for each in found for twin in twins.get(each, ())]
        return path, names


def new_name(entry: Entry) -> BlockHash:
    """One that nobody asks for."""
    seed = b"condemned:%d:%d:" % (next(_numbers), entry.page) + entry.block_hash
    return BlockHash(hashlib.sha256(seed).digest())


def _behind(entry: Entry) -> list[Entry]:
    """The block and all that continue it, each behind the one that it continues."""
    branch = entry.branch
    assert branch is not None
    found = branch.entries[entry.position - branch.start :]
    waiting = list(branch.below)
    while waiting:
        branch = waiting.pop()
        found += branch.entries
        waiting += branch.below
    return found
