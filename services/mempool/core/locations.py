"""Where the blocks of a prompt have pages: one index per space, joined at the look-up. No I/O.

MemServe 4.2 lets one tree refer to data anywhere. Here every space (a GPU's HBM, host memory, pages leased from a
peer, a remote pool's hints) has a tree of its own, because a pin protects a page and not a block: the same block
may be in use in HBM while its copy in DRAM may go.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from shared.ids import BlockHash, SpaceId


class Stretch(NamedTuple):
    """Consecutive blocks that lie in one space."""

    space: SpaceId
    entries: list[Entry]


class Located(NamedTuple):
    """One page of a block."""

    space: SpaceId
    entry: Entry


class Locations:
    """Indexes of one kind of block (one content key). Spaces are asked in the order of `indexes`."""

    def __init__(self, indexes: Mapping[SpaceId, Index]) -> None:
        self.indexes = dict(indexes)

    def add(self, space: SpaceId, index: Index) -> None:
        """A space that is asked after all others."""
        self.indexes[space] = index

    def drop(self, space: SpaceId) -> None:
        """Its memory is gone. Harmless when it was not there."""
        self.indexes.pop(space, None)

    def prefix(self, hashes: Sequence[BlockHash]) -> list[Stretch]:
        """The longest prefix that has pages somewhere, each block in the first space that has it.

        What is returned counts as used; copies of the same blocks in later spaces age.
        Cost: a look-up per block and space, and a step per stretch.
        """
        out: list[Stretch] = []
        at = 0
        while at < len(hashes):
            stretch = self._longest_at(hashes, at)
            if stretch is None:
                break
            out.append(stretch)
            at += len(stretch.entries)
        return out

    def _longest_at(self, hashes: Sequence[BlockHash], at: int) -> Stretch | None:
        better: list[Set[BlockHash]] = []
        for space, index in self.indexes.items():
            known = index.hashes
            if hashes[at] in known:
                end = min((_first_known(hashes, at + 1, known) for known in better), default=len(hashes))
                return Stretch(space, index.prefix(hashes[at:end] if end - at < len(hashes) else hashes))
            better.append(known)
        return None

    def of(self, block_hash: BlockHash) -> list[Located]:
        """Every page of one block, the best first; nothing is marked as used."""
        found = ((space, index.get(block_hash)) for space, index in self.indexes.items())
        return [Located(space, entry) for space, entry in found if entry is not None]

    def is_elsewhere(self, block_hash: BlockHash, space: SpaceId) -> bool:
        """Whether another space than this one has the block."""
        return any(block_hash in index for other, index in self.indexes.items() if other != space)

    def delete(self, hashes: Iterable[BlockHash]) -> list[Located]:
        """Remove the named blocks' pages that have no pin, in all spaces. The caller frees the pages."""
        named = list(hashes)
        return [
            Located(space, entry) for space, index in self.indexes.items() for entry in index.delete(named)
        ]


def _first_known(hashes: Sequence[BlockHash], begin: int, known: Set[BlockHash]) -> int:
    """Position of the first hash from `begin` on that is known; len(hashes) without one."""
    return next((i for i in range(begin, len(hashes)) if hashes[i] in known), len(hashes))
