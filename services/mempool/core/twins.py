"""Sealed pages of blocks that are indexed under another page: two engines computed the same block. No I/O.

A twin serves its engine alone. When nobody pins the indexed page any more, the twin takes its place and that page is
free at once: with pinned blocks behind it the index could not evict it, as long as those are used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Set

from services.mempool.core.entry import Entry
from shared.ids import BlockHash, PageId

Pinned = dict[PageId, Entry]  # an engine's sealed pages in use


class Twins:
    """Of one space. `pages`: by hash, whose they are; `loose`: indexed blocks whose last pin ended beside a twin."""

    def __init__(self) -> None:
        self.pages: dict[BlockHash, dict[PageId, Pinned]] = {}
        self.loose: list[Entry] = []

    def add(self, twin: Entry, pinned: Pinned, known: Entry | None) -> None:
        """A page was sealed whose block is indexed as `known`."""
        self.pages.setdefault(twin.block_hash, {})[twin.page] = pinned
        if known is not None and not known.pins:
            self.loose.append(known)

    def end(self, twin: Entry) -> None:
        """Its engine uses it no more, or it is what is indexed."""
        pages = self.pages[twin.block_hash]
        del pages[twin.page]
        if not pages:
            del self.pages[twin.block_hash]

    def by_parent(self) -> dict[BlockHash, list[BlockHash]]:
        """Hashes of twins by that of the block which each continues."""
        found: defaultdict[BlockHash, list[BlockHash]] = defaultdict(list)
        for block_hash, pages in self.pages.items():
            for page, pinned in pages.items():
                found[pinned[page].parent].append(block_hash)
        return found

    def rename(
        self, hashes: Set[BlockHash], new_name: Callable[[Entry], BlockHash]
    ) -> list[tuple[BlockHash, Entry]]:
        """Twins of these blocks are theirs no more: they take the place of no indexed page.

        Returns: the name that each had, and the twin.
        """
        renamed: list[tuple[BlockHash, Entry]] = []
        for block_hash in [each for each in self.pages if each in hashes]:
            for page, pinned in self.pages.pop(block_hash).items():
                twin = pinned[page]
                twin.block_hash = new_name(twin)
                self.pages[twin.block_hash] = {page: pinned}
                renamed.append((block_hash, twin))
        return renamed

    def merge(self) -> Iterator[tuple[Entry, PageId]]:
        """Indexed blocks that have a twin's page from now on, which the caller pins, and the page that each had."""
        loose, self.loose = self.loose, []
        for known in loose:
            if known.branch is None or known.pins or known.block_hash not in self.pages:
                continue
            page, pinned = next(iter(self.pages[known.block_hash].items()))
            old, twin = known.page, pinned[page]
            self.end(twin)
            known.page, known.valid_tokens = page, twin.valid_tokens
            pinned[page] = known
            yield known, old
