"""Pages of one space that the mempool itself writes, or gives to a caller of its API. No I/O.

Over the page table and the index of the space, so that such a page goes through the same states as an engine's:
free -> granted (take) -> writing -> sealed (seal), or back (give_up); sealed -> free (retire) once out of the index.
"""

from collections.abc import Callable, Iterable, Sequence

from services.mempool.core.entry import Entry, runs_of
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from shared.ids import Epoch, PageId, SpaceId
from shared.kv.page import PageState


class OwnPages:
    """Every sealed entry must be written down before the word of its page: `note` is called with it, or it is in
    `noted` until the caller empties that.
    """

    def __init__(
        self, space: SpaceId, table: PageTable, index: Index, note: Callable[[Entry], None] | None = None
    ) -> None:
        self.space = space
        self.table = table
        self.index = index
        self.noted: list[Entry] = []
        self._note = note

    @property
    def num_pages(self) -> int:
        """Of the space."""
        return self.table.num_pages

    @property
    def num_free(self) -> int:
        """What take() could return now."""
        return self.table.num_free

    @property
    def num_unpinned(self) -> int:
        """Indexed blocks that nobody pins."""
        return len(self.index) - self.index.num_pinned

    def take(self, count: int) -> tuple[list[PageId], list[Epoch]]:
        """Up to `count` free pages, granted, and their epochs."""
        return self.table.grant_many(count)

    def is_current(self, page: PageId, epoch: int) -> bool:
        """Whether the page is still the one that an address of this epoch means."""
        return page < self.table.num_pages and self.table.epochs[page] == epoch

    def first_stale(self, pages: Sequence[PageId], epochs: Sequence[Epoch]) -> PageId | None:
        """The first page that is not the one that an address of its epoch means; None: all of them are."""
        now = self.table.epochs
        if pages and max(pages) < self.table.num_pages and [now[page] for page in pages] == epochs:
            return None
        pairs = zip(pages, epochs, strict=True)
        return next((page for page, epoch in pairs if not self.is_current(page, epoch)), None)

    def epochs_of(self, pages: Iterable[PageId]) -> list[Epoch]:
        """Now."""
        return [Epoch(self.table.epochs[page]) for page in pages]

    def begin(self, pages: Iterable[PageId]) -> None:
        """A copy writes these granted pages from now on."""
        states, granted = self.table.states, int(PageState.GRANTED)
        self.table.apply_all([page for page in pages if states[page] == granted], PageEvent.WRITE)

    def seal(self, entries: Iterable[Entry]) -> None:
        """The bytes of these pages are complete; the index has just taken the entries."""
        sealed = list(entries)
        pages = [entry.page for entry in sealed]
        states = self.table.states
        self.table.apply_all([p for p in pages if states[p] == PageState.GRANTED], PageEvent.WRITE)
        self.table.apply_all(pages, PageEvent.SEAL)
        if self._note is None:
            self.noted += sealed
            return
        for entry in sealed:
            self._note(entry)

    def take_in(self, entries: Sequence[Entry]) -> list[Entry]:
        """The bytes of these pages are complete: index them. A page whose block came otherwise meanwhile is free again.

        Returns: what is indexed now of these blocks, by whichever page.
        """
        here = self.index.insert_all(entries)
        pairs = list(zip(entries, here, strict=True))
        self.seal([entry for entry, known in pairs if known is entry])
        self.give_up([entry.page for entry, known in pairs if known is not entry])
        return here

    def give_up(self, pages: Iterable[PageId]) -> None:
        """Granted or written pages, never sealed, that nobody can write any more: free."""
        for page in pages:
            self.table.free(page, PageEvent.GIVE_BACK)

    def retire(self, entries: Sequence[Entry]) -> None:
        """Entries that have left the index: their pages are free."""
        self.table.free_all([entry.page for entry in entries], PageEvent.RETIRE)

    def lose(self, pages: Iterable[PageId]) -> None:
        """Their holder is gone and may still write them: quarantine."""
        for page in pages:
            self.table.apply(page, PageEvent.HOLDER_LOST)

    def recover(self, pages: Iterable[PageId], proof: PageEvent = PageEvent.HOLDER_DEAD) -> None:
        """The holder of lost pages is dead, or has said that it writes them no more (ACKNOWLEDGED): free."""
        for page in pages:
            self.table.free(page, proof)

    def used(self, blocks: Sequence[Entry]) -> list[Entry]:
        """What there is of these blocks, which another space had, marked as just used. Cost: least where each follows
        the one before: using blocks one by one cuts the tree between them."""
        here = [entry for entry in blocks if entry.block_hash in self.index]
        found: list[Entry] = []
        for run in runs_of(here):
            while run:
                path = self.index.prefix([entry.block_hash for entry in run])
                found += path
                run = run[len(path) :]
        return found

    def evict_some(self, count: int) -> list[Entry]:
        """Free the pages of up to `count` blocks, as evict() of each."""
        gone: list[Entry] = []
        while len(gone) < count and (entry := self.index.evict()) is not None:
            gone.append(entry)
        self.retire(gone)
        return gone

    def evict(self) -> Entry | None:
        """Free the page of the coldest leaf; its entry. None when everything is pinned."""
        entry = self.index.evict()
        if entry is not None:
            self.retire([entry])
        return entry
