"""One copy of blocks into a reader's space, and who waits for it. No I/O. Decided in pulls.py."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from services.mempool.core import parse
from services.mempool.core.actions import Action, CopyPages, LayerCut
from services.mempool.core.claims import SPARE_PART, Claim
from services.mempool.core.entry import Entry
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, HandoffId, InstanceId
from shared.wire.mempool import Acquire

ASK_AGAIN_MS = 50  # engines, for pages that a copy lacks, and blocks are evicted for it
TAPER = 4  # portions' bytes: a larger copy whose pages are all here goes in several, so that its end is short
LARGEST = 4  # portions' bytes that go in one CopyPages: what came is indexed while the rest is on its way
SPARE_WITHIN_MS = 100  # for an engine to give pages back for such blocks: several of its steps


@dataclass(frozen=True, slots=True)
class Reader:
    """An Acquire that is answered once what it misses has come, or its time is over."""

    connection: int
    instance: InstanceId
    call: Acquire
    hashes: list[BlockHash]
    until_ms: int
    came: Counter[str] = field(
        default_factory=Counter, compare=False
    )  # blocks brought for it, by tier; see readers.py


def take_late(pool: Pool, now_ms: int) -> list[Reader]:
    """Calls that have waited there long enough for their hand-off, the caller's to answer."""
    most = pool.limits.max_blocks_per_call
    return [
        Reader(late.connection, late.instance, late.call, parse.hashes(late.call.hashes, most), now_ms)
        for late in pool.readers.take_late(now_ms)
    ]


@dataclass(slots=True)
class Pull:
    """One copy on its way into `pool`, or what is left of it behind its portions (pulls.py)."""

    number: int
    pool: Pool
    own: list[Entry]  # pinned in `pool`
    sources: list[tuple[Pool, Entry]]  # pinned there
    claim: Claim
    until_ms: int  # for pages to copy into
    readers: list[Reader] = field(default_factory=list)
    copying: bool = False
    is_push: bool = False  # nobody asked for it: what D completed (pd_caching.py), or layers (layered.py)
    is_counted: bool = True  # of pushes: by pd_caching.py
    is_ahead: bool = False  # of pushes: it is for a hand-off, and begins soon or never
    handoff_id: HandoffId | None = None  # of pushes: whose reader will want what they bring
    ask_ms: int | None = None  # when engines are asked for pages again; None: they are not
    short_ms: int | None = None  # from then on it is content with the pages that it has; None: all or nothing
    hashes: list[BlockHash] = field(default_factory=list)  # of the blocks that it brings
    traces: Mapping[BlockHash, str] = field(
        default_factory=dict
    )  # of returns: in whose trace each block is seen
    came: Counter[str] = field(default_factory=Counter)  # blocks, by tier: the readers are told at the end
    of: "Pull | None" = None  # this is a portion of that one, which has the readers
    begun: int = 0  # its first copy, a portion's perhaps; 0: none yet
    begun_from: set[int] = field(default_factory=set)  # spaces that this one reads
    num_portions: int = 0  # under way
    is_over: bool = False  # but for its portions

    @property
    def goes_back(self) -> bool:
        """It is a push of pd_caching.py."""
        return self.is_push and self.is_counted

    def take_late(self, now_ms: int) -> list[Reader]:
        """Readers who joined with less time than it has, which is over. Who has as much, or more, hears at its end."""
        late: list[Reader] = []
        others: list[Reader] = []
        for reader in self.readers:
            is_late = reader.until_ms <= now_ms and reader.until_ms < self.until_ms
            (late if is_late else others).append(reader)
        self.readers = others
        return late

    def num_ready(self, portion_bytes: int) -> int:
        """How many of its first blocks are to go now, as a portion; never all that are left."""
        memory = self.pool.memory
        if self.is_push or self.copying or memory is None:
            return 0
        have = len(self.claim.pages)
        portions = have * memory.page_bytes * memory.num_ranks // max(1, portion_bytes)
        least, most = (1, have) if self.claim.lacking else (TAPER, have * 3 // 4)
        return min(most, max(1, have * LARGEST // portions)) if portions >= least else 0

    def due_ms(self) -> int:
        """When there is something to do about it without an event, while it waits for pages."""
        due = [self.until_ms, *(reader.until_ms for reader in self.readers)]
        if self.ask_ms is not None:
            due.append(self.ask_ms)
        if self.short_ms is not None and (self.claim.pages or self.begun):
            due.append(self.short_ms)
        return min(due)


class Layered(Protocol):
    """LayerPulls of layered.py, which knows this module."""

    def has(self, pull: Pull) -> bool: ...

    def advance(self, now_ms: int) -> None: ...

    def take_actions(self) -> list[Action]: ...

    def next_deadline_ms(self) -> int | None: ...

    def start(self, pull: Pull, now_ms: int) -> CopyPages: ...

    def on_copied(self, pull: Pull, now_ms: int) -> None: ...

    def ended(self, pull: Pull) -> None: ...

    def forget(self, connection: int, now_ms: int) -> None: ...

    def hold(
        self, handoff_id: HandoffId, pool: Pool, entries: Sequence[Entry], now_ms: int,
        *, came_for: Sequence[Reader] | None = None,
    ) -> None: ...  # fmt: skip

    def num_came(self, handoff_id: HandoffId) -> int: ...

    def let_go(self, handoff_id: HandoffId) -> None: ...

    def make_way(self, pool: Pool, reader: Reader, wanted: int, now_ms: int) -> None: ...


def room_for_returns(target: Pool, pulls: Iterable[Pull]) -> int:
    """How many blocks may go back to the prefill end's space now: into pages that are free or that nobody pins, or into
    a part of the spare ones, which engines have in stock (decision 0054). Args: pulls: all that are under way."""
    on_way = sum(pull.claim.lacking for pull in pulls if pull.is_push and pull.pool is target)
    return max(0, max(target.num_at_hand, target.num_spare // SPARE_PART) - on_way)


def by_pool(sources: Sequence[tuple[Pool, Entry]]) -> list[tuple[Pool, list[Entry]]]:
    """Stretches of one pool each, in order: what is asked of pools is asked a few times and not for each block.

    Cost: 0.05 us a block where all are of one pool, else three times that.
    """
    if not sources:
        return []
    pools, entries = zip(*sources, strict=True)
    if pools.count(pools[0]) == len(pools):
        return [(pools[0], list(entries))]
    return [(pool, [entry for _, entry in part]) for pool, part in groupby(sources, key=itemgetter(0))]


def cut_of(target: Pool, sources: Sequence[Pool]) -> LayerCut | None:
    """How blocks of these spaces go to `target` layer by layer; None where pages are not alike, or no layers apart."""
    memory = target.memory
    if memory is None or not memory.layer_bytes:
        return None
    keys = {source.memory.content_key for source in sources if source.memory is not None}
    return LayerCut(memory.num_layers, memory.layer_bytes) if keys == {memory.content_key} else None
