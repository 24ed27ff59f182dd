"""Memory of a space on its way to the system and back, when somebody presses for it. No I/O.

    in use --chosen--> vacating --all pages withdrawn--> leaving --unmapped everywhere--> freeing --> gone
                          | an engine keeps a page: free again                                         | asked for
    in use <--mapped everywhere-- coming <-------------------- making <--------------------------------+

A *unit* is what the system takes back at once: the pages of one allocation on a GPU, one page of host memory. Free
units go first, then those whose blocks were used longest ago; engines are asked for pages that they cache, and keep
what a request uses. Host memory is gone when it is punched, whoever maps it; on a GPU every process that maps
an allocation has to unmap it first, or be dead (rule 5): an engine's steps never wait for that.
Source: ARCHITECTURE.md, rules 1 and 5; vAttention 6.2 ("deferred reclamation", release under pressure).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from services.mempool.core.actions import OfferSlabs, ReleaseUnits
from services.mempool.core.page_state import PageEvent
from services.mempool.core.regains import Regains
from services.mempool.core.release_choice import IMPOSSIBLE, NOBODY, Part, ReleaseCall
from shared.ids import PageId
from shared.kv.page import PageState
from shared.kv.words import u32_bytes, u32_list, u64_bytes
from shared.wire import mempool as wire

SLABS_PER_MESSAGE = 64
MAX_CALLS = 64


class Releases(Regains):
    """Of one space. Every event of the space ends with advance()."""

    def adopt(self, mappers: Iterable[int], *, is_owed: bool = False) -> None:
        """Go on from an earlier mempool's words. What processes were asked to unmap, they are asked again.

        Args: mappers: processes that may map allocations; is_owed: what it said last (OweMemory).
        """
        self.mappers.update(mappers)
        self._is_owed = is_owed
        self._again_ms = 0 if is_owed else None
        for unit in sorted({page // self.pages_per_unit for page in self._table.reserved}):
            states = set(self._table.states[unit * self.pages_per_unit : (unit + 1) * self.pages_per_unit])
            if states == {PageState.RELEASED}:
                self.gone.add(unit)
            elif states <= {PageState.RELEASED, PageState.WITHDRAWN}:
                self.vacating[unit] = set()
            else:  # nobody was asked to unmap it yet
                self._table.restore(self._choice.pages(unit))
        self.advance()

    @property
    def absent(self) -> list[int]:
        """Units that a process which attaches now does not map."""
        return sorted({*self.leaving, *self.freeing, *self.gone, *self.making, *self.coming})

    # -- calls ------------------------------------------------------------------------------------

    def on_call(
        self, connection: int, call: wire.ReleaseMemory | wire.RegainMemory, now_ms: int, max_wait_ms: int
    ) -> None:
        """Answered by MemoryChanged or CallFailed, once."""
        regains = isinstance(call, wire.RegainMemory)
        most = len(self.gone) + self._on_their_way if regains else self._choice.most()
        wanted = min(most, -(-max(0, call.num_bytes) // self.unit_bytes))
        if regains and not call.num_bytes:
            wanted = most
        reason = self._obstacle()
        if len(self.calls) >= MAX_CALLS:
            reason = f"{MAX_CALLS} such calls are waiting"
        if reason:
            failed = wire.CallFailed(call_id=call.call_id, code="release.unsupported", reason=reason)
            self._send(connection, failed)
            return
        if not regains:
            self.owe_nothing()
        until_ms = now_ms + min(max(0, call.wait_ms), max_wait_ms)
        self.calls.append(ReleaseCall(connection, call.call_id, wanted, until_ms, regains))
        self.advance()

    def release_all(self, now_ms: int) -> None:
        """Without a caller: everything that can go goes. Nobody is there, and nothing is copied."""
        self.owe_nothing()
        self._unlocks = self._memory.is_dram
        wanted = self._table.num_present // self.pages_per_unit
        self.calls.append(ReleaseCall.of_the_pool(wanted, now_ms, regains=False))
        self.advance()

    def _obstacle(self) -> str:
        memory = self._memory
        is_apart = (
            memory.pages_per_slab and memory.num_slabs * memory.pages_per_slab != memory.table.num_pages
        )
        if not memory.pages_per_slab or (not is_apart and self.mappers <= set(self.ready.values())):
            return ""
        return "a process maps these pages and cannot unmap them, or not yet"

    def forget(self, connection: int) -> None:
        """A connection ended. What its call began goes on; its process may map pages as long as it lives."""
        self.ready.pop(connection, None)
        for call in self.calls:
            if call.connection == connection:
                call.until_ms = 0

    def tick(self, now_ms: int) -> None:
        """End the call whose time is over."""
        for call in [c for c in self.calls if now_ms >= c.until_ms]:
            self._end(call)
        if self._is_due_again(now_ms):
            self.regain_all(now_ms)
        self.advance()

    def _end(self, call: ReleaseCall) -> None:
        """Now, whatever it still lacks: what has not left yet stays."""
        if call is self.calls[0] and not call.regains:
            for unit in [u for u in self.vacating if u in call.units]:
                self._keep(unit)
        self._answer(call)

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do."""
        due = [call.until_ms for call in self.calls]
        if (again_ms := self.again_at_ms()) is not None:
            due.append(again_ms)
        return min(due, default=None)

    def _answer(self, call: ReleaseCall) -> None:
        self.calls.remove(call)
        num_bytes, left = call.done * self.unit_bytes, self.released_bytes
        changed = wire.MemoryChanged(call_id=call.call_id, num_bytes=num_bytes, released_bytes=left)
        if call.has_caller:
            self._send(call.connection, changed)

    # -- every event ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take every unit as far as it goes. Cost: nothing when nothing is under way."""
        if not (self.calls or self.vacating):
            return
        self._drop_parts()
        while True:
            self._collect()
            if not self.calls:
                return
            call = self.calls[0]
            lacking = call.wanted - call.done - len(call.units)
            begun = 0
            if lacking > 0 and not call.exhausted:
                begun = self._regain(call, lacking) if call.regains else self._begin_next(call, lacking)
            waits = call.regains and lacking > 0 and not call.exhausted and self._on_their_way > 0
            if not begun and not call.units and not waits:
                self._answer(call)
            elif not begun:
                return

    def _collect(self) -> None:
        for page in self._table.take_withdrawn():
            left = self.vacating.get(page // self.pages_per_unit)
            if left is not None:
                left.discard(page)
        read = {page // self.pages_per_unit for page in self._memory.read_early}
        whole = sorted(unit for unit, left in self.vacating.items() if not left and unit not in read)
        mappers = self.mappers if self._memory.pages_per_slab else set[int]()
        for unit in whole:
            del self.vacating[unit]
            if mappers:
                self.leaving[unit] = set(mappers)
        if mappers:
            for connection in self.ready:
                self._tell(connection, whole, ())
        elif whole:
            self._free(whole)

    def _free(self, units: Sequence[int]) -> None:
        self.freeing.update(units)
        self._do(ReleaseUnits(list(units), self._number, self._unlocks))

    def _tell(self, connection: int, leaving: Sequence[int], coming: Sequence[int]) -> None:
        """A rank unmaps and maps what it is awaited for."""
        for first in range(0, len(leaving), SLABS_PER_MESSAGE):
            part = leaving[first : first + SLABS_PER_MESSAGE]
            self._send(connection, wire.Unmap(slabs=u32_bytes(part)))
        number = self._memory.engines.ranks[connection].number
        for first in range(0, len(coming), SLABS_PER_MESSAGE):
            part = list(coming[first : first + SLABS_PER_MESSAGE])
            self._do(OfferSlabs(connection, number, part, self._number))

    # -- choosing ---------------------------------------------------------------------------------

    def _begin_next(self, call: ReleaseCall, lacking: int) -> int:
        """Begin with the next units of a call, within what may be under way. How many."""
        under_way = (len(self.vacating) + len(self.leaving) + len(self.freeing)) * self.pages_per_unit
        room = max(0, self._most_under_way - under_way) // self.pages_per_unit
        if not room and not under_way:
            room = 1  # a unit of very many pages
        if under_way and room < lacking and room * self.pages_per_unit < wire.PAGES_PER_VACATE:
            return 0  # engines answer a message a step
        most, busy = min(lacking, room, self._choice.most()), self._busy() | self.vacating.keys()
        if call.candidates is None and room:
            call.candidates = self._choice.search(busy)
        chosen: dict[int, list[int]] = {}
        while call.candidates and len(chosen) < most:
            unit = call.candidates.popleft()
            asked = [self._choice.whom(page) for page in self._choice.pages(unit)]
            if IMPOSSIBLE not in asked and unit not in busy:
                chosen[unit] = asked
        if chosen:
            self._begin(call, chosen)
        return len(chosen)

    def _busy(self) -> set[int]:
        return self.gone | self.making | self.freeing | self.leaving.keys() | self.coming.keys()

    def _begin(self, call: ReleaseCall, chosen: dict[int, list[int]]) -> None:
        asked: defaultdict[int, list[PageId]] = defaultdict(list)
        for unit, whom in chosen.items():
            pages = self._choice.pages(unit)
            call.units.add(unit)
            self.vacating[unit] = set(pages)
            for page, connection in zip(pages, whom, strict=True):
                if connection != NOBODY:
                    asked[connection].append(page)
        self._table.reserve([page for unit in chosen for page in self._choice.pages(unit)])
        self._evict([page for unit in chosen for page in self._choice.pages(unit)])
        for connection, pages in asked.items():
            for first in range(0, len(pages), wire.PAGES_PER_VACATE):
                self._ask(connection, pages[first : first + wire.PAGES_PER_VACATE])

    def _ask(self, connection: int, pages: list[PageId]) -> None:
        self._num_parts += 1
        self._parts[self._num_parts] = Part(connection, pages)
        self._counters["pages_asked_back"] += len(pages)
        epochs = u64_bytes(self._table.epochs[page] for page in pages)
        self._send(connection, wire.Vacate(number=self._num_parts, pages=u32_bytes(pages), epochs=epochs))

    def _evict(self, pages: Sequence[PageId]) -> None:
        self._counters["pages_evicted"] += self._choice.evict(pages)

    def _keep(self, unit: int) -> None:
        """It cannot go: what was withdrawn of it is free again."""
        self.vacating.pop(unit, None)
        for call in self.calls:
            call.units.discard(unit)
        self._table.restore(self._choice.pages(unit))

    # -- answers ----------------------------------------------------------------------------------

    def on_vacated(self, connection: int, number: int) -> None:
        """An engine has let go of what it can. Pages that it keeps keep their units."""
        part = self._parts.get(number)
        if part is not None and part.connection == connection:
            del self._parts[number]
            self._end_part(part)

    def _drop_parts(self) -> None:
        """Of engines that are gone: their pages wait for proof of death."""
        attached = self._memory.engines.attached
        for number in [n for n, part in self._parts.items() if part.connection not in attached]:
            self._end_part(self._parts.pop(number))

    def _end_part(self, part: Part) -> None:
        self._evict(part.pages)
        for page in part.pages:
            unit = page // self.pages_per_unit
            if unit in self.vacating and self._table.states[page] != PageState.WITHDRAWN:
                self._keep(unit)

    def attached(self, process: int) -> None:
        """A rank attaches; it is told what is absent, and maps the rest."""
        self.mappers.add(process)
        for waiting in self.coming.values():
            waiting.add(process)

    def on_unmapped(self, connection: int, message: wire.Unmapped) -> None:
        """A process maps these no more."""
        process = self.ready.get(connection)
        for unit in u32_list(message.slabs):
            self.leaving.get(unit, set()).discard(process or 0)
        self._settle()

    def on_mapped(self, connection: int, process: int, message: wire.Mapped) -> None:
        """A process maps these now; the first time: it has mapped all, and hears what has changed meanwhile."""
        if connection not in self.ready:
            self.ready[connection] = process
            leaving = sorted(unit for unit, waiting in self.leaving.items() if process in waiting)
            coming = sorted(unit for unit, waiting in self.coming.items() if process in waiting)
            self._tell(connection, leaving, coming)
        for unit in u32_list(message.slabs):
            if unit in self.coming:
                self.coming[unit].discard(process)
        self._settle()

    def buried(self, process: int) -> None:
        """Proof of death, perhaps before the end of its connections is read: it maps nothing."""
        self.mappers.discard(process)
        self.ready = {connection: each for connection, each in self.ready.items() if each != process}
        for waiting in (*self.leaving.values(), *self.coming.values()):
            waiting.discard(process)
        self._settle()

    def _settle(self) -> None:
        unmapped = sorted(unit for unit, waiting in self.leaving.items() if not waiting)
        for unit in unmapped:
            del self.leaving[unit]
        if unmapped:
            self._free(unmapped)
        mapped = sorted(unit for unit, waiting in self.coming.items() if not waiting)
        for unit in mapped:
            del self.coming[unit]
        self._use(mapped)

    def _use(self, units: Iterable[int]) -> None:
        for unit in units:
            self._table.restore(self._choice.pages(unit))
            self._counters["pages_regained"] += self.pages_per_unit
            self._count(unit)

    def _count(self, unit: int) -> None:
        for call in self.calls:
            if unit in call.units:
                call.units.discard(unit)
                call.done += 1

    def on_released(self, units: Iterable[int], *, failed: bool) -> None:
        """Answer to ReleaseUnits. Failed: their memory must stay, nothing has changed."""
        for unit in units:
            self.freeing.discard(unit)
            if failed:
                self._keep(unit)
                continue
            self.gone.add(unit)
            for page in self._choice.pages(unit):
                if self._table.states[page] == PageState.WITHDRAWN:
                    self._table.apply(page, PageEvent.UNMAPPED)
            self._counters["pages_released"] += self.pages_per_unit
            self._count(unit)
        if failed and self.calls:
            self.calls[0].exhausted = True
