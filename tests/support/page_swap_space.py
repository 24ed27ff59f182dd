"""Host memory behind the pool of page_world.py, in which blocks of parked requests are kept: the decisions are the
mempool's own, copies end when the test lets them. Pages that another space lends may be there, too.
"""

from collections import defaultdict
from itertools import count

from services.mempool.core.actions import CopyPages, PoolLimits
from services.mempool.core.pool import Pool
from services.mempool.core.space import DRAM_LABEL, LOAN_LABEL, Plan
from services.mempool.core.swaps import Swaps
from shared.ids import Epoch
from shared.wire.mempool_swap import SwapCall
from tests.unit.mempool_harness import BLOCK_TOKENS, DESCRIPTION, PAGE_BYTES

OWN, DRAM, LENT = range(3)  # numbers of the spaces
GARBAGE = [b"garbage"] * BLOCK_TOKENS


class SwapSpace:
    """Args: slots: of the pool's pages, as World has them."""

    def __init__(self, pool: Pool, boot: Epoch, num_pages: int, slots: list[list[bytes | None]]) -> None:
        limits = PoolLimits(
            capacity_bytes=num_pages * PAGE_BYTES, idle_punch_ms=0, out_in_flight_bytes=4 * PAGE_BYTES
        )
        self._pool, self._num_pages = pool, num_pages
        self._dram, self._lent = Pool(limits, boot, DRAM), Pool(limits, boot, LENT)
        self.is_lent, self.now_ms = False, 0
        self._slots: dict[int, dict[int, list]] = defaultdict(dict)
        self._slots[0] = slots  # type: ignore[assignment]  # by page, as a dict would be asked
        self._pools = {OWN: pool, DRAM: self._dram, LENT: self._lent}
        self.swaps = Swaps(limits, self._pools, self._behind, count(1), lambda _: None)
        self.copies: list[CopyPages] = []
        self._in_doubt: list[tuple[int, list[int]]] = []

    def _behind(self, _: int) -> list[int]:
        return [LENT, DRAM] if self.is_lent else [DRAM]

    def inherit(self, dead: "SwapSpace") -> None:
        """Host memory as an earlier mempool left it; nothing there is pinned any more."""
        assert not dead.copies
        for connection in {swap.connection for swap in dead.swaps._swaps.values()}:
            dead.swaps.forget(connection)
        self._dram = self._pools[DRAM] = dead._dram
        self._slots[DRAM] = dead._slots[DRAM]

    def lend(self, num_pages: int) -> None:
        """Blocks may go to so many lent pages from now on, until want_back()."""
        if self._lent.memory is None:
            self._lent.make_memory(DESCRIPTION, Plan(num_pages, PAGE_BYTES, 1), LOAN_LABEL)
        self.is_lent = True

    def want_back(self, number: int = LENT) -> None:
        """What lies there shall leave."""
        self.is_lent &= number != LENT
        self.swaps.let_go(number, self.now_ms)

    def say(self, connection: int, message: SwapCall) -> None:
        """From an engine that is attached."""
        if self._dram.memory is None:
            self._dram.make_memory(DESCRIPTION, Plan(self._num_pages, PAGE_BYTES, 1), DRAM_LABEL)
        self.swaps.on_message(self._pool, connection, message)

    def advance(self) -> None:
        """After every event; the pool's actions are due then."""
        self.swaps.advance(self.now_ms)
        if self.swaps.far.num_placed and not self.is_lent:  # said at every event until all have left
            self.swaps.let_go(LENT, self.now_ms)
        self.copies += [each for each in self.swaps.take_actions() if isinstance(each, CopyPages)]
        self._dram.flush()
        if self._lent.memory is not None:
            self._lent.flush()

    def end_copy(self, pick: int = 0, *, failed: bool = False) -> bool:
        """One of those on their way; of a failed one the first page may still be written."""
        if not self.copies:
            return False
        copy = self.copies.pop(pick % len(self.copies))
        for (space, page), target in zip(copy.sources, copy.targets, strict=True):
            self._slots[copy.space][target] = list(GARBAGE if failed else self._slots[space][page])
        in_doubt = [int(page) for page in copy.targets[:1]] if failed else []
        if in_doubt:
            self._in_doubt.append((copy.space, in_doubt))
        self.swaps.on_copied(copy.copy_id, failed=failed, in_doubt=in_doubt)
        self.advance()
        return True

    def settle(self) -> None:
        """Nothing writes pages of failed copies any more."""
        for space, pages in self._in_doubt:
            for page in pages:
                self._slots[space][page] = list(GARBAGE)
            {OWN: self._pool, DRAM: self._dram, LENT: self._lent}[space].settled(pages)  # type: ignore[arg-type]
        self._in_doubt.clear()
