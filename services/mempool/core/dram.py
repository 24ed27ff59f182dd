"""Host memory behind the spaces of engines: what they use no more is copied there before it is evicted. No I/O.

    engine unpins -> unpinned in its space --copy--> DRAM of the same content --full: LRU leaves--> dropped
                     Acquire <-- pulls.py copies it back; its page in DRAM stays, aged: leaving again costs no copy

The DRAM of a content is a space like the others: readers find it by themselves, and a successor adopts it. Each
engine's space has a Tiers of its own over it (tiers.py). No engine waits long for a page: no more bytes are on their
way out of a space than `out_in_flight_bytes`, beyond that blocks are evicted, and a copy ends by `out_timeout_ms`.
MemServe 4.2 (HBM and DRAM pools); what another space has as well leaves without a copy.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial

from services.mempool.core import actions, space
from services.mempool.core.actions import Action, PoolLimits
from services.mempool.core.own_pages import OwnPages
from services.mempool.core.pool import Pool
from services.mempool.core.tiers import CopyPages, CopyResult, TierAction, TierLimits, Tiers
from shared.ids import BlockHash, PageId, SpaceId
from shared.kv.layout import EngineDescription
from shared.wire import mempool as wire

MAX_PAGES_PER_COPY = 64


class Dram:
    """Of one mempool.

    Args:
        pools: of all spaces, a view.
        numbers: of copies, shared with whoever else orders some.
        touched: called with every pool that a later flush() must bring up to date.
        swapped: called with what Tiers of a space decided that is no copy (SwapDone).
    """

    def __init__(
        self,
        limits: PoolLimits,
        pools: Mapping[int, Pool],
        numbers: Iterator[int],
        touched: Callable[[Pool], None],
    ) -> None:
        self._limits = limits
        self._pools = pools
        self._numbers = numbers
        self._touched = touched
        self._now_ms = 0
        self.num_refused = 0
        self.tiers: dict[int, Tiers] = {}  # by number of the engines' space
        self.borrowed: Callable[[int], Sequence[int]] = (
            lambda _: ()
        )  # spaces of pages lent to one, to be filled now
        self.adrift: Callable[[], Set[BlockHash]] = (
            frozenset  # what leaves lent pages and is to be kept (swaps.py)
        )
        # whether pages lent to a space are for blocks that its requests read in host memory (far_moves.py)
        self.is_awaited: Callable[[int], bool] = lambda _: False
        self.swapped: Callable[[int, Sequence[TierAction]], None] | None = None
        self._copies: dict[int, tuple[int, int]] = {}  # copy -> (space, its number there)
        self._ended: Counter[str] = Counter()  # what Tiers of spaces that are over have counted
        self._out: list[Action] = []

    # -- making ---------------------------------------------------------------------------------------

    def wants(self, pool: Pool, description: EngineDescription) -> bool:
        """Whether this space is to have DRAM behind it that does not exist yet: blocks of its own may lie there."""
        memory = pool.memory
        if memory is None or memory.is_behind or not self._limits.dram_bytes or pool.number in self.tiers:
            return False
        if description.only_lends:
            return False
        on_gpus = memory.pages_per_slab > 0
        return (on_gpus or bool(memory.label and self._limits.dram_for_host)) and self._of(pool) is None

    def put_behind(
        self, pool: Pool, message: wire.Attach, new_pool: Callable[[], Pool], *, is_full: bool
    ) -> list[Action]:
        """An engine or rank has attached there: make DRAM, where it is to have some."""
        self.link()  # where it exists already
        if message.description is None or not self.wants(pool, message.description):
            return []
        planned = self.plan(pool, message.description)
        if not planned.num_pages or is_full:
            self.num_refused += 1
            return []
        made = new_pool()
        actions: list[Action] = [made.make_memory(message.description, planned, space.DRAM_LABEL)]
        self.link()
        return actions + made.flush()

    def wake(self, pool: Pool, now_ms: int) -> None:
        """The first has come to this space: DRAM that was dropped has its memory again, if nobody is in another's."""
        dram = self._of(pool)
        others = [front for front in self._fronts(dram) if front is not pool] if dram is not None else []
        if dram is None or dram.releases is None or any(o.has_workers or o.awaited() for o in others):
            return
        dram.releases.regain_all(now_ms)
        self._touched(dram)

    def plan(self, pool: Pool, description: EngineDescription) -> space.Plan:
        """For DRAM behind this space. Its pages are of the same size: they are copied as a whole."""
        assert pool.memory is not None
        num_ranks = description.num_ranks
        page_bytes = pool.memory.page_bytes
        return space.Plan(self._limits.dram_bytes // (page_bytes * num_ranks), page_bytes, num_ranks)

    def link(self) -> None:
        """Have every space use the DRAM of its content. Harmless when they do already."""
        for pool in self._pools.values():
            if pool.is_dram:
                pool.fronts = self._fronts(pool)
            dram = self._of(pool) if pool.memory is not None and pool.number not in self.tiers else None
            if dram is None or pool.memory is None or dram.memory is None or pool.memory.is_dram:
                continue
            self.tiers[pool.number] = Tiers(
                _own(pool), _own(dram), self._tier_limits(pool),
                partial(self._elsewhere, pool), partial(self._ask_unpin, pool), partial(self._borrowed, pool),
            )  # fmt: skip
            if not pool.memory.is_loan:
                pool.outlet = partial(self._make_room, pool)

    def behind(self, number: int) -> list[int]:
        """Spaces that take blocks of this one now: lent pages, then host memory."""
        dram = self._of(self._pools[number])
        return [*self.borrowed(number), *([dram.number] if dram is not None else [])]

    def landing(self, pool: Pool) -> Pool | None:
        """Where blocks of other hosts come, and from where they are read: this space, or the DRAM behind its GPUs, or
        behind a loan, which no path reads."""
        is_apart = pool.memory is not None and (pool.memory.pages_per_slab > 0 or pool.is_loan)
        return self._of(pool) if is_apart else pool

    def _of(self, pool: Pool) -> Pool | None:
        """The DRAM of a space's content, cut over as many ranks into pages of the same size."""
        memory = pool.memory
        if memory is None:
            return None
        for other in self._pools.values():
            found = other.memory
            if found is None or not found.is_dram or other is pool:
                continue
            if (found.content_key, found.page_bytes) == (memory.content_key, memory.page_bytes):
                return other
        return None

    def _fronts(self, dram: Pool) -> list[Pool]:
        """The spaces of engines that this is behind."""
        return [pool for pool in self._pools.values() if not pool.is_behind and self._of(pool) is dram]

    def _tier_limits(self, pool: Pool) -> TierLimits:
        """The share that engines do not get is filled up again ahead of them, when half of it is used."""
        memory = pool.memory
        assert memory is not None
        free = 0.0 if memory.is_loan else max(0.0, round(1.0 - self._limits.kept_share, 6))
        in_flight = max(1, self._limits.out_in_flight_bytes // memory.page_bytes)
        return TierLimits(
            begin_free_ratio=free / 2,
            end_free_ratio=free,
            max_pages_per_copy=min(MAX_PAGES_PER_COPY, in_flight),
            max_pages_in_flight=in_flight,
            ask_ms=self._limits.pull_patience_ms,
        )

    def _elsewhere(self, pool: Pool) -> Callable[[BlockHash], bool]:
        """Of blocks of this space, which may leave without a copy. Not what a swap keeps: it finds nothing in engines'
        spaces, where nobody pins it either."""
        others = [p.index.hashes for p in self._pools.values() if p is not pool and p.shares_content(pool)]
        kept = self.adrift() if pool.memory is not None and pool.memory.is_loan else frozenset()
        return lambda block_hash: block_hash not in kept and any(block_hash in hashes for hashes in others)

    def _borrowed(self, pool: Pool) -> Sequence[OwnPages]:
        """For what leaves by itself."""
        found = () if self.is_awaited(pool.number) else self.borrowed(pool.number)
        return [_own(self._pools[number]) for number in found]

    def _ask_unpin(self, pool: Pool, count: int) -> int:
        self._touched(pool)
        return pool.ask_unpin(count)

    def next_deadline_ms(self) -> int | None:
        """When a swap has waited long enough for engines."""
        due = [tiers.ticket_deadline_ms() for tiers in self.tiers.values()]
        return min((when for when in due if when is not None), default=None)

    # -- out ------------------------------------------------------------------------------------------

    def _make_room(self, pool: Pool, lacking: int) -> bool:
        """Attachments.outlet."""
        tiers = self.tiers[pool.number]
        evicted = tiers.counters["blocks_evicted"]
        is_free = tiers.leave(lacking, self._now_ms)
        pool.counters["pages_evicted"] += tiers.counters["blocks_evicted"] - evicted
        return is_free

    def drain(self, number: int, count: int, now_ms: int) -> None:
        """Have blocks of this space leave for host memory, as far as they can now. With the next advance()."""
        self.tiers[number].drain(count, now_ms)

    def num_leaving(self, number: int) -> int:
        """Pages of this space that are free when the copies of their blocks end."""
        return self.tiers[number].num_leaving

    def advance(self, now_ms: int) -> None:
        """After every event: what can leave, leaves."""
        self._now_ms = now_ms
        for number, tiers in self.tiers.items():
            freed = tiers.counters["blocks_freed"]
            self.perform(number, tiers.tick(now_ms))
            if tiers.counters["blocks_freed"] != freed:  # nothing is decided without a copy
                self._touch(number)

    def perform(self, number: int, decided: Sequence[TierAction]) -> None:
        """What Tiers of a space decided."""
        for action in decided:
            if isinstance(action, CopyPages):
                copy_id = next(self._numbers)
                self._copies[copy_id] = (number, action.copy_id)
                self._out.append(self._as_action(copy_id, action))
            elif self.swapped is not None:
                self.swapped(number, [action])
        if decided:
            self._touch(number)

    def _as_action(self, copy_id: int, action: CopyPages) -> actions.CopyPages:
        is_out = self._pools[action.target].is_behind
        timeout_ms = self._limits.out_timeout_ms if is_out else self._limits.copy_timeout_ms
        sources = [(int(action.source), page) for page in action.source_pages]
        return actions.CopyPages(copy_id, int(action.target), action.target_pages, sources, timeout_ms)

    def take_copies(self) -> list[Action]:
        """To perform behind the words of their pages."""
        out, self._out = self._out, []
        return out

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int], now_ms: int) -> bool:
        """False: not a copy of ours."""
        found = self._copies.pop(copy_id, None)
        if found is None:
            return False
        number, own_id = found
        result = CopyResult(failed=failed, quarantined=[PageId(page) for page in in_doubt])
        self.perform(number, self.tiers[number].on_copied(own_id, result, now_ms))
        self._touch(number)
        return True

    def on_settled(self, number: int, pages: Sequence[PageId], now_ms: int) -> list[PageId]:
        """Nothing can write these any more: the ones that are not ours."""
        rest = set(pages)
        for own, tiers in self.tiers.items():
            doubted = tiers.quarantined.get(SpaceId(number), set()) & rest
            if doubted:
                rest -= doubted
                self.perform(own, tiers.on_settled(SpaceId(number), doubted, now_ms))
                self._touch(own)
        return sorted(rest)

    def _touch(self, number: int) -> None:
        tiers = self.tiers[number]
        for each in (tiers.fast.space, tiers.slow.space):
            self._touched(self._pools[each])

    def counters(self) -> Counter[str]:
        """Of all spaces."""
        out = Counter({"dram_refused": self.num_refused} if self.num_refused else {})
        for counters in (self._ended, *(tiers.counters for tiers in self.tiers.values())):
            for name, count in counters.items():
                out[name if name.startswith("peer_") else f"dram_{name}"] += count
        return out

    # -- spaces that end (endings.py) -----------------------------------------------------------------

    def is_idle(self, number: int) -> bool:
        """Whether nothing of this space is on its way to host memory or back, or asked for, or in doubt."""
        tiers = self.tiers.get(number)
        is_copied = any(space == number for space, _ in self._copies.values())
        return not is_copied and (tiers is None or not (tiers.tickets or any(tiers.quarantined.values())))

    def may_forget(self, pool: Pool) -> bool:
        """Whether the order of ends allows it: host memory goes behind all that it is behind, and the last of these
        not as long as blocks are there, which nobody could ever use."""
        if pool.is_dram:
            return all(tiers.slow.space != pool.number for tiers in self.tiers.values())
        dram = self._of(pool)
        return dram is None or not len(dram.index) or len(self._fronts(dram)) > 1

    def forget(self, pool: Pool) -> None:
        """The space is over."""
        if (tiers := self.tiers.pop(pool.number, None)) is not None:
            self._ended.update(tiers.counters)
            if not pool.is_loan:
                self._pools[int(tiers.slow.space)].outlives(pool)


def _own(pool: Pool) -> OwnPages:
    assert pool.memory is not None
    return OwnPages(SpaceId(pool.number), pool.memory.table, pool.index, pool.note)
