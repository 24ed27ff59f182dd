"""What a connection to the nine calls surely holds, as its answers have told it: columns by space, for direct copies.

Whatever is in doubt (a call that was not answered, pages that others may write) counts as not held: then the mempool is
asked. So forgetting too much costs time, never bytes. A page is *owned* from alloc_mem's answer until a call is sent
that ends it, *pinned* as often as answers have said. One thread.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.ids import SpaceId
from shared.mempool.direct_checks import MEDIATED, OWNED, PINNED, PINS, READING, WRITING
from shared.wire.mempool_api import Medium, PageAddress

Pages = NDArray[np.int64]
Epochs = NDArray[np.uint64]
MAX_PAGES = 1 << 24  # of a space; more are not remembered


class Columns:
    """Of one instance's pages in one space; a row a page. `shared`: others may name its pages as targets of theirs."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.epochs = np.zeros((2, 0), np.uint64)  # rows as direct_checks names them
        self.counts = np.zeros((4, 0), np.int32)
        self._name_rows()

    def _name_rows(self) -> None:
        self.owned, self.pinned = self.epochs[OWNED], self.epochs[PINNED]  # 0: not owned; with pins
        self.pins = self.counts[PINS]
        # direct copies that read or write it; transfers of the mempool's that may touch it
        self.reading, self.writing, self.mediated = (self.counts[row] for row in (READING, WRITING, MEDIATED))

    def reach(self, last: int) -> bool:
        """Room for a page of this number. False: too many."""
        old = self.owned.size
        if last < old:
            return True
        if last >= MAX_PAGES:
            return False
        more = max(old, last + 1 - old, 1024)
        self.epochs, self.counts = (
            np.concatenate([rows, np.zeros((len(rows), more), rows.dtype)], axis=1)
            for rows in (self.epochs, self.counts)
        )
        self._name_rows()
        return True

    def count_pins(self, pages: Pages, epochs: Epochs, count: int) -> None:
        """So many pins more on each, under epochs that are not older than what is known. Below zero too: an answer that
        is on its way may bring the pin that a call has given up already."""
        is_new = epochs > self.pinned[pages]
        self.pins[pages[is_new]] = 0
        self.pinned[pages[is_new]] = epochs[is_new]
        np.add.at(self.pins, pages[self.pinned[pages] == epochs], count)


class Stretch(NamedTuple):  # whose making costs a tenth of a dataclass's
    """Addresses of one instance in one space."""

    key: int
    space: SpaceId
    medium: Medium
    pages: Pages
    epochs: Epochs
    last: int  # the largest page
    is_distinct: bool  # no page is named twice


class AddressList(list[PageAddress]):
    """A list like any other whose columns were made with it: a transfer of these pages, as long as nobody changes the
    list, begins 0.2 us a page sooner. Answers of the nine calls are such lists where a connection copies by itself."""

    __slots__ = ("_as_made", "_stretch")

    def __init__(self, addresses: Iterable[PageAddress]) -> None:
        super().__init__(addresses)
        self._as_made = self.copy()
        self._stretch = _stretch_of(self._as_made)

    @property
    def stretch(self) -> Stretch | None:
        """None too when the list is not what it was. Cost: 10 ns a page, for which it is compared."""
        return self._stretch if self == self._as_made else None


def is_known(addresses: Sequence[PageAddress]) -> bool:
    """Whether its columns need not be made, unless it was changed."""
    return isinstance(addresses, AddressList)


def stretch_of(addresses: Sequence[PageAddress]) -> Stretch | None:
    """None when there are none, or they are of several instances or spaces. Cost: 0.2 us a page, but see AddressList.
    The columns may be the list's own: nobody writes them."""
    known = addresses.stretch if isinstance(addresses, AddressList) else None
    return _stretch_of(addresses) if known is None else known


def _stretch_of(addresses: Sequence[PageAddress]) -> Stretch | None:
    if not addresses:
        return None
    keys, media, spaces, pages, epochs = zip(*addresses, strict=True)
    count = len(pages)
    if not keys.count(keys[0]) == spaces.count(spaces[0]) == media.count(media[0]) == count:
        return None
    return Stretch(
        keys[0], spaces[0], media[0], np.array(pages, np.int64), np.array(epochs, np.uint64), max(pages),
        len(set(pages)) == count,
    )  # fmt: skip


