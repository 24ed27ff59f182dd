"""The spaces of one mempool by their numbers, none of which is ever another space's. No I/O."""

from services.mempool.core.actions import PoolLimits
from services.mempool.core.leases import Fence
from services.mempool.core.pool import Pool
from shared.ids import Epoch

LAST_NUMBER = 0xFFFF  # addresses of the nine calls have no room for a larger one


class Pools(dict[int, Pool]):
    """By number, of spaces that are there. It begins with one, which has no memory yet.

    Addresses, messages of other hosts and answers of copies may name a space that has ended: so numbers only grow.
    """

    def __init__(self, limits: PoolLimits, boot_generation: Epoch, fence: Fence) -> None:
        super().__init__()
        self._limits, self._boot_generation, self._fence = limits, boot_generation, fence
        self._highest = -1
        self.make()

    def __setitem__(self, number: int, pool: Pool) -> None:
        super().__setitem__(number, pool)
        self._highest = max(self._highest, number)

    def make(self, number: int | None = None) -> Pool:
        """A space without memory. `number`: an earlier mempool's; None: a new one."""
        number = self.next_number if number is None else number
        pool = self[number] = Pool(self._limits, self._boot_generation, number, self._fence)
        return pool

    @property
    def next_number(self) -> int:
        """Of a space that is yet to come."""
        return self._highest + 1

    @property
    def is_used_up(self) -> bool:
        """Whether no number is left: this mempool makes no space any more."""
        return self.next_number > LAST_NUMBER

    @property
    def num_spaces(self) -> int:
        """With memory of their own, or to have some. Pages on loan are counted where they are."""
        return sum(not pool.is_loan for pool in self.values())

    @property
    def is_full(self) -> bool:
        """Whether there may be no further one."""
        return self.is_used_up or self.num_spaces >= self._limits.max_spaces
