"""State and epoch of every page, and the free pages. No I/O: word writes go out as actions."""

import sys
from array import array
from collections.abc import Collection, Sequence

from services.mempool.core.page_state import PageEvent, next_state
from shared.errors import InvariantBroken
from shared.ids import Epoch, PageId
from shared.kv.page import PageState, pack_word


class PageTable:
    """All pages of one pool.

    Every epoch starts at the boot generation and grows by one each time the page becomes free, before anyone
    can get it again. Word writes are in the order in which readers must see them.
    """

    def __init__(self, num_pages: int, boot_generation: Epoch) -> None:
        self.num_pages = num_pages
        self.states = bytearray(num_pages)
        self.epochs = array("Q", [boot_generation]) * num_pages
        self.counts = [0] * _NUM_STATES
        self.counts[PageState.FREE] = num_pages
        self._warm: list[PageId] = []  # free, and perhaps backed by memory: used first
        self._cold = [PageId(page) for page in range(num_pages - 1, -1, -1)]  # never written, or punched
        # withdrawn as soon as they are free (releases.py), and what became so
        self.reserved: set[PageId] = set()
        self._withdrawn: list[PageId] = []
        self._words: list[tuple[int, int]] = [
            (p, pack_word(boot_generation, _FREE)) for p in range(num_pages)
        ]

    @classmethod
    def adopt(cls, words: Sequence[int]) -> "PageTable":
        """Go on from an earlier mempool's words. What was granted, written or on its way out is quarantined."""
        table = cls(0, Epoch(0))
        table.num_pages = len(words)
        # in passes over everything, as there may be millions of pages and the whole host waits
        said = array("Q", words)
        states = said.tobytes()[_STATE_BYTE :: said.itemsize]
        table.states = bytearray(states.translate(_KEPT))
        table.epochs = array("Q", [word >> 8 for word in words])
        table.counts = [table.states.count(state) for state in range(_NUM_STATES)]
        table._warm = _pages_in(table.states, _FREE)
        for state in (PageState.WITHDRAWN, PageState.RELEASED):
            table.reserved.update(_pages_in(table.states, state))
        if table.states != states:
            changed = [
                page for page, (old, new) in enumerate(zip(states, table.states, strict=True)) if old != new
            ]
            table._words = [(page, table.epochs[page] << 8 | table.states[page]) for page in changed]
        return table

    @property
    def num_free(self) -> int:
        """Pages that grant() can hand out at once."""
        return len(self._warm) + len(self._cold)

    @property
    def has_warm(self) -> bool:
        """Whether take_warm() would return any."""
        return bool(self._warm)

    def state(self, page: int) -> PageState:
        """Of one page. The page number must be in range."""
        return PageState(self.states[page])

    def apply(self, page: PageId, event: PageEvent) -> None:
        """Take one step of the state machine and note the new word.

        Raises: InvariantBroken when the page's state has no such event. The caller holds the proof.
        """
        old = self.states[page]
        new = next_state(old, event)
        self.states[page] = new
        self.counts[old] -= 1
        self.counts[new] += 1
        if new is _FREE:
            self.epochs[page] += 1
            if page not in self.reserved:
                self._warm.append(page)
        self._words.append((page, self.epochs[page] << 8 | new))
        if new is _FREE and page in self.reserved:
            self._withdraw(page)

    def apply_all(self, pages: Sequence[PageId], event: PageEvent) -> None:
        """The same step for every page, which must be in one state, named once, and not become free by it.

        Raises: InvariantBroken when they are in several states, or in one that has no such event.
        Cost: a quarter of apply() for each.
        """
        if pages:
            assert self._step(pages, event) is not _FREE
            self._note(pages)

    def _step(self, pages: Sequence[PageId], event: PageEvent) -> PageState:
        """The states and their counts, for pages as apply_all() takes them, one at least. The new state."""
        states = self.states
        found = set(map(states.__getitem__, pages))
        if len(found) != 1:
            raise InvariantBroken(f"{event} for pages in {len(found)} states")
        old = found.pop()
        new = next_state(old, event)
        assert len(set(pages)) == len(pages), "a page is named twice"
        for page in pages:
            states[page] = new
        self.counts[old] -= len(pages)
        self.counts[new] += len(pages)
        return new

    def _note(self, pages: Sequence[PageId]) -> None:
        """Their words of now, all in the state of the first."""
        epochs, state = self.epochs, self.states[pages[0]]
        self._words += [(page, epochs[page] << 8 | state) for page in pages]

    def grant(self) -> tuple[PageId, Epoch] | None:
        """A free page becomes granted; None when there is none."""
        page = self._take(PageEvent.GRANT)
        return (page, Epoch(self.epochs[page])) if page is not None else None

    def grant_page(self) -> PageId | None:
        """As grant()."""
        return self._take(PageEvent.GRANT)

    def _take(self, event: PageEvent) -> PageId | None:
        pages = self._warm or self._cold
        if not pages:
            return None
        page = pages.pop()
        self.apply(page, event)
        return page

    def grant_many(self, count: int) -> tuple[list[PageId], list[Epoch]]:
        """Up to `count` free pages become granted, the warm ones first, as by grant() for each."""
        pages = self.take_many(count, PageEvent.GRANT)
        return pages, [Epoch(self.epochs[page]) for page in pages]

    def take_many(self, count: int, event: PageEvent) -> list[PageId]:
        """Up to `count` free pages, the warm ones first, become what `event` (GRANT or LEND) makes of them."""
        pages: list[PageId] = []
        for stock in (self._warm, self._cold):
            if left := count - len(pages):
                pages += stock[: -left - 1 : -1]
                del stock[-left:]
        self.apply_all(pages, event)
        return pages

    def some_free(self, count: int) -> list[PageId]:
        """Up to `count` free pages; nothing changes."""
        return [*self._warm[::-1][:count], *self._cold[::-1]][: max(0, count)]

    def free(self, page: PageId, event: PageEvent) -> None:
        """Retire a page by `event` and make it free, with a larger epoch; withdrawn at once if it is reserved.

        Nothing waits in between yet: no process maps a page as an alias; copy readers re-read the word.
        """
        self.apply(page, event)
        self.apply(page, PageEvent.DRAINED)

    def free_all(self, pages: Sequence[PageId], event: PageEvent) -> None:
        """As free() of each; pages as apply_all() takes them. Cost: a quarter of free() for each."""
        if not self.reserved.isdisjoint(pages):
            for page in pages:
                self.free(page, event)
        elif pages:
            self._step(pages, event)
            self._note(pages)
            self._step(pages, PageEvent.DRAINED)
            for page in pages:
                self.epochs[page] += 1
            self._note(pages)
            self._warm += pages

    @property
    def num_present(self) -> int:
        """Pages that are in use here or may be: all but the reserved ones, and those that are lent."""
        return self.num_pages - len(self.reserved) - self.counts[PageState.LEASED]

    def reserve(self, pages: Collection[PageId]) -> None:
        """Nobody gets these any more: they are withdrawn, the free ones now, the others when they come free.

        Cost: one pass over the free pages.
        """
        new = set(pages) - self.reserved
        self.reserved |= new
        free = [page for page in (*self._warm, *self._cold) if page in new]
        self._warm = [page for page in self._warm if page not in new]
        self._cold = [page for page in self._cold if page not in new]
        for page in free:
            self._withdraw(page)

    def restore(self, pages: Collection[PageId]) -> None:
        """End a reservation: withdrawn pages are free again; the caller knows that every process maps them."""
        self.reserved -= set(pages)
        for page in pages:
            if self.states[page] == PageState.WITHDRAWN:
                self.free(page, PageEvent.MAPPED)

    def _withdraw(self, page: PageId) -> None:
        self.apply(page, PageEvent.WITHDRAW)
        self._withdrawn.append(page)

    def take_withdrawn(self) -> list[PageId]:
        """Pages that were withdrawn since the last call."""
        out, self._withdrawn = self._withdrawn, []
        return out

    def take_warm(self) -> list[PageId]:
        """Free pages that memory may back. They count as cold from now on: the caller punches them."""
        taken, self._warm = self._warm, []
        self._cold.extend(taken)
        return taken

    def take_words(self) -> list[tuple[int, int]]:
        """Word writes since the last call, oldest first: (page, word)."""
        assert sum(self.counts) == self.num_pages, self.counts
        words, self._words = self._words, []
        return words

    def by_state(self) -> dict[str, int]:
        """Number of pages in each state."""
        return {state.name.lower(): self.counts[state] for state in PageState}


_FREE = PageState.FREE
_NUM_STATES = max(PageState) + 1
_ADOPTED = (PageState.FREE, PageState.SEALED, PageState.WITHDRAWN, PageState.RELEASED)
_KEPT = bytes(state if state in _ADOPTED else PageState.QUARANTINED for state in range(256))
_STATE_BYTE = 0 if sys.byteorder == "little" else 7  # of a word


def _pages_in(states: bytearray, state: PageState) -> list[PageId]:
    """Cost: what finding the state's bytes takes where there are few, else a step per page."""
    if not states.count(state):
        return []
    return [PageId(page) for page, found in enumerate(states) if found == state]
