"""The pages of a SlotTable: which are free, mapped, sealed, pinned, on their way out. No I/O.

free --take()--> mapped in one slot --seal()--> sealed: may be placed read-only in other slots too (alias = pin)
 ^                    |                           |
 +--ack()-- leaving <-+---- last remove() --------+---> held, while pinned and mapped nowhere --unpin()--> free
"""

from collections.abc import Iterable

from shared.vmm.errors import BadMapping


class SlotPages:
    """Counts for each page the places where it is mapped and the pins on it. Pages that were never granted are
    foreign: another's, whose pins the caller holds."""

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self._free: list[int] = []
        self._places: dict[int, int] = {}  # page: places where it is mapped
        self._pins: dict[int, int] = {}
        self._sealed: set[int] = set()
        self._leaving: dict[int, int] = {}  # page: the batch that unmaps it for good
        self._foreign_leaving: list[tuple[int, int]] = []  # batch, page
        self._foreign_gone: list[int] = []

    def grant(self, pages: Iterable[int]) -> None:
        """Raises: BadMapping when a page is here already."""
        for page in pages:
            if page < 0 or page in self.owned or page in self._places:
                raise BadMapping(f"page {page} is here already")
            self.owned.add(page)
            self._free.append(page)

    def give_back(self, count: int) -> list[int]:
        """Up to `count` free pages, which leave the table."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self.owned.difference_update(taken)
        return taken

    @property
    def num_free(self) -> int:
        """Pages that can be mapped at once."""
        return len(self._free)

    def num_returning(self) -> int:
        """Pages that will be free when all batches so far are executed. Cost: linear in pages on their way out."""
        return sum(map(self.frees, self._leaving))

    def take(self) -> int:
        """A free page, now mapped at one place."""
        page = self._free.pop()
        self._places[page] = 1
        return page

    def place(self, page: int) -> None:
        """One more place of a page."""
        self._places[page] = self._places.get(page, 0) + 1
        self._leaving.pop(page, None)

    def remove(self, page: int, batch: int) -> None:
        """One place fewer; `batch` unmaps it."""
        self._places[page] -= 1
        if page not in self.owned:
            self._foreign_leaving.append((batch, page))
        elif self._places[page] == 0:
            self._leaving[page] = batch
        if self._places[page] == 0:
            del self._places[page]

    def ack(self, batch: int) -> None:
        """Everything up to this batch is executed."""
        for page in [page for page, number in self._leaving.items() if number <= batch]:
            del self._leaving[page]
            self._settle(page)
        self._foreign_gone += [page for number, page in self._foreign_leaving if number <= batch]
        self._foreign_leaving = [one for one in self._foreign_leaving if one[0] > batch]

    def frees(self, page: int) -> bool:
        """Whether the page, mapped nowhere any more, is kept by nothing either."""
        return page in self.owned and page not in self._places and page not in self._pins

    def seal(self, pages: Iterable[int]) -> None:
        """Never written again while anybody keeps them."""
        self._sealed.update(page for page in pages if page in self.owned)

    def unseal(self, pages: Iterable[int]) -> None:
        """Written again: the caller knows that nobody else keeps them."""
        self._sealed.difference_update(pages)

    def is_sealed(self, page: int) -> bool:
        """Whether the page may be aliased."""
        return page in self._sealed

    def may_alias(self, page: int) -> bool:
        """Sealed and pinned, or foreign."""
        if page < 0:
            return False
        return page not in self.owned or (page in self._sealed and page in self._pins)

    def is_reusable(self, page: int) -> bool:
        """Mapped at one place and kept by nothing else: whoever has that place may write it anew."""
        return page in self.owned and page not in self._pins and self._places[page] == 1

    def pin(self, page: int) -> None:
        """Raises: BadMapping when it is not sealed."""
        if page not in self._sealed:
            raise BadMapping(f"page {page} is not sealed")
        self._pins[page] = self._pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        """Raises: BadMapping when there is no pin."""
        pins = self._pins.get(page, 0)
        if pins == 0:
            raise BadMapping(f"page {page} has no pin")
        if pins > 1:
            self._pins[page] = pins - 1
            return
        del self._pins[page]
        if page not in self._leaving:  # else ack() settles it
            self._settle(page)

    def foreign_left(self, page: int) -> None:
        """A pin of the caller on a foreign page is needed no more."""
        if page not in self.owned:
            self._foreign_gone.append(page)

    def take_foreign(self) -> list[int]:
        """Foreign pages, once for each pin of the caller that may go."""
        gone, self._foreign_gone = self._foreign_gone, []
        return gone

    def check(self) -> None:
        """Own invariants; for tests. Every owned page is in exactly one of free, mapped, leaving, held."""
        leaving = set(self._leaving)
        mapped = set(self._places) & self.owned
        held = set(self._pins) - mapped - leaving
        assert len(self._free) == len(set(self._free))
        assert set(self._free) | mapped | leaving | held == self.owned
        assert not set(self._free) & (mapped | leaving | held)
        assert not mapped & leaving
        assert all(count > 0 for count in self._pins.values())
        assert self._pins.keys() <= self._sealed

    def _settle(self, page: int) -> None:
        if self.frees(page):
            self._sealed.discard(page)
            self._free.append(page)
