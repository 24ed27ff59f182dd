"""Which spaces copies use, the ended ones too of which something may still run. No I/O.

    copy() -(begin)-> in use -(end, no pages in doubt)-> over
                             -(end)-> in doubt -(its job has ended, and every page has settled)-> over

What may still write a target page reads a source page meanwhile: both spaces stay mapped until it is over.
"""

from collections.abc import Callable, Iterable, Mapping

from services.mempool.mover_copies import Copy, Space


class Uses:
    """Of one mover.

    Args: on_over: told each space of a copy that is over, by number.
    """

    def __init__(self, spaces: Mapping[int, Space], on_over: Callable[[int], None]) -> None:
        self._spaces = spaces
        self._on_over = on_over
        self._doubtful: set[Copy] = set()

    def begin(self, copy: Copy) -> None:
        """Its spaces are there."""
        for number in copy.spaces:
            self._spaces[number].num_copies += 1

    def end(self, copy: Copy) -> None:
        """It is answered."""
        if copy.in_doubt:
            self._doubtful.add(copy)
        else:
            self._over(copy)

    def settle(self, target: int, rank: int, pages: Iterable[int]) -> None:
        """Nothing writes to these pages of one rank any more."""
        settled = {(rank, page) for page in pages}
        for copy in [copy for copy in self._doubtful if copy.target == target]:
            copy.in_doubt -= settled
            if not copy.in_doubt and (copy.job is None or copy.job.ended):
                self._doubtful.discard(copy)
                self._over(copy)

    def in_doubt(self, number: int) -> bool:
        """Whether a copy that has ended may still read or write this space."""
        return any(number in copy.spaces for copy in self._doubtful)

    def _over(self, copy: Copy) -> None:
        for number in copy.spaces:
            self._spaces[number].num_copies -= 1
        for number in copy.spaces:
            self._on_over(number)
