"""What callers of the nine calls keep in pages that a peer lends them, and how it leaves in time. No I/O.

    alloc_mem("leased") -> a lent page and a page in DRAM beside it -> transfers fill and read the lent one
    the lender wants pages back -> copied to the pages beside them -> given back -> Evacuated to the caller

The mempool does all of it: the caller never maps a lent page, so that nothing depends on its being awake. Unlike cached
blocks, which are forgotten at a deadline, a caller's bytes wait for their copy: they are late by its time limit at
most, thrice. AQUA 6 ("Reclaiming AQUA TENSORS") has the consumer ask every few steps and copy by itself.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.mempool.core.actions import Action, ApiSend, CopyPages
from services.mempool.core.api import Api
from services.mempool.core.api_state import Holder, Home, Page
from services.mempool.core.loan_pool import LoanPool
from services.mempool.core.own_pages import OwnPages
from services.mempool.core.pool import Pool
from shared.errors import ClusterError, InvalidRequest
from shared.ids import SpaceId
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import PageAddress

MAX_TRIES = 3  # of a page's copy; then its bytes are lost, and the lender has its page
MAX_PAGES_PER_COPY = 64


class LentPages(OwnPages):
    """Of one lender, for callers of the consumer. `wanted`: how many are on their way back: then none is given out."""

    def __init__(self, pool: LoanPool, wanted: Callable[[int], int]) -> None:
        assert pool.memory is not None
        super().__init__(SpaceId(pool.number), pool.memory.table, pool.index, pool.note)
        self._wanted = wanted

    @property
    def num_free(self) -> int:
        """What take() should return now."""
        return 0 if self._wanted(int(self.space)) else super().num_free

    def evict(self) -> None:
        """Cached blocks stay: they are used, and there is DRAM."""


@dataclass(slots=True)
class _Kept:
    """A caller's lent page: the page in DRAM beside it is the caller's too."""

    holder: Holder
    home: Home
    address: PageAddress
    beside: PageAddress
    num_tries: int = 0

    @property
    def page(self) -> Page:
        return self.address.space, self.address.page

    @property
    def dram_page(self) -> Page:
        return self.beside.space, self.beside.page


class Leased:
    """Of one mempool's callers.

    Args:
        pools: of all spaces, a view.
        numbers: of copies, shared with whoever else orders some.
        wanted: how many pages of a space of lent pages are to leave it.
        touched: called with every pool that a later flush() must bring up to date.
    """

    def __init__(
        self,
        api: Api,
        pools: Mapping[int, Pool],
        numbers: Iterator[int],
        wanted: Callable[[int], int],
        touched: Callable[[Pool], None],
        timeout_ms: int,
    ) -> None:
        self._api, self._pools, self._numbers = api, pools, numbers
        self._wanted, self._touched, self._timeout_ms = wanted, touched, timeout_ms
        self._kept: dict[Page, _Kept] = {}
        self._copies: dict[int, list[_Kept]] = {}
        self._out: list[Action] = []
        api.beside = self._take_beside

    def find(self, home: Home, number: int) -> None:
        """What is lent to the space of this number."""
        lent = [p for p in self._pools.values() if isinstance(p, LoanPool) and p.consumer.number == number]
        if [pool.number for pool in lent] != [each.space for each in home.leased]:
            home.leased = [LentPages(pool, self._wanted) for pool in lent]

    def _take_beside(self, holder: Holder, home: Home, raw: bytes) -> bytes:
        """A page in DRAM for each lent one. Raises: OutOfPages, InvalidRequest; then the lent ones are given up."""
        taken = wire.unpack_addresses(raw)
        if not taken or taken[0].medium is not wire.Medium.LEASED:
            return b""
        try:
            if holder.is_mempool:
                raise InvalidRequest("lent pages are for callers of this mempool")
            found = self._api.allocate(holder, home, len(taken), "dram")
        except ClusterError:
            for address in taken:
                self._api.disown(holder, address.space, [address.page])
                self._api.give_up(address.space, [address.page])
            raise
        for address, beside in zip(taken, wire.unpack_addresses(found), strict=True):
            self._kept[address.space, address.page] = _Kept(holder, home, address, beside)
        return found

    def on_closed(self, holder: Holder) -> None:
        """A caller leaves: it maps no lent page, so these are free whatever its process does."""
        for kept in [k for k in self._kept.values() if k.holder is holder]:
            self._give_back(kept)

    def _give_back(self, kept: _Kept) -> None:
        del self._kept[kept.page]
        if kept.holder.owns(kept.address):
            self._api.disown(kept.holder, kept.address.space, [kept.address.page])
            self._api.give_up(kept.address.space, [kept.address.page])
            self._touched(self._pools[int(kept.address.space)])

    # -- on their way out -------------------------------------------------------------------------

    def advance(self) -> None:
        """Have leave what lenders want back. Cost: nothing while callers have no lent page."""
        if not self._kept:
            return
        for page in [page for page, kept in self._kept.items() if not kept.holder.owns(kept.address)]:
            del self._kept[page]  # the caller gave it back itself
        on_their_way = Counter(kept.address.space for batch in self._copies.values() for kept in batch)
        for number in {space for space, _ in self._kept}:
            wanted = self._wanted(int(number)) - on_their_way[number]
            if wanted > 0:
                self._leave(number, wanted)

    def _leave(self, number: SpaceId, wanted: int) -> None:
        """Up to `wanted` pages that no copy touches begin to leave, a batch for each DRAM."""
        batches: dict[SpaceId, list[_Kept]] = {}
        lost: list[_Kept] = []
        for kept in [kept for page, kept in self._kept.items() if page[0] == number]:
            if not wanted:
                break
            if self._is_busy(kept):
                continue
            wanted -= 1
            if kept.num_tries >= MAX_TRIES or not kept.holder.owns(kept.beside):
                lost.append(kept)
                continue
            batches.setdefault(kept.beside.space, []).append(kept)
        for batch in batches.values():
            for first in range(0, len(batch), MAX_PAGES_PER_COPY):
                self._copy(batch[first : first + MAX_PAGES_PER_COPY])
        self._tell(lost, is_lost=True)

    def _is_busy(self, kept: _Kept) -> bool:
        busy = self._api.moves.busy
        return busy.has(*kept.page) or busy.has(*kept.dram_page)

    def _copy(self, batch: list[_Kept]) -> None:
        space, targets = batch[0].beside.space, [kept.beside.page for kept in batch]
        self._api.allocator(space).begin(targets)
        for kept in batch:
            for number, page in (kept.page, kept.dram_page):
                self._api.moves.busy.touch(number, [page])
        self._touched(self._pools[int(space)])
        copy_id = next(self._numbers)
        self._copies[copy_id] = batch
        sources = [(int(kept.address.space), kept.address.page) for kept in batch]
        self._out.append(CopyPages(copy_id, int(space), targets, sources, self._timeout_ms))
        self._api.counters["pages_evacuating"] += len(batch)

    def has_copy(self, copy_id: int) -> bool:
        """Whether it is one of ours: no budget holds or refuses it, so what fails of them is a try."""
        return copy_id in self._copies

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int]) -> bool:
        """False: not a copy of ours. Pages in doubt stay busy until ApiSpaces.on_settled()."""
        batch = self._copies.pop(copy_id, None)
        if batch is None:
            return False
        if not failed and not in_doubt:
            self._tell([kept for kept in batch if self._kept.get(kept.page) is kept], is_lost=False)
        busy = self._api.moves.busy
        for kept in batch:
            kept.num_tries += 1
            busy.release(kept.address.space, [kept.address.page])
        for kept in batch:
            if kept.beside.page not in in_doubt:
                busy.release(kept.beside.space, [kept.beside.page])
        return True

    def _tell(self, gone: Sequence[_Kept], *, is_lost: bool) -> None:
        """Their pages go back; each caller hears of its own."""
        for holder in {id(kept.holder): kept.holder for kept in gone}.values():
            mine = [kept for kept in gone if kept.holder is holder and holder.owns(kept.address)]
            raw = b"".join(kept.address.to_bytes() for kept in mine)
            told = wire.Evacuated(addresses=b"" if is_lost else raw, lost=raw if is_lost else b"")
            if mine and self._api.holders.get(holder.connection) is holder:
                self._out.append(ApiSend(holder.connection, told))
        self._api.counters["pages_lost" if is_lost else "pages_evacuated"] += len(gone)
        for kept in gone:
            self._give_back(kept)

    def take_actions(self) -> list[Action]:
        """To perform behind the words of their pages."""
        out, self._out = self._out, []
        return out
