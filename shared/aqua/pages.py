"""Where a tensor's bytes are while no address shows them: a peer's pages, each with one in host memory beside it.

No torch, no I/O. `lent[i]` is None once the mempool has copied page i to `beside[i]`, or where nothing was lent.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from shared.aqua.errors import TensorLost
from shared.wire.mempool_api import ADDRESS_BYTES, Evacuated, PageAddress

Location = Literal["local", "peer", "dram"]


class Pages:
    """Of one tensor. `is_lost`: some of its bytes are nowhere."""

    def __init__(self, lent: list[PageAddress] | None, beside: list[PageAddress]) -> None:
        self.lent: list[PageAddress | None] = list(lent) if lent is not None else [None] * len(beside)
        self.beside = beside
        self.is_lost = False

    def current(self) -> list[PageAddress]:
        """Where the bytes are, or go. Raises: TensorLost."""
        if self.is_lost:
            raise TensorLost("its lender took its pages back, and their copy into host memory failed")
        return [lent or beside for lent, beside in zip(self.lent, self.beside, strict=True)]

    def all(self) -> list[PageAddress]:
        """Everything that it takes."""
        return [*self.borrowed(), *self.beside]

    def borrowed(self) -> list[PageAddress]:
        """What it takes of a peer."""
        return [lent for lent in self.lent if lent is not None]

    @property
    def location(self) -> Location:
        """Of the slowest page."""
        return "peer" if all(self.lent) else "dram"


@dataclass(slots=True, eq=False)
class Placed:
    """One tensor's memory. `local`: its pages here while it is mapped. `away`: None once dropped. `is_ahead`: what is
    here may be newer than what is away: a copy of it failed, or has not been made.
    """

    first: int  # of its places
    num_pages: int
    away: Pages | None
    local: list[PageAddress] = field(default_factory=list)
    is_ahead: bool = False


class Directory:
    """Whose each lent page is. Not for concurrent use."""

    def __init__(self) -> None:
        self._owner: dict[bytes, tuple[Pages, int]] = {}

    def add(self, pages: Pages) -> None:
        """From now on hear() finds it."""
        for i, lent in enumerate(pages.lent):
            if lent is not None:
                self._owner[lent.to_bytes()] = pages, i

    def remove(self, pages: Pages) -> None:
        """It has no lent pages any more, or is gone."""
        for lent in pages.borrowed():
            self._owner.pop(lent.to_bytes(), None)

    def hear(self, message: Evacuated) -> tuple[int, int]:
        """Pages went back to their lenders. (how many are beside now, how many are lost) of those known here."""
        moved = sum(self._went(raw, is_lost=False) for raw in _singles(message.addresses))
        return moved, sum(self._went(raw, is_lost=True) for raw in _singles(message.lost))

    def _went(self, raw: bytes, *, is_lost: bool) -> bool:
        found = self._owner.pop(raw, None)
        if found is None:
            return False
        pages, i = found
        pages.lent[i] = None
        pages.is_lost = pages.is_lost or is_lost
        return True


def _singles(raw: bytes) -> Iterable[bytes]:
    return (raw[i : i + ADDRESS_BYTES] for i in range(0, len(raw), ADDRESS_BYTES))
