"""Which target pages belong to a copy, whole pages over all ranks. No I/O.

    free -(claim)-> in a copy -(release)-> free
                              -(hold, then release)-> held -(settle on every rank)-> free

The transfer library keeps the same book rank by rank; this one is needed because a copy that gets one rank of a page
and is refused the other would have spoiled the page of the copy that has it.
"""

from collections.abc import Collection, Iterable

from shared.transfer.errors import TransferRefused


class Targets:
    """Of one mover."""

    def __init__(self) -> None:
        self._claimed: dict[int, set[int]] = {}  # by space
        self._held: dict[tuple[int, int], set[int]] = {}  # (space, page) -> ranks that may still be written

    def claim(self, space: int, pages: Collection[int]) -> None:
        """For one copy. Raises: TransferRefused when a page is there twice, in a copy, or held."""
        wanted = set(pages)
        claimed = self._claimed.setdefault(space, set())
        if len(wanted) < len(pages):
            raise TransferRefused(f"{len(pages)} target pages, {len(wanted)} different ones")
        if not claimed.isdisjoint(wanted):
            raise TransferRefused(
                f"target pages {sorted(claimed & wanted)[:4]} of space {space} are in a copy"
            )
        if self._held and (held := [page for page in wanted if (space, page) in self._held]):
            raise TransferRefused(
                f"target pages {sorted(held)[:4]} of space {space} are quarantined: a failed copy may write them"
            )
        claimed |= wanted

    def release(self, space: int, pages: Iterable[int]) -> None:
        """The copy has ended; pages that are held stay held."""
        self._claimed[space].difference_update(pages)

    def hold(self, space: int, rank: int, pages: Iterable[int]) -> None:
        """The copy failed, and something may still write there."""
        for page in pages:
            self._held.setdefault((space, page), set()).add(rank)

    def settle(self, space: int, rank: int, pages: Iterable[int]) -> tuple[int, ...]:
        """Nothing writes to these any more on this rank; those that are free now on every rank."""
        free: list[int] = []
        for page in pages:
            ranks = self._held.get((space, page))
            if ranks is None:
                continue
            ranks.discard(rank)
            if not ranks:
                del self._held[space, page]
                free.append(page)
        return tuple(free)

    def has_held(self, space: int) -> bool:
        """Whether pages of this space are held."""
        return any(number == space for number, _ in self._held)

    @property
    def num_held(self) -> int:
        """Pages of all spaces."""
        return len(self._held)