def stretches_of(addresses: Iterable[PageAddress]) -> list[Stretch]:
    """All of them; of each instance and space one stretch."""
    if isinstance(addresses, AddressList) and (one := addresses.stretch) is not None:
        return [one]
    found: dict[tuple[int, SpaceId, Medium], list[PageAddress]] = {}
    for address in addresses:
        found.setdefault((address.instance_key, address.space, address.medium), []).append(address)
    return [made for part in found.values() if (made := stretch_of(part)) is not None]


class HeldPages:
    """Of one connection. Spaces are told apart by instance too: those of other hosts have numbers of their own.

    Args: own_key: of the connection's instance, into whose pages other callers may be told to copy.
    """

    def __init__(self, own_key: int) -> None:
        self._own_key = own_key
        self._columns: dict[tuple[int, SpaceId], Columns] = {}

    def columns(self, stretch: Stretch) -> Columns | None:
        """Of its space, with room for its pages. None: nothing is known of them."""
        found = self._columns.get((stretch.key, stretch.space))
        return found if found is not None and stretch.last < found.owned.size else None

    def _for(self, stretch: Stretch) -> Columns | None:
        key = stretch.key, stretch.space
        made = self._columns.setdefault(key, Columns(shared=stretch.key == self._own_key))
        return made if made.reach(stretch.last) else None

    def _known(self, addresses: Sequence[PageAddress]) -> list[tuple[Columns, Pages, Epochs]]:
        """Every place at which one of these pages is known, by whatever instance's name."""
        out: list[tuple[Columns, Pages, Epochs]] = []
        one = stretch_of(addresses)
        for each in [one] if one is not None else stretches_of(addresses):
            for (_, space), columns in self._columns.items():
                if space == each.space:
                    inside = each.pages < columns.owned.size
                    pages, epochs = (each.pages, each.epochs) if inside.all() else (
                        each.pages[inside], each.epochs[inside]
                    )  # fmt: skip
                    out.append((columns, pages, epochs))
        return out

    # -- answers ------------------------------------------------------------------------------------

    def allocated(self, addresses: Sequence[PageAddress]) -> None:
        """Pages that are this connection's from now on. Lent ones, and those beside them, the mempool alone writes."""
        if any(address.medium is Medium.LEASED for address in addresses):
            return
        for each in stretches_of(addresses):
            if (columns := self._for(each)) is not None:
                columns.owned[each.pages] = each.epochs
                columns.mediated[each.pages] = 0  # the mempool gives away only what nothing touches

    def pinned(self, addresses: Sequence[PageAddress]) -> None:
        """One more pin on each."""
        for each in stretches_of(addresses):
            if (columns := self._for(each)) is not None:
                columns.count_pins(each.pages, each.epochs, 1)

    # -- calls that are sent ------------------------------------------------------------------------

    def given_up(self, addresses: Sequence[PageAddress]) -> None:
        """free_mem of these, or what ends as much: of each the page, or else one pin."""
        for each in stretches_of(addresses):
            self._for(each)  # a pin that is on its way may be the first that is heard of the space
        for columns, pages, epochs in self._known(addresses):
            mine = columns.owned[pages] == epochs
            columns.owned[pages[mine]] = 0
            columns.count_pins(pages[~mine], epochs[~mine], -1)

    def disowned(self, addresses: Sequence[PageAddress]) -> None:
        """They may be named soon, or be somebody else's."""
        for columns, pages, _ in self._known(addresses):
            columns.owned[pages] = 0

    def mediate(self, addresses: Sequence[PageAddress]) -> list[tuple[Columns, Pages]]:
        """The mempool begins a transfer that may touch these; what settle() wants when it surely has ended."""
        found = [(columns, pages) for columns, pages, _ in self._known(addresses)]
        for columns, pages in found:
            np.add.at(columns.mediated, pages, 1)
        return found

    def settle(self, begun: Iterable[tuple[Columns, Pages]]) -> None:
        """See mediate()."""
        for columns, pages in begun:
            np.subtract.at(columns.mediated, pages, 1)

    def is_busy(self, addresses: Sequence[PageAddress], *, writing: bool = False) -> bool:
        """Whether a direct copy touches one of them, or, with `writing`, writes it."""
        return any(
            columns.writing[pages].any() or (not writing and columns.reading[pages].any())
            for columns, pages, _ in self._known(addresses)
        )
