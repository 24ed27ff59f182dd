"""Engines and the pages granted to them: quotas, demand, quarantine. No I/O.

An engine's pages are *held* from grant to seal. They count against its quota, which is cut when the engines
together ask for more than the pool's granted share, so that sealed pages always have room. Of an engine that
works in the pages themselves, sealed pages stay *pinned*, and count, until it says that it uses them no more.

Several processes may compute for one engine (tensor-parallel ranks). Only the death of all of them proves that
nobody writes or reads its pages any more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.mempool.core.entry import Entry
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from shared.ids import Epoch, InstanceId, PageId
from shared.kv.page import STOCK_PART, PageState

CALLER = InstanceId("")  # instance of attachments that are no rank of an engine (callers.py)


@dataclass(slots=True, eq=False)
class Engine:
    """One attached engine process. `process` names the living process, over all its connections."""

    connection: int
    process: int
    instance: InstanceId
    instance_epoch: Epoch
    quota: int
    demand: int  # pages asked for and not granted yet
    held: set[PageId] = field(default_factory=set)
    stock: set[PageId] = field(default_factory=set)  # of these those that it has not begun to write
    asked: int = 0  # pages that it was asked to give back, and that it has not answered for
    says_answers: bool = False  # else of that nothing is known: it is of an earlier version
    works_in_pages: bool = False
    least: int = 0  # pages that its longest request takes
    owed: int = 0  # of its demand what it asked for or let go of: blocks are evicted for these
    # sealed pages in use; of a twin the entry is not in the index: the hash was known, the page serves this engine only
    pinned: dict[PageId, Entry] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)  # processes that compute for it, its own among them

    @property
    def num_pages(self) -> int:
        """What counts against its quota."""
        return len(self.held) + len(self.pinned)

    def __str__(self) -> str:
        return f"engine {self.instance}: {self.num_pages} of {self.quota} pages"


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that computes for an engine."""

    process: int
    instance: InstanceId
    number: int
    far_places: int = 0


@dataclass(slots=True)
class LostEngine:
    """A connection ended whose processes may still run."""

    engine: Engine
    alive: set[int]  # processes not proven dead


