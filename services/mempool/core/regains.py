"""Memory that was given to the system comes back to its space: when somebody says so, or comes. No I/O.

Whoever comes where nobody was gets all of it, however long that takes: what the system lacks is asked for again every
AGAIN_MS, by a successor too (OweMemory). Memory that is pressed for while engines are there comes back by RegainMemory
alone.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest

from services.mempool.core.actions import Action, OweMemory, RestoreUnits
from services.mempool.core.page_state import PageEvent
from services.mempool.core.radix import Index
from services.mempool.core.release_choice import Choice, Part, ReleaseCall
from services.mempool.core.space import Memory
from shared.ids import PageId
from shared.wire import mempool as wire

MAX_PAGES_UNDER_WAY = 512  # chosen and not gone yet, or made and not mapped yet
MOST_PARTS = 64  # of host memory: each costs a look at all of its pages
AGAIN_MS = 5_000


class Regains(ABC):
    """See Releases, which has this.

    Args:
        send: a message to a connection.
        do: an action, behind the words of the pages.
    """

    def __init__(
        self,
        number: int,
        memory: Memory,
        index: Index,
        counters: Counter[str],
        send: Callable[[int, wire.FromMempool], None],
        do: Callable[[Action], None],
    ) -> None:
        self._number, self._memory, self._counters = number, memory, counters
        self._send, self._do = send, do
        self._table = memory.table
        self._choice = Choice(memory, index)
        self.pages_per_unit = self._choice.pages_per_unit
        self.unit_bytes = self.pages_per_unit * memory.page_bytes * memory.num_ranks
        self.calls: deque[ReleaseCall] = deque()
        self.vacating: dict[int, set[PageId]] = {}  # pages that are not withdrawn yet
        self.leaving: dict[int, set[int]] = {}  # processes that map it still
        self.freeing: set[int] = set()
        self.gone: set[int] = set()
        self.making: set[int] = set()
        self.coming: dict[int, set[int]] = {}  # processes that do not map it yet
        self.mappers: set[int] = set()  # processes that map allocations
        self.ready: dict[int, int] = {}  # connection of a rank that can be told -> its process
        self._parts: dict[int, Part] = {}
        self._num_parts = 0
        self._unlocks = False  # memory that goes
        in_host = 0 if memory.pages_per_slab else memory.table.num_pages // MOST_PARTS
        self._most_under_way = max(MAX_PAGES_UNDER_WAY, in_host)
        self._again_ms: int | None = None  # not before it is what a newcomer still lacks asked for again
        self._is_owed = False  # as a successor would be told

    @property
    def released_bytes(self) -> int:
        """Without memory now."""
        return (len(self.gone) + len(self.making)) * self.unit_bytes

    @property
    def _on_their_way(self) -> int:
        """Units that will be gone, whoever waits for it: unmapped or given back at this moment."""
        return len(self.leaving) + len(self.freeing)

    @property
    def is_awaited(self) -> bool:
        """Whether memory comes, or somebody has to let go of some or waits for what becomes of it."""
        is_asked = any(call.has_caller for call in self.calls)
        return bool(is_asked or self.vacating or self.leaving or self.making or self.coming)

    # -- without a caller ---------------------------------------------------------------------------

    def regain_all(self, now_ms: int) -> None:
        """All comes back, also what is just leaving; calls of the pool's own end for it."""
        for call in [call for call in self.calls if not call.has_caller]:
            self._end(call)
        self._again_ms = now_ms + AGAIN_MS
        if self._unlocks:  # also where the system took nothing, so that nothing is made
            self._unlocks = False
            self._do(RestoreUnits([], self._number))
        if wanted := len(self.gone) + self._on_their_way:
            self._owe(True)
            self.calls.append(ReleaseCall.of_the_pool(wanted, now_ms, regains=True))
        self.advance()

    def owe_nothing(self) -> None:
        """Somebody presses for memory: what a newcomer lacks is not asked for again, what is being made comes."""
        self._again_ms = None
        self._owe(False)
        for call in self.calls:
            if call.regains and not call.has_caller:
                call.wanted = min(call.wanted, call.done + len(call.units))

    def _owe(self, is_owed: bool) -> None:
        if is_owed != self._is_owed:
            self._is_owed = is_owed
            self._do(OweMemory(is_owed, self._number))

    def again_at_ms(self) -> int | None:
        """When what newcomers lack is asked for again. None: nothing is, it is being asked for, or nobody is there."""
        engines = self._memory.engines
        # nobody attaches to what is behind others
        is_used = self._memory.is_dram or engines.attached or engines.ranks
        if not (self.gone or self._on_their_way) or not is_used:
            return None
        return None if any(not call.has_caller for call in self.calls) else self._again_ms

    def _is_due_again(self, now_ms: int) -> bool:
        due_ms = self.again_at_ms()
        return due_ms is not None and now_ms >= due_ms

    # -- units --------------------------------------------------------------------------------------

    def _regain(self, call: ReleaseCall, lacking: int) -> int:
        room = self._most_under_way // self.pages_per_unit - len(self.making) - len(self.coming)
        units = nsmallest(min(lacking, max(room, int(not self.making))), self.gone)
        if units:
            self.gone.difference_update(units)
            self.making.update(units)
            call.units.update(units)
            self._do(RestoreUnits(units, self._number))
        else:
            call.exhausted = not (self.gone or self._on_their_way)
        return len(units)

    def on_restored(self, units: Sequence[int], num_made: int) -> None:
        """Answer to RestoreUnits: the system had memory for the first `num_made` of them."""
        made, failed = list(units[:num_made]), units[num_made:]
        self.making.difference_update(units)
        self.gone.update(failed)
        for call in self.calls:
            if call.units & set(failed):
                call.units.difference_update(failed)
                call.exhausted = True
        for unit in made:
            for page in self._choice.pages(unit):
                self._table.apply(page, PageEvent.RESTORED)
        if not (self._memory.pages_per_slab and self.mappers):
            self._use(made)
            return
        self.coming.update((unit, set(self.mappers)) for unit in made)
        for connection in self.ready:
            self._tell(connection, (), made)

    # -- of Releases --------------------------------------------------------------------------------

    @abstractmethod
    def advance(self) -> None:
        """Take every unit as far as it goes."""

    @abstractmethod
    def _end(self, call: ReleaseCall) -> None: ...

    @abstractmethod
    def _tell(self, connection: int, leaving: Sequence[int], coming: Sequence[int]) -> None: ...

    @abstractmethod
    def _use(self, units: Iterable[int]) -> None: ...
