"""Pages that copies of the nine calls touch; what is given up meanwhile is freed when the last has ended. No I/O.

idle -(touch)-> busy -(release, as often as touched)-> idle, or free if it was given up
"""

from collections.abc import Callable, Sequence

from shared.ids import PageId, SpaceId

Free = Callable[[Sequence[PageId]], None]


class BusyPages:
    """Of one mempool's callers. All lists are of pages of one space. Cost: below 0.1 us a page."""

    def __init__(self) -> None:
        self._counts: dict[SpaceId, dict[PageId, int]] = {}  # how many copies touch each page; none of zero
        self._dying: dict[tuple[SpaceId, PageId], Free] = {}

    def __len__(self) -> int:
        """Pages that are busy."""
        return sum(map(len, self._counts.values()))

    @property
    def num_dying(self) -> int:
        """Of these, pages that were given up."""
        return len(self._dying)

    def has(self, space: SpaceId, page: PageId) -> bool:
        """Whether a copy reads or writes the page."""
        return page in self._counts.get(space, ())

    def has_any(self, space: SpaceId, pages: Sequence[PageId]) -> bool:
        """Whether a copy reads or writes one of them."""
        counts = self._counts.get(space)
        return bool(counts) and not counts.keys().isdisjoint(pages)

    def touch(self, space: SpaceId, pages: Sequence[PageId]) -> None:
        """One more copy reads or writes these, each named once, until release()."""
        counts = self._counts.setdefault(space, {})
        if not counts or counts.keys().isdisjoint(pages):
            counts.update(dict.fromkeys(pages, 1))
            return
        for page in pages:
            counts[page] = counts.get(page, 0) + 1

    def release(self, space: SpaceId, pages: Sequence[PageId]) -> None:
        """A copy does so no more: what was given up meanwhile is free. Pages that are idle already stay so."""
        counts = self._counts.get(space)
        if not counts:
            return
        for page in pages:
            left = counts.pop(page, 0) - 1
            if left > 0:
                counts[page] = left
            elif self._dying:
                free = self._dying.pop((space, page), None)
                if free is not None:
                    free([page])

    def when_idle(self, space: SpaceId, pages: Sequence[PageId], free: Free) -> None:
        """Free them now, or when the last copy that touches them has ended."""
        if not self.has_any(space, pages):
            if pages:
                free(pages)
            return
        counts = self._counts[space]
        self._dying.update({(space, page): free for page in pages if page in counts})
        if idle := [page for page in pages if page not in counts]:
            free(idle)
