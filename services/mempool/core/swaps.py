"""Swap space of engines' parked requests: blocks that leave for lent pages or host memory, and come back. No I/O.

    SwapOut -> pinned where they are --copy--> lent pages first, host memory else: pinned there -> SwappedOut
    SwapIn, with as many pages of the engine's -> found in swap space, or still here --copy--> the engine's -> SwappedIn
    SwapDrop, the engine's end -> nothing is pinned any more; what is there is a cached block like others

Blocks are known by content, so a swap needs nothing that a successor of this mempool would not have: the engine asks
again, and gets what host memory still holds. What cannot be copied stays with the engine, what is lost comes back as
NO_PAGE: it computes that again. Blocks in lent pages that are wanted back lose their pin, so that they leave for host
memory as all others there do, and get it again as they arrive. Source: AQUA, section 7; copies as in tiers.py.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

from services.mempool.core import parse
from services.mempool.core.actions import Action, CopyPages, PoolLimits
from services.mempool.core.dram import Dram
from services.mempool.core.engines import Engine
from services.mempool.core.entry import Entry
from services.mempool.core.far import Far
from services.mempool.core.page_state import PageEvent
from services.mempool.core.pool import Pool
from services.mempool.core.swap_state import Copy, Job, Place, Swap
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, Epoch, PageId
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.mempool_far import FarDrop, FarMapped, FarOut
from shared.wire.mempool_swap import NO_PAGE, SwapCall, SwapDrop, SwapIn, SwapOut, SwappedIn, SwappedOut

MAX_SWAPS = 4_096  # of all engines: beyond it nothing is kept
MAX_PAGES_PER_COPY = 64


class Swaps:
    """Of one mempool.

    Args:
        pools: of all spaces, a view.
        behind: spaces in which blocks of one may be kept now, the best first.
        numbers: of copies, shared with whoever else orders some.
        touched: called with every pool that a later flush() must bring up to date.
    """

    def __init__(
        self,
        limits: PoolLimits,
        pools: Mapping[int, Pool],
        behind: Callable[[int], Sequence[int]],
        numbers: Iterator[int],
        touched: Callable[[Pool], None],
    ) -> None:
        self._limits, self._pools, self._behind = limits, pools, behind
        self._numbers, self._touched = numbers, touched
        self.counters: Counter[str] = Counter()
        self._swaps: dict[tuple[int, int], Swap] = {}  # by connection and number
        self._jobs: list[Job] = []
        self._copies: dict[int, Copy] = {}
        self._in_flight: Counter[tuple[int, bool]] = Counter()  # pages, by the engine's space and way
        self._out: list[Action] = []
        self.far = Far(limits, pools, behind, numbers, touched)

    def use(self, dram: Dram) -> None:
        """Host memory behind these spaces, which is told what must not be lost and what lent pages are for."""
        dram.adrift, dram.is_awaited = self.adrift, self.far.awaits_lent
        self.far.drain, self.far.num_leaving = dram.drain, dram.num_leaving

    # -- what engines say -----------------------------------------------------------------------------

    def on_message(self, pool: Pool, connection: int, message: SwapCall) -> None:
        """Raises: PeerProtocolError from anybody but an engine that works in the pages; nothing has changed."""
        if isinstance(message, FarOut | FarDrop | FarMapped):
            self.far.on_message(pool, connection, message)
            return
        engine = pool.memory.engines.attached.get(connection) if pool.memory is not None else None
        if engine is None or not engine.works_in_pages:
            raise PeerProtocolError(f"{type(message).__name__} from who does not work in the pages")
        match message:
            case SwapOut():
                self._begin_out(pool, engine, message)
            case SwapIn():
                self._begin_in(pool, engine, message)
            case SwapDrop():
                self._end(self._swaps.get((connection, message.swap)))

    def _begin_out(self, pool: Pool, engine: Engine, call: SwapOut) -> None:
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        key = (engine.connection, call.swap)
        swap = Swap(pool, engine.connection, call.swap)
        job = Job(swap, engine, hashes, is_in=False)
        self._jobs.append(job)
        if key in self._swaps or len(self._swaps) >= MAX_SWAPS:
            self.counters["swaps_refused"] += 1
            swap.is_over = True
            return
        self._swaps[key] = swap
        for position, block_hash in enumerate(dict.fromkeys(hashes)):  # named twice it is kept once
            if (place := self._kept_at(pool, block_hash)) is not None:
                self._keep(swap, block_hash, place)
            elif (entry := pool.index.get(block_hash)) is not None:
                pool.index.pin([entry])
                job.waiting.append((position, (pool, entry)))
        self.counters["swap_blocks_known"] += len(swap.kept)

    def _begin_in(self, pool: Pool, engine: Engine, call: SwapIn) -> None:
        memory = pool.memory
        assert memory is not None
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        pages = dict(parse.pages(call.pages, call.epochs, self._limits.max_blocks_per_call))
        given = [page for page, epoch in pages.items() if memory.engines.holds(engine, page, epoch)]
        self.counters["swap_pages_stale"] += len(pages) - len(given)
        swap = self._swaps.get((engine.connection, call.swap)) or Swap(pool, engine.connection, call.swap)
        job = Job(swap, engine, hashes, is_in=True, num_given=len(given))
        self._jobs.append(job)
        for page in given:  # they are its no more: whoever speaks of them under the old epoch is late
            memory.engines.takes_back(engine, page)
        for position, block_hash in enumerate(hashes):
            place = self._found(swap, block_hash)
            if place is None or len(job.waiting) + len(job.arrived) == len(given):
                continue
            if place[0] is pool and place[1].page not in engine.pinned:  # still where it was: no byte moves
                memory.engines.keep(engine, place[1])
                job.arrived[position] = place[1].page
                job.came["here"] += 1
                continue
            if (page := memory.table.grant_page()) is None:  # taken for the system meanwhile
                break
            place[0].index.pin([place[1]])
            job.waiting.append((position, place))
            job.pages.append(page)

    def _found(self, swap: Swap, block_hash: BlockHash) -> Place | None:
        """Still in the engine's space, or kept, or kept by chance."""
        here = swap.pool.index.get(block_hash)
        if here is not None:
            return swap.pool, here
        kept = swap.kept.get(block_hash)
        if kept is not None and kept[1].block_hash == block_hash:  # else it was condemned meanwhile
            return kept
        return self._kept_at(swap.pool, block_hash, any_state=True)

    def _kept_at(self, pool: Pool, block_hash: BlockHash, *, any_state: bool = False) -> Place | None:
        """Where outside its space a block is; in places that take blocks, or in `any_state`."""
        for number in self._behind(pool.number):
            if (entry := self._pools[number].index.get(block_hash)) is not None:
                return self._pools[number], entry
        if any_state:
            for other in self._pools.values():
                found = (
                    other.index.get(block_hash) if other.is_behind and other.shares_content(pool) else None
                )
                if found is not None:
                    return other, found
        return None

    def _keep(self, swap: Swap, block_hash: BlockHash, place: Place) -> None:
        place[0].index.pin([place[1]])
        swap.kept[block_hash] = place
        if place[0].is_loan:
            swap.loans.add(place[0].number)

    def _end(self, swap: Swap | None) -> None:
        if swap is None or swap.is_over:
            return
        swap.is_over = True
        del self._swaps[swap.connection, swap.number]
        back: dict[int, list[Entry]] = {}
        for block_hash, (place, entry) in swap.kept.items():
            place.index.unpin([entry])
            self._touched(place)
            if block_hash in swap.pool.index:
                back.setdefault(place.number, []).append(entry)
        for number, entries in back.items():
            self._pools[number].index.age(entries)  # the first to go: they leave again without a copy
        swap.kept.clear()
        swap.loans.clear()
        swap.adrift.clear()

    def forget(self, connection: int) -> None:
        """The engine's connection ended: nobody wants answers. What is on its way arrives and is nobody's."""
        for swap in [swap for swap in self._swaps.values() if swap.connection == connection]:
            self._end(swap)
        for job in [job for job in self._jobs if job.swap.connection == connection]:
            self._give_up(job)
            self._jobs.remove(job)
        self.far.forget(connection)

    def prune(self) -> None:
        """Engines may be gone whose connections still end."""
        for swap in [swap for swap in self._swaps.values() if not self._is_here(swap)]:
            self.forget(swap.connection)
        self.far.prune()

    def _is_here(self, swap: Swap) -> bool:
        memory = swap.pool.memory
        return memory is not None and swap.connection in memory.engines.attached

    def _give_up(self, job: Job) -> None:
        """What was not begun stays where it is."""
        for _, (place, entry) in job.waiting:
            place.index.unpin([entry])
        job.waiting.clear()
        pool = job.swap.pool
        assert pool.memory is not None
        for page in job.pages:
            pool.memory.table.free(page, PageEvent.GIVE_BACK)
        job.pages = []
        self._touched(pool)

    # -- every event ----------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Take everything as far as it goes. Cost: nothing without swaps."""
        self.far.advance()
        self.far.bring_back(now_ms, is_busy=bool(self._jobs))
        for swap in [swap for swap in self._swaps.values() if swap.adrift]:
            for block_hash in list(swap.adrift):
                if (there := self._kept_at(swap.pool, block_hash)) is not None:
                    swap.adrift.discard(block_hash)
                    self._keep(swap, block_hash, there)
        if not self._jobs:
            return
        for job in sorted(self._jobs, key=lambda job: not job.is_in):  # who waits for its turn comes first
            self._start(job)
        for job in [job for job in self._jobs if not (job.waiting or job.num_in_flight)]:
            self._jobs.remove(job)
            self._answer(job)

    def let_go(self, number: int, now_ms: int) -> None:
        """Lent pages of this space are wanted back: its blocks leave for host memory without a pin."""
        self.far.let_go(number, now_ms)
        for swap in [swap for swap in self._swaps.values() if number in swap.loans]:
            swap.loans.discard(number)
            for block_hash, (place, entry) in list(swap.kept.items()):
                if place.number == number:
                    place.index.unpin([entry])
                    del swap.kept[block_hash]
                    swap.adrift.add(block_hash)

    def adrift(self) -> Set[BlockHash]:
        """Blocks that are kept and have no pin just now: reclaims took it, they are on their way to host memory."""
        return {block_hash for swap in self._swaps.values() for block_hash in swap.adrift}

    def _start(self, job: Job) -> None:
        pool = job.swap.pool
        if job.swap.is_over and not job.is_in:
            self._give_up(job)
        way = (pool.number, job.is_in)
        while job.waiting:
            most = self._max_in_flight(pool)
            count = min(len(job.waiting), most, MAX_PAGES_PER_COPY)
            if count > most - self._in_flight[way]:
                return  # one whole copy when there is room for it, not a page or two each time that one ends
            target = pool
            if job.is_in:
                pages, job.pages = job.pages[:count], job.pages[count:]
                self._begin_writing(pool, pages)
            else:
                target, pages = self._room_for(pool, count)
            if not pages:
                self.counters["swap_blocks_without_room"] += len(job.waiting)
                self._give_up(job)
                return
            items = job.take(len(pages))
            number = next(self._numbers)
            self._copies[number] = Copy(job, target, items, pages)
            job.num_in_flight += len(items)
            self._in_flight[way] += len(items)
            sources = [(place.number, entry.page) for _, (place, entry) in items]
            timeout_ms = self._limits.copy_timeout_ms
            self._out.append(CopyPages(number, target.number, list(pages), sources, timeout_ms))
            self._touched(target)

    def _max_in_flight(self, pool: Pool) -> int:
        assert pool.memory is not None
        return max(1, self._limits.out_in_flight_bytes // pool.memory.page_bytes)

    def _room_for(self, pool: Pool, count: int) -> tuple[Pool, list[PageId]]:
        """Lent pages, else host memory, as many as there can be. Blocks that nobody pins make way, the coldest first:
        first those whose engine has them again (_end), then those of requests that ended, which are gone then. To
        copy them to host memory first would take both links' time from a request that waits for its turn.
        """
        for number in self._behind(pool.number):
            place = self._pools[number]
            evicted = place.counters["pages_evicted"]
            if pages := place.claim_now(count):
                kind = "peer" if place.is_loan else "dram"
                self.counters[f"swap_made_way_{kind}"] += place.counters["pages_evicted"] - evicted
                return place, pages
        return pool, []

    def _begin_writing(self, pool: Pool, pages: Sequence[PageId]) -> None:
        assert pool.memory is not None
        for page in pages:
            pool.memory.table.apply(page, PageEvent.WRITE)

    def has_copy(self, copy_id: int) -> bool:
        """Whether a request's turn waits for it."""
        return copy_id in self._copies

    def take_actions(self) -> list[Action]:
        """Copies, to perform behind the words of their pages."""
        out, self._out = self._out + self.far.take_actions(), []
        return out

    # -- answers --------------------------------------------------------------------------------------

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int]) -> bool:
        """False: not a copy of ours. Pages `in_doubt` may still be written; Pool.settled follows."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return self.far.on_copied(copy_id, failed=failed, in_doubt=in_doubt)
        job, target = copy.job, copy.target
        job.num_in_flight -= len(copy.items)
        self._in_flight[job.swap.pool.number, job.is_in] -= len(copy.items)
        if failed:
            assert target.memory is not None
            target.quarantine([page for page in copy.pages if page in in_doubt])
            for page in copy.pages:
                if page not in in_doubt:
                    target.memory.table.free(page, PageEvent.GIVE_BACK)
            self.counters["swap_copies_failed"] += 1
        elif job.is_in:
            self._arrive_in(copy)
        else:
            self._arrive_out(copy)
        for _, (place, entry) in copy.items:
            place.index.unpin([entry])
            self._touched(place)
        self._touched(target)
        return True

    def _arrive_out(self, copy: Copy) -> None:
        swap, target = copy.job.swap, copy.target
        entries = target.take_in(copy.entries())
        kind = "peer" if target.is_loan else "dram"
        self.counters[f"swap_blocks_out_{kind}"] += len(entries)
        copy.job.came["copied"] += len(entries)
        for entry in entries:
            if not swap.is_over:
                self._keep(swap, entry.block_hash, (target, entry))

    def _arrive_in(self, copy: Copy) -> None:
        job, pool = copy.job, copy.target
        assert pool.memory is not None
        engine = job.engine
        if not self._is_here(job.swap):
            pool.take_in(copy.entries())
            return
        for (position, (place, _)), entry in zip(copy.items, copy.entries(), strict=True):
            is_new = pool.index.insert(entry)  # else the page serves this engine alone
            pool.memory.table.apply(entry.page, PageEvent.SEAL)
            if is_new:
                pool.note(entry)
            pool.memory.engines.keep(engine, entry)
            job.arrived[position] = entry.page
            job.came["peer" if place.is_loan else "dram" if place.is_dram else "here"] += 1

    def _answer(self, job: Job) -> None:
        swap, pool = job.swap, job.swap.pool
        if not self._is_here(swap):
            self._end(self._swaps.get((swap.connection, swap.number)))
            return
        if not job.is_in:
            kept = bytes(block_hash in swap.kept for block_hash in job.hashes)
            in_peer = sum(place.is_loan for place, _ in swap.kept.values())
            answer = SwappedOut(
                swap=swap.number, kept=kept, blocks_copied=job.came["copied"], blocks_peer=in_peer
            )
            pool.say(swap.connection, answer)
            self._touched(pool)
            return
        assert pool.memory is not None
        pages = [job.arrived.get(position, NO_PAGE) for position in range(len(job.hashes))]
        epochs = pool.memory.table.epochs
        for kind in ("peer", "dram", "here"):
            self.counters[f"swap_blocks_in_{kind}"] += job.came[kind]
        self.counters["swap_blocks_lost"] += pages.count(NO_PAGE)
        pool.say(
            swap.connection,
            SwappedIn(
                swap=swap.number,
                pages=u32_bytes(pages),
                epochs=u64_bytes(Epoch(0) if page == NO_PAGE else epochs[page] for page in pages),
                blocks_peer=job.came["peer"],
                blocks_dram=job.came["dram"],
            ),
        )
        job.engine.demand += max(0, job.num_given - len(job.arrived))  # its share is filled up again
        self._end(self._swaps.get((swap.connection, swap.number)))
        self._touched(pool)

    @property
    def num_kept(self) -> int:
        """Blocks that are pinned for engines outside their spaces."""
        return sum(len(swap.kept) for swap in self._swaps.values())
