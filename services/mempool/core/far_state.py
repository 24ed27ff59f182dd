"""What far.py keeps of an engine with far places, of its calls, and of what its ranks were asked. No I/O."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from services.mempool.core.engines import Engine, Engines
from services.mempool.core.entry import Entry
from services.mempool.core.far_pace import Pace
from services.mempool.core.loan_pool import LoanPool
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, PageId

Where = tuple[Pool, Entry]


class PlaceState(StrEnum):
    """Of a place that is not free."""

    MAPPING = "mapping"  # its ranks were asked, or the engine is not told yet
    MAPPED = "mapped"  # the engine was told, and may read there
    LEAVING = "leaving"  # as mapped, but the page is wanted back
    UNMAPPING = "unmapping"  # the engine reads there no more; its ranks were asked


@dataclass(slots=True)
class Place:
    """`where`: the page that is mapped, pinned there."""

    where: Where
    state: PlaceState

    @property
    def is_readable(self) -> bool:
        """Whether the engine may read there."""
        return self.state in (PlaceState.MAPPED, PlaceState.LEAVING)


@dataclass(slots=True, eq=False)
class User:
    """An engine, the living connections of its ranks, and its places."""

    engine: Engine
    pool: Pool
    ranks: dict[int, int]  # connection -> rank
    free: list[int]
    places: dict[int, Place] = field(default_factory=dict)
    left: set[BlockHash] = field(default_factory=set)  # far since, perhaps still pinned in the engine's space
    is_gone: bool = False  # its connection ended: nobody hears answers, and its processes may still read
    is_killed: bool = False
    awaits_lent: bool = False  # it reads blocks in host memory that are to go back to lent pages
    refused: int = 0  # blocks for which there was no room, said once to whoever borrows for it
    pace: Pace = field(default_factory=Pace)

    def find_left(self) -> None:
        """Blocks that are far, and were computed here again for another request, are `left` where pages are wanted: no
        eviction reaches them under pinned ones.

        Cost: a look at every place, where an engine lacks pages beside blocks that nobody pins; else none.
        """
        memory, index = self.pool.memory, self.pool.index
        if not self.places or memory is None or memory.table.num_free or len(index) == index.num_pinned:
            return
        if not index.can_evict and memory.engines.num_lacking():
            known = [index.get(place.where[1].block_hash) for place in self.places.values()]
            self.left.update(entry.block_hash for entry in known if entry is not None and not entry.pins)


@dataclass(slots=True, eq=False)
class Job:
    """A FarOut, or places whose blocks move, until it is answered. Lists are by position."""

    user: User
    number: int
    hashes: list[BlockHash]
    old: list[tuple[int, Place]] = field(default_factory=list)  # whose blocks move
    is_back: bool = False  # from host memory to lent pages; else these are wanted back
    waiting: deque[tuple[int, Where]] = field(default_factory=deque)  # to be copied; pinned there
    num_under_way: int = 0
    found: dict[int, int] = field(default_factory=dict)  # position -> place


@dataclass(frozen=True, slots=True)
class FarCopy:
    """`items` as in Job.waiting; `places`: kept free for what arrives."""

    job: Job
    target: Pool
    items: list[tuple[int, Where]]
    pages: list[PageId]
    places: list[int]


@dataclass(slots=True, eq=False)
class Asked:
    """Of a user's ranks: to map (with a job) or unmap these. `items`: (position in the job, place)."""

    user: User
    job: Job | None
    items: list[tuple[int, int]]
    ranks: set[int]  # connections that have not answered
    is_ok: bool = True


class FarNeed(NamedTuple):
    """What running requests of one space would have of lent pages.

    Args:
        short: blocks that are read in host memory, or found no room even there, beyond what lent pages are free.
        is_stuck: some of them found no room: their request waits, and is computed again in the end.
    """

    short: int = 0
    is_stuck: bool = False


def least_pages(engine: Engine, engines: Engines) -> int:
    """Own pages that it keeps for its longest request. One that is longer than all of them is read elsewhere for the
    most part, whatever is lent: half of them take the largest step that such an engine makes (far_scheduler.py).
    """
    is_far = any(rank.far_places and rank.instance == engine.instance for rank in engines.ranks.values())
    return min(engine.least, engine.quota // 2) if is_far and engine.least > engine.quota else engine.least


def can_map(pool: Pool, place: Pool) -> bool:
    """Whether ranks of `pool` can map pages of `place`: whole ones, each in one allocation, perhaps with others."""
    mine, other = pool.memory, place.memory
    if mine is None or other is None:
        return False
    source = place.producer.memory if isinstance(place, LoanPool) else other
    if source is None or not source.pages_per_slab:  # in host memory, at any offset
        return source is not None
    is_whole = source.num_slabs * source.pages_per_slab == source.table.num_pages
    return mine.pages_per_slab > 0 and is_whole and source.page_bytes == mine.page_bytes
