"""Which memory of a space can be done without: what is free, else what was used longest ago. No I/O."""

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from services.mempool.core.entry import Entry
from services.mempool.core.page_state import PageEvent
from services.mempool.core.radix import Index
from services.mempool.core.space import Memory
from shared.ids import PageId
from shared.kv.page import PageState

NO_CALLER, OWN_CALL_MS = -1, 60_000  # of a call of the pool's own
NOBODY, IMPOSSIBLE = 0, -1  # of whom to ask for a page; else the connection of an engine


@dataclass(slots=True)
class ReleaseCall:
    """One ReleaseMemory or RegainMemory; they are served one after the other."""

    connection: int
    call_id: int
    wanted: int  # units
    until_ms: int
    regains: bool = False
    done: int = 0
    exhausted: bool = False  # the system has no more memory
    units: set[int] = field(default_factory=set)  # under way for it
    candidates: "deque[int] | None" = None  # None: not looked for yet

    @classmethod
    def of_the_pool(cls, wanted: int, now_ms: int, *, regains: bool) -> "ReleaseCall":
        """One that nobody waits for."""
        return cls(NO_CALLER, 0, wanted, now_ms + OWN_CALL_MS, regains)

    @property
    def has_caller(self) -> bool:
        """Whether somebody waits for the answer."""
        return self.connection != NO_CALLER


@dataclass(slots=True)
class Part:
    """A Vacate that was not answered yet."""

    connection: int
    pages: list[PageId]


class Choice:
    """Units (releases.py) of one space, as of the last search()."""

    def __init__(self, memory: Memory, index: Index) -> None:
        self._memory, self._index, self._table = memory, index, memory.table
        self.pages_per_unit = max(1, memory.pages_per_slab)
        self._named: dict[PageId, Entry] = {}
        self._holders: dict[PageId, int] = {}  # connections

    def pages(self, unit: int) -> list[PageId]:
        """Of one unit."""
        first = unit * self.pages_per_unit
        return [PageId(page) for page in range(first, first + self.pages_per_unit)]

    def most(self) -> int:
        """Units that engines can be without: each keeps room for its longest request."""
        engines = self._memory.engines
        least = engines.num_pages_for(sum(engine.least for engine in engines.attached.values()))
        return max(0, self._table.num_present - least) // self.pages_per_unit

    def search(self, busy: Set[int]) -> "deque[int]":
        """All units that may go, the free ones first, then by the last use of what is in them.

        Cost: one pass over pages and index, about a microsecond for each.
        """
        self._named = {entry.page: entry for entry in self._index.entries()}
        self._holders = {}
        for connection, engine in self._memory.engines.attached.items():
            self._holders.update(dict.fromkeys(engine.held, connection))
            self._holders.update(dict.fromkeys(engine.pinned, connection))
        states = self._table.states
        newest = max((entry.last_used for entry in self._named.values()), default=0)
        found: list[tuple[int, int]] = []
        for unit in range(self._table.num_pages // self.pages_per_unit):
            if unit in busy:
                continue
            age = -1
            for page in self.pages(unit):
                if states[page] == PageState.SEALED:
                    entry = self._named.get(page)
                    age = max(age, entry.last_used if entry is not None else 0)
                elif states[page] == PageState.GRANTED:  # an engine is about to need it
                    age = max(age, newest + 1)
                elif states[page] != PageState.FREE:
                    age = max(age, newest + 2)
            found.append((age, unit))
        return deque(unit for _, unit in sorted(found))

    def whom(self, page: PageId) -> int:
        """Whom to ask for the page now."""
        state = self._table.states[page]
        if state == PageState.FREE:
            return NOBODY
        holder = self._holders.get(page, IMPOSSIBLE)
        engine = self._memory.engines.attached.get(holder)
        if state in (PageState.GRANTED, PageState.WRITING):
            return holder if engine is not None and page in engine.held else IMPOSSIBLE
        entry = self._indexed(page)
        if state != PageState.SEALED or (entry is None and self._named.get(page) is not None):
            return IMPOSSIBLE
        if entry is not None and not entry.pins:
            return NOBODY
        mine = engine is not None and page in engine.pinned
        return holder if mine and (entry is None or entry.pins == 1) else IMPOSSIBLE

    def _indexed(self, page: PageId) -> Entry | None:
        entry = self._named.get(page)
        is_here = entry is not None and entry.page == page and self._index.get(entry.block_hash) is entry
        return entry if is_here else None

    def evict(self, pages: Iterable[PageId]) -> int:
        """Those that hold a block which nobody pins come free. How many.

        Cost: one step per page, and one pass over the prompts of their blocks.
        """
        states = self._table.states
        sealed = (self._indexed(page) for page in pages if states[page] == PageState.SEALED)
        found = [entry for entry in sealed if entry is not None and not entry.pins]
        found.sort(
            key=lambda entry: entry.position
        )  # delete() begins with the last: what stays is divided once
        for entry in self._index.delete([entry.block_hash for entry in found]):
            self._table.free(entry.page, PageEvent.RETIRE)
        return len(found)
