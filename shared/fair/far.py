"""Blocks of running requests that are outside their engine's memory and read there in place: which, and where. No I/O.

    (here) --ask--> asked --placed: a far place each, or none--> far --moved--> far, elsewhere
              forget, take: at any moment

The longest request gives its oldest blocks first: it is what fills the memory, and whole blocks are never written
again. Positions are those of block tables, places are the mempool's numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.ids import BlockHash
from shared.wire.mempool_far import NO_PLACE

MAX_ASKED = 64  # blocks of one call: each is a descriptor on a GPU
PATIENCE_S = 10.0  # requests wait so long for places, or for pages, before anything is computed again
RETRY_S = 0.05


class Candidate(NamedTuple):
    """A running request. `movable`: positions of blocks that may leave, the oldest first."""

    request_id: str
    movable: Sequence[int]


@dataclass(slots=True)
class Out:
    """A call that is not answered yet; `blocks` by position, in the order of the call."""

    request_id: str
    blocks: dict[int, BlockHash]
    asked_s: float
    is_forgotten: bool = False


@dataclass(slots=True)
class Placed:
    """What an answer means: `entries` (position, place) of a request, and places that nobody wants."""

    request_id: str
    entries: list[tuple[int, int]] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)


class Moved(NamedTuple):
    """A block's new place; NO_PLACE: its bytes are nowhere."""

    request_id: str
    position: int
    old: int
    new: int


def choose(candidates: Sequence[Candidate], count: int) -> list[tuple[str, list[int]]]:
    """So many blocks, or all that may leave: (request, positions), the request with most of them first."""
    out: list[tuple[str, list[int]]] = []
    for one in sorted(candidates, key=lambda c: -len(c.movable)):
        taken = list(one.movable[: max(0, count)])
        if taken:
            out.append((one.request_id, taken))
            count -= len(taken)
    return out


class FarBook:
    """Of one engine. Args: capacity: blocks that may be far at once, or on their way there, so that there are no more
    calls that nobody has answered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._asked: dict[int, Out] = {}
        self._far: dict[str, dict[int, int]] = {}  # by request: place by position
        self._where: dict[int, tuple[str, int]] = {}  # by place
        self._last = 0
        self._failing_since_s: float | None = None
        self._retry_at_s = 0.0

    @property
    def num_asked(self) -> int:
        """Blocks on their way out."""
        return sum(len(out.blocks) for out in self._asked.values())

    @property
    def num_far(self) -> int:
        """Blocks that are read in place."""
        return len(self._where)

    @property
    def in_use(self) -> bool:
        """Whether anything is far, or may become it."""
        return bool(self._where or self._asked)

    def room(self, now_s: float) -> int:
        """Blocks that may be asked to leave now."""
        return max(0, self._capacity - self.num_far - self.num_asked) if now_s >= self._retry_at_s else 0

    @property
    def spare(self) -> int:
        """Blocks that could be far besides those that are, or are on their way."""
        return max(0, self._capacity - self.num_far - self.num_asked)

    def is_worth_waiting(self, now_s: float) -> bool:
        """Whether pages may come free yet for who finds none. What was asked for long ago may never be answered."""
        if any(now_s - out.asked_s < PATIENCE_S for out in self._asked.values()):
            return True
        return self._failing_since_s is not None and now_s - self._failing_since_s < PATIENCE_S

    def leaving(self, request_id: str) -> set[int]:
        """Positions of blocks that are asked to leave already."""
        return {p for out in self._asked.values() if out.request_id == request_id for p in out.blocks}

    def ask(self, request_id: str, blocks: Mapping[int, BlockHash], now_s: float) -> int:
        """These, as many as there is room() for, are asked to leave. The call's number."""
        self._last += 1
        self._asked[self._last] = Out(request_id, dict(blocks), now_s)
        return self._last

    def placed(self, number: int, places: Sequence[int], now_s: float) -> Placed | None:
        """An answer. None: to nothing that is known; then its places are nobody's."""
        out = self._asked.pop(number, None)
        if out is None:
            return None
        found = Placed(out.request_id)
        for position, place in zip(out.blocks, places, strict=True):
            if place == NO_PLACE:
                continue
            if out.is_forgotten:
                found.strays.append(place)
            else:
                found.entries.append((position, place))
        if NO_PLACE in places:
            if self._failing_since_s is None or now_s - self._retry_at_s > PATIENCE_S:
                self._failing_since_s = now_s
            self._retry_at_s = now_s + RETRY_S
        else:
            self._failing_since_s = None
        return found

    def take(self, request_id: str, position: int, place: int) -> None:
        """The block table has it from now on."""
        self._far.setdefault(request_id, {})[position] = place
        self._where[place] = request_id, position

    def moved(self, pairs: Sequence[tuple[int, int]]) -> tuple[list[Moved], list[int]]:
        """Places are wanted back: new ones for blocks that are there still, and new places that nobody wants.

        Of the former the block table has the new place from now on, or loses the block.
        """
        out: list[Moved] = []
        strays: list[int] = []
        for old, new in pairs:
            found = self._where.pop(old, None)
            if found is None:
                strays += [new] if new != NO_PLACE else []
                continue
            request_id, position = found
            out.append(Moved(request_id, position, old, new))
            if new == NO_PLACE:
                del self._far[request_id][position]
            else:
                self.take(request_id, position, new)
        return out, strays

    def forget(self, request_id: str) -> None:
        """It is over, or computed again: what is on its way for it is nobody's, what is far it gives up itself."""
        for out in self._asked.values():
            out.is_forgotten |= out.request_id == request_id
        for place in self._far.pop(request_id, {}).values():
            del self._where[place]
