"""Far places: copies of a running request's blocks, mapped by its engine's ranks, read in place. No I/O.

    FarOut -> pinned --copy--> lent pages first, host memory else: pinned there -> every rank maps -> FarPlaced
    lent pages are wanted back -> copied to host memory -> mapped at other places -> FarMoved -> the engine's FarDrop
    pages are lent again -> the same from host memory to them, a few at once (far_pace.py)
    FarDrop -> every rank unmaps -> no pin any more; what is there is a cached block like others

A mapped page is pinned from before its mapping to behind its acknowledged unmapping, or the proof that every process
of the engine is dead (architecture, rule 5). An engine that has not dropped a place by its lender's deadline is killed.
The page that a block has left is free as soon as nobody pins it, wherever in its prompt the block is: the oldest go
first, and an index that evicts from the end of a prompt would keep them until all behind them have gone, too.
Of pages that share a slab the ranks map the slab, which is a whole; it stays mapped as long as one of them is read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from services.mempool.core import parse
from services.mempool.core.actions import Action, CopyPages, MapFarPages, PoolLimits, Send
from services.mempool.core.engines import Engine
from services.mempool.core.far_moves import FarMoves
from services.mempool.core.far_state import Asked, FarCopy, Job, Place, PlaceState, User, Where, can_map
from services.mempool.core.loan_pool import LoanPool
from services.mempool.core.page_state import PageEvent
from services.mempool.core.pool import Pool
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, PageId
from shared.kv.words import u32_bytes, u32_list
from shared.wire.mempool_far import NO_PLACE, FarDrop, FarMapped, FarMoved, FarOut, FarPlaced, UnmapFar

MAX_JOBS = 256  # of one engine
MAX_PAGES_PER_COPY = 64  # as many descriptors go with one message
UNMAPPED_AT_ONCE = 32  # pages, of one message


class Far(FarMoves):
    """Of one mempool. Args: as of Swaps."""

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
        self.drain: Callable[[int, int, int], None] = lambda *_: None  # both of Dram
        self.num_leaving: Callable[[int], int] = lambda _: 0
        self._users: list[User] = []
        self._jobs: list[Job] = []
        self._copies: dict[int, FarCopy] = {}
        self._asked: dict[int, Asked] = {}
        self._asked_numbers = count(1)
        self._out: list[Action] = []

    # -- what engines and ranks say -------------------------------------------------------------------

    def on_message(self, pool: Pool, connection: int, message: FarOut | FarDrop | FarMapped) -> None:
        """Raises: PeerProtocolError from who has no say in it; nothing has changed."""
        memory = pool.memory
        if isinstance(message, FarMapped):
            if memory is None or connection not in memory.engines.ranks:
                raise PeerProtocolError("FarMapped from no rank")
            self._on_mapped(connection, message)
            return
        engine = memory.engines.attached.get(connection) if memory is not None else None
        if engine is None or not engine.works_in_pages:
            raise PeerProtocolError(f"{type(message).__name__} from who does not work in the pages")
        if isinstance(message, FarDrop):
            if len(message.places) % 4:
                raise PeerProtocolError("FarDrop is cut off")
            if (known := self._user_of(engine)) is not None:
                self._drop(known, u32_list(message.places))
            return
        self._begin(self._user(pool, engine), message)

    def _user_of(self, engine: Engine) -> User | None:
        return next((user for user in self._users if user.engine is engine), None)

    def _user(self, pool: Pool, engine: Engine) -> User:
        """Made when an engine first asks with all of its ranks there."""
        if (known := self._user_of(engine)) is not None:
            return known
        assert pool.memory is not None
        mine = {c: r for c, r in pool.memory.engines.ranks.items() if r.instance == engine.instance}
        is_whole = len(mine) == pool.memory.num_ranks
        num_places = min((r.far_places for r in mine.values()), default=0) if is_whole else 0
        made = User(engine, pool, {c: r.number for c, r in mine.items()}, list(range(num_places))[::-1])
        if is_whole:  # else this call alone finds no place
            self._users.append(made)
        return made

    def _begin(self, user: User, call: FarOut) -> None:
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        job = Job(user, call.number, hashes)
        self._jobs.append(job)
        if sum(each.user is user for each in self._jobs) > MAX_JOBS:
            self.counters["far_calls_refused"] += 1
            return
        if user.is_gone:
            return  # it lost a rank: nothing would be mapped, nor given back before its processes are dead
        here: list[tuple[int, int]] = []
        for position, block_hash in enumerate(hashes):
            if user.free and (kept := self._kept_at(user.pool, block_hash)) is not None:
                kept[0].index.pin([kept[1]])
                here.append((position, self._place(user, user.free.pop(), kept)))
            elif (entry := user.pool.index.get(block_hash)) is not None:
                user.pool.index.pin([entry])
                job.waiting.append((position, (user.pool, entry)))
        self._ask_to_map(job, here)

    def _place(self, user: User, number: int, where: Where) -> int:
        user.places[number] = Place(where, PlaceState.MAPPING)
        return number

    def _kept_at(self, pool: Pool, block_hash: BlockHash) -> Where | None:
        for number in self._behind(pool.number):
            place = self._pools[number]
            if can_map(pool, place) and (entry := place.index.get(block_hash)) is not None:
                return place, entry
        return None

    # -- copies ---------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take everything as far as it goes. Cost: nothing without far places in use."""
        for user in self._users:
            user.find_left()
            if user.left:
                self._free_left(user)
        for job in list(self._jobs):
            self._start(job)
            if not (job.waiting or job.num_under_way):
                self._jobs.remove(job)
                self._answer(job)

    def _free_left(self, user: User) -> None:
        """Own pages of blocks that are far, once nobody pins them."""
        pool = user.pool
        gone: list[BlockHash] = []
        for block_hash in list(user.left):
            entry = pool.index.get(block_hash)
            if entry is None or not entry.pins:
                user.left.discard(block_hash)
                gone += [block_hash] if entry is not None else []
        if gone:
            pool.delete(gone)
            self.counters["far_pages_freed"] += len(gone)
            self._touched(pool)

    def _start(self, job: Job) -> None:
        user = job.user
        while job.waiting and not user.is_gone:
            count = min(len(job.waiting), MAX_PAGES_PER_COPY, len(user.free))
            target, pages = self._room_for(user.pool, count, job)
            if not pages:
                self.counters["far_blocks_without_room"] += 0 if job.is_back else len(job.waiting)
                if count and not job.old:  # with no place free memory would not help
                    user.refused = len(job.waiting)
                break
            items = [job.waiting.popleft() for _ in pages]
            places = [user.free.pop() for _ in pages]
            number = next(self._numbers)
            self._copies[number] = FarCopy(job, target, items, pages, places)
            job.num_under_way += len(items)
            sources = [(place.number, entry.page) for _, (place, entry) in items]
            self._out.append(
                CopyPages(number, target.number, list(pages), sources, self._limits.copy_timeout_ms)
            )
            self._touched(target)
        for _, where in job.waiting:
            self._unpin(where)
        job.waiting.clear()

    def _room_for(self, pool: Pool, count: int, job: Job) -> tuple[Pool, list[PageId]]:
        """Lent pages that are free; else host memory, where nobody's pinned blocks make way; else lent pages, where
        such blocks make way too, and are lost: what did not find room would be computed again."""
        places = [self._pools[number] for number in self._behind(pool.number)] if count else []
        lent = [
            place
            for place in places
            if place.is_loan and can_map(pool, place) and (not job.old or job.is_back)
        ]
        for place in lent:
            if pages := place.claim_now(min(count, place.num_free)):
                return place, pages
        if job.is_back:
            return pool, []
        others = [place for place in places if not place.is_loan and can_map(pool, place)]
        for place in (*others, *lent):
            if pages := place.claim_now(count):
                return place, pages
        return pool, []

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int]) -> bool:
        """False: not a copy of ours. Pages `in_doubt` may still be written; Pool.settled follows."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return False
        job, target, user = copy.job, copy.target, copy.job.user
        assert target.memory is not None
        job.num_under_way -= len(copy.items)
        if failed:
            target.quarantine([page for page in copy.pages if page in in_doubt])
            for page in copy.pages:
                if page not in in_doubt:
                    target.memory.table.free(page, PageEvent.GIVE_BACK)
            user.free += copy.places
            self.counters["far_copies_failed"] += 1
        else:
            copied = [e.at(page) for (_, (_, e)), page in zip(copy.items, copy.pages, strict=True)]
            entries = target.take_in(copied)
            if not job.is_back:
                self.counters[f"far_blocks_out_{'peer' if target.is_loan else 'dram'}"] += len(entries)
            if not user.is_gone:  # else nobody maps it: cached blocks like others
                target.index.pin(entries)
                for number, entry in zip(copy.places, entries, strict=True):
                    self._place(user, number, (target, entry))
                positions = [position for position, _ in copy.items]
                self._ask_to_map(job, list(zip(positions, copy.places, strict=True)))
        for _, where in copy.items:
            self._unpin(where)
        self._touched(target)
        if user.is_gone:
            self.prune()
        return True

    # -- mappings -------------------------------------------------------------------------------------

    def _ask_to_map(self, job: Job, items: list[tuple[int, int]]) -> None:
        user = job.user
        if user.is_gone:
            return
        by_pool: dict[int, list[tuple[int, int]]] = {}
        for position, place in items:
            by_pool.setdefault(user.places[place].where[0].number, []).append((position, place))
        for number, mine in by_pool.items():
            pool = self._pools[number]
            space = pool.producer.number if isinstance(pool, LoanPool) else number
            for first in range(0, len(mine), MAX_PAGES_PER_COPY):
                part = mine[first : first + MAX_PAGES_PER_COPY]
                asked = next(self._asked_numbers)
                self._asked[asked] = Asked(user, job, part, set(user.ranks))
                job.num_under_way += len(part)
                places = [place for _, place in part]
                pages = [user.places[place].where[1].page for place in places]
                for connection, rank in user.ranks.items():
                    self._out.append(MapFarPages(connection, asked, places, space, rank, pages))

    def _on_mapped(self, connection: int, message: FarMapped) -> None:
        asked = self._asked.get(message.number)
        if asked is None or connection not in asked.ranks:
            self.counters["messages_stale"] += 1
            return
        asked.ranks.discard(connection)
        asked.is_ok &= message.is_ok
        if asked.ranks:
            return
        del self._asked[message.number]
        user, job = asked.user, asked.job
        if job is None:
            if not asked.is_ok:  # they stay mapped somewhere: only the engine's end frees them
                self.counters["far_unmaps_failed"] += len(asked.items)
                return
            for _, place in asked.items:
                self._unpin(user.places.pop(place).where)
                user.free.append(place)
            return
        job.num_under_way -= len(asked.items)
        if not asked.is_ok:
            self.counters["far_maps_failed"] += len(asked.items)
            self._ask_to_unmap(user, [place for _, place in asked.items])
            return
        # "mapped" when the engine is told: what it does not know it cannot drop
        job.found.update(asked.items)

    def _drop(self, user: User, places: Sequence[int]) -> None:
        mine = [
            p for p in dict.fromkeys(places) if (one := user.places.get(p)) is not None and one.is_readable
        ]
        self.counters["messages_stale"] += len(places) - len(mine)
        self._ask_to_unmap(user, mine)

    def _ask_to_unmap(self, user: User, places: list[int]) -> None:
        """In parts, so that the first pages are home while the last are unmapped: 0.4 ms each beside steps."""
        if user.is_gone:
            return
        for first in range(0, len(places), UNMAPPED_AT_ONCE):
            part = places[first : first + UNMAPPED_AT_ONCE]
            for place in part:
                user.places[place].state = PlaceState.UNMAPPING
            number = next(self._asked_numbers)
            self._asked[number] = Asked(user, None, [(0, place) for place in part], set(user.ranks))
            for connection in user.ranks:
                self._out.append(Send(connection, UnmapFar(number=number, places=u32_bytes(part))))

    def _answer(self, job: Job) -> None:
        user = job.user
        found = [job.found.get(position, NO_PLACE) for position in range(len(job.hashes))]
        connection = user.engine.connection
        self._touched(user.pool)
        if user.is_gone:  # its places may be forgotten; an engine that only lost a rank waits for the answer
            if not job.old and user.engine in self._attached(user):
                user.pool.say(
                    connection, FarPlaced(number=job.number, places=u32_bytes([NO_PLACE] * len(found)))
                )
            return
        if not job.old:
            self._told(user, found)
            in_peer = sum(n != NO_PLACE and user.places[n].where[0].is_loan for n in found)
            answer = FarPlaced(number=job.number, places=u32_bytes(found), blocks_peer=in_peer)
            user.left.update(h for h, n in zip(job.hashes, found, strict=True) if n != NO_PLACE)
            user.pool.say(connection, answer)
            return
        # what the engine has dropped meanwhile may be another block's place by now
        left = [(n, to) for (n, old), to in zip(job.old, found, strict=True) if user.places.get(n) is old]
        if job.is_back:  # what found no room stays where it is
            for n, to in left:
                if to == NO_PLACE and user.places[n].state is PlaceState.LEAVING:
                    user.places[n].state = PlaceState.MAPPED
            left = [(n, to) for n, to in left if to != NO_PLACE]
        kept = {to for _, to in left}
        self._told(user, kept)
        self._ask_to_unmap(user, [to for to in found if to != NO_PLACE and to not in kept])
        name = "far_blocks_back" if job.is_back else "far_blocks_moved"
        self.counters[name] += sum(to != NO_PLACE for to in kept)
        if left:
            moved = FarMoved(places=u32_bytes(n for n, _ in left), to=u32_bytes(to for _, to in left))
            user.pool.say(connection, moved)

    def _told(self, user: User, places: Iterable[int]) -> None:
        for place in places:
            if place != NO_PLACE:
                user.places[place].state = PlaceState.MAPPED

    # -- ends -------------------------------------------------------------------------------------------

    def forget(self, connection: int) -> None:
        """A connection ended, an engine's or a rank's. What its processes map stays until they are dead."""
        for user in self._users:
            if connection == user.engine.connection or connection in user.ranks:
                user.is_gone = True
        for number in [n for n, asked in self._asked.items() if asked.user.is_gone]:
            asked = self._asked.pop(number)
            if asked.job is not None:
                asked.job.num_under_way -= len(asked.items)
        self.prune()

    def prune(self) -> None:
        """Processes may have died."""
        for user in [user for user in self._users if user.is_gone and not self._alive(user)]:
            if any(copy.job.user is user for copy in self._copies.values()):
                continue  # what arrives is forgotten with it, a little later
            self._users.remove(user)
            for place in user.places.values():
                self._unpin(place.where)
            user.places.clear()

    def _alive(self, user: User) -> set[int]:
        """Processes of the engine that are not proven dead."""
        if user.engine in self._attached(user):
            return set(user.engine.ranks)
        assert user.pool.memory is not None
        engines = user.pool.memory.engines
        return next((set(lost.alive) for lost in engines.lost if lost.engine is user.engine), set())

    @staticmethod
    def _attached(user: User) -> Collection[Engine]:
        assert user.pool.memory is not None
        return user.pool.memory.engines.attached.values()

    def _unpin(self, where: Where) -> None:
        where[0].index.unpin([where[1]])
        self._touched(where[0])

    def take_actions(self) -> list[Action]:
        """To perform behind the words of the pages."""
        out, self._out = self._out, []
        return out

    @property
    def num_placed(self) -> int:
        """Pages that are mapped at far places, or about to be."""
        return sum(len(user.places) for user in self._users)
