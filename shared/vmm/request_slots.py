"""Which slot a request has and which of its pages are mapped there. Decided without I/O.

Unlike slots.py, which hands out pages itself (vAttention 5.2), this follows a scheduler that has chosen the pages: a
request's block table is laid side by side in a slot. What lies in the slot of an ended request stays mapped until
the place is needed (deferred reclamation, vAttention 6.1.2), so that a request with the same beginning maps nothing.

Every page stays mapped in the identity window anyway, so a leftover mapping keeps nothing alive and pins nothing: it is
right exactly as long as nobody reads it, and a place is read only after it was compared with the block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.vmm.errors import BadMapping
from shared.vmm.slot_commands import Command, Map, Unmap, merged

HOLE = -1


class Change(NamedTuple):
    """Execute `commands` in order before the slot is read."""

    slot: int
    commands: list[Command]


@dataclass(slots=True)
class _Slot:
    pages: list[int] = field(default_factory=list)  # by place; HOLE where nothing is mapped
    request: str | None = None
    length: int = 0  # leading places that are the request's; what is behind them is left over
    fence: int = 0  # no step after this one reads what is mapped
    ended: int = 0  # order of endings


class RequestSlots:
    """Slots of `slot_places` places each. Pages are page ids of the pool.

    Args:
        max_mapped: places that may be mapped at once, idle slots included (the kernel limits mappings).
    Cost: begin() compares the request's pages with the idle slots that begin alike; grow() and end() are O(new pages).
    """

    def __init__(self, num_slots: int, slot_places: int, max_mapped: int = 1 << 62) -> None:
        if min(num_slots, slot_places) <= 0:
            raise BadMapping(f"{num_slots} slots of {slot_places} places")
        self.slot_places = slot_places
        self.num_mapped = 0
        self._max_mapped = max_mapped
        self._slots = [_Slot() for _ in range(num_slots)]
        self._of: dict[str, int] = {}
        self._idle = dict.fromkeys(range(num_slots))
        self._passed = 0
        self._ended = 0

    # ---- requests

    def slot_of(self, request: str) -> int:
        """Raises: KeyError when it has none."""
        return self._of[request]

    def begin(self, request: str, pages: Sequence[int]) -> Change | None:
        """A slot for a request with these pages; None while steps under way read what would have to go: wait for
        fence(), say passed(), call again.

        Raises: BadMapping when all slots are taken, it has one already, or its pages do not fit.
        """
        if request in self._of:
            raise BadMapping(f"{request} has slot {self._of[request]}")
        self._check_length(len(pages))
        if not self._idle:
            raise BadMapping(f"all {len(self._slots)} slots are taken")
        number = self._choose(pages)
        if number is None:
            return None
        slot = self._slots[number]
        del self._idle[number]
        self._of[request] = number
        slot.request, slot.length = request, 0
        return Change(number, self._lay(number, slot, pages))

    def grow(self, request: str, pages: Sequence[int]) -> Change:
        """More pages behind those that it has. Leftovers in their places are replaced at once: begin() gave it a slot
        whose leftovers no step reads any more, and no step reads behind the end of its own request (kernels that load
        whole tiles: see request_layout's guard and the engine's lookahead).

        Raises: BadMapping when they do not fit.
        """
        number = self._of[request]
        slot = self._slots[number]
        self._check_length(slot.length + len(pages))
        return Change(number, self._lay(number, slot, pages))

    def length(self, request: str) -> int:
        """Pages that it has."""
        return self._slots[self._of[request]].length

    def end(self, request: str, fence: int) -> None:
        """It is over, or was preempted; `fence` is the last step that reads its slot. Unknown ones are ignored."""
        number = self._of.pop(request, None)
        if number is None:
            return
        slot = self._slots[number]
        self._ended += 1
        slot.request, slot.length, slot.fence, slot.ended = None, 0, fence, self._ended
        self._idle[number] = None

    def passed(self, fence: int) -> None:
        """Steps up to this one are done on the device."""
        self._passed = max(self._passed, fence)

    def fence(self) -> int:
        """The earliest step whose end frees an idle slot. Raises: BadMapping when none is idle."""
        if not self._idle:
            raise BadMapping("no slot is idle")
        return min(self._slots[number].fence for number in self._idle)

    # ---- memory

    def forget(self, pages: Sequence[int]) -> list[Command]:
        """Unmap these pages wherever no request uses them: their memory is about to change or to go.

        Raises: BadMapping when a running request, or a step under way, has one; nothing is changed then.
        """
        gone = set(pages)
        found = [
            (number, place)
            for number, slot in enumerate(self._slots)
            for place, page in enumerate(slot.pages)
            if page in gone
        ]
        for number, place in found:
            slot = self._slots[number]
            if place < slot.length or slot.fence > self._passed:
                raise BadMapping(f"page {slot.pages[place]} is in use in slot {number}")
        return merged([self._unmap(number, self._slots[number], place) for number, place in found])

    def trim(self) -> list[Command]:
        """Unmap leftovers of the longest ended requests while more is mapped than allowed."""
        commands: list[Command] = []
        if self.num_mapped <= self._max_mapped:
            return commands
        for number in sorted(self._idle, key=lambda n: self._slots[n].ended):
            slot = self._slots[number]
            if slot.fence > self._passed:
                continue
            for place, page in enumerate(slot.pages):
                if page != HOLE:
                    commands.append(self._unmap(number, slot, place))
            slot.pages.clear()
            if self.num_mapped <= self._max_mapped:
                break
        return merged(commands)

    def pages_at(self, slot: int) -> list[int]:
        """What is mapped at the slot's places, HOLE for nothing."""
        return list(self._slots[slot].pages)

    def num_idle(self) -> int:
        """Slots without a request."""
        return len(self._idle)

    # ---- inside

    def _check_length(self, length: int) -> None:
        if length > self.slot_places:
            raise BadMapping(f"{length} pages in a slot of {self.slot_places}")

    def _choose(self, pages: Sequence[int]) -> int | None:
        """Of the idle slots that may be changed: the one that has most of it already, then the emptiest, then the
        longest idle one. What lies behind these pages counts as changed too: grow() replaces it without waiting.
        """
        best: tuple[int, int, int] | None = None
        found: int | None = None
        for number in self._idle:
            slot = self._slots[number]
            same = _common(slot.pages, pages)
            stale = any(page != HOLE for page in slot.pages[same:])
            if stale and slot.fence > self._passed:
                continue
            rank = (same, -len(slot.pages) if not same else 0, -slot.ended)
            if best is None or rank > best:
                best, found = rank, number
        return found

    def _lay(self, number: int, slot: _Slot, pages: Sequence[int]) -> list[Command]:
        unmaps: list[Command] = []
        maps: list[Command] = []
        base = number * self.slot_places
        for place, page in enumerate(pages, slot.length):
            if place < len(slot.pages):
                if slot.pages[place] == page:
                    continue
                if slot.pages[place] != HOLE:
                    unmaps.append(self._unmap(number, slot, place))
                slot.pages[place] = page
            else:
                slot.pages.append(page)
            self.num_mapped += 1
            maps.append(Map(base + place, (page,), False))
        slot.length += len(pages)
        return merged(unmaps) + merged(maps)

    def _unmap(self, number: int, slot: _Slot, place: int) -> Unmap:
        slot.pages[place] = HOLE
        self.num_mapped -= 1
        return Unmap(number * self.slot_places + place, 1)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