class Engines:
    """All attached engines of one pool, and the pages of lost ones.

    Args: index: of the pool's sealed pages.
    """

    def __init__(
        self,
        table: PageTable,
        granted_share: float,
        kept_share: float,
        index: Index,
        stock_share: float = 1 / STOCK_PART,
    ) -> None:
        self._table = table
        self._index = index
        self._granted_share, self._kept_share, self._stock_share = granted_share, kept_share, stock_share
        self.attached: dict[int, Engine] = {}
        self.lost: list[LostEngine] = []
        self.ranks: dict[int, Rank] = {}  # by connection
        self._computes = False

    @property
    def none_computes(self) -> bool:
        """Whether who has attached wants none of the pages for an engine, and nobody ever did."""
        return bool(self.attached) and not self._computes

    def attach(self, engine: Engine) -> None:
        """From now on pages may be granted to it."""
        engine.ranks |= {
            engine.process,
            *(r.process for r in self.ranks.values() if r.instance == engine.instance),
        }
        self.attached[engine.connection] = engine
        self._computes = self._computes or engine.quota > 0

    def attach_rank(
        self, connection: int, process: int, instance: InstanceId, number: int, far_places: int = 0
    ) -> None:
        """A process that computes for the engine of this instance, attached already or soon."""
        self.ranks[connection] = Rank(process, instance, number, far_places)
        for engine in self.of_instance(instance):
            engine.ranks.add(process)

    def of_instance(self, instance: InstanceId) -> list[Engine]:
        """Attached engines of one instance."""
        return [engine for engine in self.attached.values() if engine.instance == instance]

    def has_later(self, instance: InstanceId, epoch: Epoch) -> bool:
        """Whether an engine of this instance is attached that has a larger epoch than this; 0 is none."""
        return epoch > 0 and any(engine.instance_epoch > epoch for engine in self.of_instance(instance))

    def has_other(self, instance: InstanceId, process: int) -> bool:
        """Whether an engine or rank of this instance is attached that is another process."""
        members = (*self.attached.values(), *self.ranks.values())
        return any(each.instance == instance and each.process != process for each in members)

    def instance_of(self, connection: int) -> InstanceId | None:
        """Of an attached engine or rank."""
        engine, rank = self.attached.get(connection), self.ranks.get(connection)
        return engine.instance if engine is not None else rank.instance if rank is not None else None

    def knows(self, instance: InstanceId) -> bool:
        """Whether an engine or rank of this instance is attached."""
        ranks = any(rank.instance == instance for rank in self.ranks.values())
        return ranks or bool(self.of_instance(instance))

    def cap(self, engine: Engine) -> int:
        """Pages that it may have: its quota, or its even part of the share that such engines may have."""
        share = self._kept_share if engine.works_in_pages else self._granted_share
        most = max(1, int(self._table.num_present * share))
        return min(engine.quota, max(1, most // len(self.attached)))

    def num_pages_for(self, count: int) -> int:
        """How many pages a space needs, so that engines that work in them can have `count` of them."""
        return math.ceil(count / self._kept_share)

    def ask(self, engine: Engine, count: int) -> None:
        """NeedPages: more demand, never beyond the quota."""
        engine.demand = min(engine.demand + count, engine.quota)
        engine.owed = min(engine.owed + count, engine.demand)

    def holds(self, engine: Engine, page: int, epoch: int) -> bool:
        """Whether the engine speaks of a page that is its own, under the page's present epoch."""
        return page in engine.held and self._table.epochs[page] == epoch

    def serve(self, make_room: Callable[[], bool]) -> dict[int, list[tuple[PageId, Epoch]]]:
        """Grant pages to whoever asked, the engine with the fewest first, until none is left.

        Args: make_room: frees one page, or returns False.
        Returns: connection -> what it was granted.
        Cost: a step per page that room is made for, else a few per engine.
        """
        granted: dict[int, list[tuple[PageId, Epoch]]] = {}
        asking = [e for e in self.attached.values() if e.demand > 0]
        while asking := [e for e in asking if self._wanted(e)]:
            takers, most = asking, self._table.num_free
            if not most:
                takers = [engine for engine in asking if self._needed(engine)]
                if not takers or not make_room():
                    break
                most = min(1, self._table.num_free)  # what comes free may be another's: it was reserved
            for engine, count in self._shares(takers, most):
                pages, epochs = self._table.grant_many(count)
                engine.held.update(pages)
                engine.stock.update(pages)
                engine.demand -= count
                engine.owed = max(0, engine.owed - count)
                granted.setdefault(engine.connection, []).extend(zip(pages, epochs, strict=True))
        return granted

    def _shares(self, takers: Sequence[Engine], most: int) -> list[tuple[Engine, int]]:
        """Of `most` free pages, what brings those with the fewest up to the next, or to what one of them wants."""
        least = min(engine.num_pages for engine in takers)
        poorest = [engine for engine in takers if engine.num_pages == least][:most]
        if not poorest:
            return []
        steps = [e.num_pages - least for e in takers if e.num_pages > least]
        count = min(most // len(poorest), *map(self._wanted, poorest), *steps)
        return [(engine, count) for engine in poorest]

    def _wanted(self, engine: Engine) -> int:
        """Pages that it gets as far as there are free ones. Never negative."""
        return max(0, min(engine.demand, self.cap(engine) - engine.num_pages))

    def _needed(self, engine: Engine) -> int:
        """Pages of these for which blocks are evicted: those that its stock lacks, and those in place of blocks that it
        let go of, as many as it counts with. Never negative.

        Beyond that it gets what is free: else an engine that starts beside blocks that another one left would evict
        them for a stock most of which is empty, and one that gave of its own what it was asked for.
        """
        if not engine.works_in_pages:
            return self._wanted(engine)
        return min(self._wanted(engine), max(0, engine.owed, self._ample(engine) - len(engine.stock)))

    def _ample(self, engine: Engine) -> int:
        """A stock of so many pages is enough for it: it lets go of cached blocks for its next steps where it has less
        than a quarter, or than a request takes (PageScheduler)."""
        return int(self._table.num_present * self._stock_share) + engine.least

    def surplus(self, engine: Engine) -> int:
        """Pages that it has in stock beyond that."""
        return max(0, len(engine.stock) - self._ample(engine)) if engine.works_in_pages else 0

    def num_lacking(self) -> int:
        """Pages that serve() would evict blocks for, and grant."""
        return sum(map(self._needed, self.attached.values()))

    def beside_starving(self) -> list[Engine]:
        """Engines of a space in which another one has not the pages in stock that its longest request takes, and may
        have more.
        """
        starving = [
            engine
            for engine in self.attached.values()
            if self._needed(engine) and len(engine.stock) < max(1, engine.least)
        ]
        return [e for e in self.attached.values() if any(other is not e for other in starving)]

    def excess(self) -> list[tuple[Engine, int]]:
        """Engines that have pages beyond their cap, and how many that they were not asked for."""
        over = [
            (engine, engine.num_pages - self.cap(engine) - engine.asked) for engine in self.attached.values()
        ]
        return [(engine, count) for engine, count in over if count > 0]

    def answers(self, engine: Engine, count: int) -> None:
        """The engine has dealt with so many of the pages that it was asked for, whether it gave them or not."""
        engine.asked -= min(max(0, count), engine.asked)

    def writes(self, engine: Engine, pages: Sequence[PageId]) -> list[PageId]:
        """The engine begins to write these pages of its own: those of them that it did not write before."""
        states = self._table.states
        begun = [page for page in pages if page in engine.stock]
        engine.stock.difference_update(begun)
        # of an earlier mempool's pages also the unwritten ones are said to be written
        self._table.apply_all([page for page in begun if states[page] == PageState.GRANTED], PageEvent.WRITE)
        return begun

    def completes(self, engine: Engine, page: PageId) -> None:
        """The engine has written all of this page of its own, which is held no more."""
        if self._table.states[page] == PageState.GRANTED:  # without a word of it: it wrote nonetheless
            self._table.apply(page, PageEvent.WRITE)
        engine.held.remove(page)
        engine.stock.discard(page)

    def takes_back(self, engine: Engine, page: PageId) -> None:
        """The page is the engine's no more, and free."""
        engine.held.remove(page)
        engine.stock.discard(page)
        self._table.free(page, PageEvent.GIVE_BACK)

    def keep(self, engine: Engine, entry: Entry) -> None:
        """The engine uses this sealed page. An entry that is not indexed is a twin: another page of its block is."""
        engine.pinned[entry.page] = entry
        if entry.branch is None:
            self._index.twins.add(entry, engine.pinned, self._index.get(entry.block_hash))
        else:
            self._index.pin([entry])

    def unpin_all(self, engine: Engine, pages: Sequence[PageId]) -> None:
        """The engine uses these sealed pages no more. Unindexed ones are free."""
        entries = [engine.pinned.pop(page) for page in pages]
        for page, entry in zip(pages, entries, strict=True):
            if entry.branch is None:
                self._end_pin(page, entry)
        self._index.unpin(entry for entry in entries if entry.branch is not None)
        engine.demand += len(pages)
        engine.owed += len(pages)

    def give_back_all(self, engine: Engine, pages: Sequence[PageId]) -> None:
        """The engine has not written these pages of its own, or writes them no more."""
        engine.held.difference_update(pages)
        engine.stock.difference_update(pages)
        states = self._table.states
        for state in set(map(states.__getitem__, pages)):
            self._table.free_all([page for page in pages if states[page] == state], PageEvent.GIVE_BACK)
        if engine.works_in_pages:  # its share is filled up without asking, from what is free
            engine.demand += len(pages)

    def lose(self, connection: int) -> Engine | None:
        """The connection ended, the processes perhaps not: its pages wait for proof of their death."""
        self.ranks.pop(connection, None)
        engine = self.attached.pop(connection, None)
        if engine is None:
            return None
        for page in sorted(engine.held):
            self._table.apply(page, PageEvent.HOLDER_LOST)
        self.lost.append(LostEngine(engine, set(engine.ranks)))
        return engine

    def lives_on(self, instance: InstanceId, process: int | None = None) -> bool:
        """Whether an engine of this instance (and process) is attached, or lost and perhaps still running."""
        return any(process in (None, engine.process) for engine in self._not_gone(instance))

    def process_of(self, instance: InstanceId) -> int:
        """Of its engine, if none is attached of a lost one; 0: there is none, or it is not known which of several."""
        found = self.of_instance(instance) or self._not_gone(instance)
        return found[0].process if len(found) == 1 else 0

    def _not_gone(self, instance: InstanceId) -> list[Engine]:
        return [*(x.engine for x in self.lost if x.engine.instance == instance), *self.of_instance(instance)]

    def bury(self, process: int) -> list[Engine]:
        """The process is proven dead. Pages that nobody alive can touch any more are free: of which lost engines."""
        self.ranks = {c: rank for c, rank in self.ranks.items() if rank.process != process}
        for engine in self.attached.values():
            engine.ranks.discard(process)
        for lost in self.lost:
            lost.alive.discard(process)
        return self._recover([x for x in self.lost if not x.alive], PageEvent.HOLDER_DEAD)

    def let_go(self, process: int, instance: InstanceId) -> list[Engine]:
        """The process says that it touches none of the pages that it lost as this instance. As which engines."""
        mine = [x for x in self.lost if x.alive == {process} and x.engine.instance == instance]
        return self._recover(mine, PageEvent.ACKNOWLEDGED)

    def _recover(self, gone: list[LostEngine], event: PageEvent) -> list[Engine]:
        for lost in gone:
            self.lost.remove(lost)
            for page in sorted(lost.engine.held):
                self._table.free(page, event)
            for page, entry in lost.engine.pinned.items():
                self._end_pin(page, entry)
        return [lost.engine for lost in gone]

    def _end_pin(self, page: PageId, entry: Entry) -> None:
        if entry.branch is None:
            self._index.twins.end(entry)
            self._table.free(page, PageEvent.RETIRE)
        else:
            self._index.unpin([entry])
