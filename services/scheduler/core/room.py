"""Which decode instances have room in their pages for a prompt and its answer, and who waits until one has. No I/O.

Workers report what is free there and what their requests may still need (shared/room); what was placed and cannot be in
the report yet comes on top (load.py). Handing over more than that wastes prefill's work: decode would preempt, or drop
pages, and compute prompts again (decision 0028).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from services.scheduler.core.instances import Instance
from services.scheduler.core.request import AttemptKey, PlacementRequest
from services.scheduler.core.standing import Field
from shared.ids import InstanceId
from shared.wire.placement import Place, Placed, Rejected
from shared.wire.reports import Role, Room

SLACK_SHARE = 0.25  # of an instance's pages: so much may wait for room there, or it would run out of work
MOST_SHARE = 0.75  # of an instance's pages: who may need more is taken to need so many
UNBOUNDED_TOKENS = 4_096  # of an answer, where neither request nor worker knows


def need_blocks(request: PlacementRequest, known: Instance) -> int:
    """Pages that the prompt and its answers may take there. 0: the instance says nothing of its pages.

    An answer: max_tokens, at most what the instance says answers took there.
    """
    report = known.load.report
    room = report.room if report is not None else None
    return _need(request, room, known.description.block_tokens) if room is not None else 0


def _need(request: PlacementRequest, room: Room, block_tokens: int) -> int:
    answer = min(request.max_tokens or UNBOUNDED_TOKENS, room.answer_tokens or UNBOUNDED_TOKENS)
    tokens = request.num_prompt_tokens + answer * request.num_choices
    return min(-(-tokens // block_tokens), int(MOST_SHARE * room.num_blocks)) if block_tokens > 0 else 0


def lacking(request: PlacementRequest, field: Field, role: Role, slack_share: float = 0.0) -> set[InstanceId]:
    """Instances of the role whose room is too small. Cost: of those with less room than the request could need."""
    out: set[InstanceId] = set()
    tokens = request.num_prompt_tokens + (request.max_tokens or UNBOUNDED_TOKENS) * request.num_choices
    most = -(-tokens // field.standing.block_tokens)
    needs: dict[tuple[int, int, int], int] = {}  # less the slack; most instances are alike
    for room_blocks, name, row in field.standing.rooms:
        if room_blocks >= most:
            break
        known: Instance = row.known
        report = known.load.report
        if known.role != role or report is None or report.room is None:
            continue
        room, block_tokens = report.room, known.description.block_tokens
        kind = room.num_blocks, room.answer_tokens, block_tokens
        need = needs.get(kind)
        if need is None:
            need = needs[kind] = _need(request, room, block_tokens) - int(slack_share * room.num_blocks)
        if room_blocks < need:
            out.add(name)
    return out


class Roomy(Struct, frozen=True):
    """Where a request may be placed so that what is handed over fits. `field` None: nowhere now."""

    field: Field | None
    without: frozenset[InstanceId] = frozenset()
    why: str = ""  # a clause for the reason; "": nothing was left out


def with_room(request: PlacementRequest, field: Field, *, always_pairs: bool) -> Roomy:
    """Decode instances with room; else those that have nearly; else one instance with room for all of it.

    Only where a pair is possible: who hands nothing over computes nothing twice.
    """
    if request.must_colocate or not field.standing.rooms or not field.pairs():
        return Roomy(field)
    for slack_share, why in ((0.0, ""), (SLACK_SHARE, "; it waits there for room in the pages")):
        short = lacking(request, field, "decode", slack_share)
        if not short:
            return Roomy(field, why=why)
        left = field.but(short)
        if left.pairs():
            return Roomy(left, frozenset(short), f"; without {len(short)} that lack room in their pages{why}")
    if always_pairs:
        return Roomy(None)
    short = lacking(request, field, "decode")
    short |= lacking(request, field, "prefill") | lacking(request, field, "colocated")
    left = field.but(short)
    if not left.rows():
        return Roomy(None)
    return Roomy(left, frozenset(short), "; no decode instance has room in its pages")


class Waiter(Struct):
    """A request that waits for room."""

    place: Place
    since_ms: int
    gateway: str = ""
    is_due: bool = False  # it makes way for one that came later: it waits no more, whatever the time


Answer = Placed | Rejected


@dataclass(slots=True)
class WaitingRoom:
    """Requests in order of arrival, those of each model by themselves. Bounded: `most`, and as many that are due.

    Who comes when it is full does not overtake: the first of its model that is not due yet makes way for it.
    """

    most: int
    _queues: dict[str, deque[AttemptKey]] = field(default_factory=dict)
    _held: dict[AttemptKey, Waiter] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def has(self, model: str) -> bool:
        """Whether somebody waits before who comes now."""
        queue = self._queues.get(model)
        while queue and queue[0] not in self._held:  # it left
            queue.popleft()
        return bool(queue)

    def add(self, place: Place, *, now_ms: int, gateway: str = "") -> bool:
        """False: too many wait."""
        if len(self._held) >= self.most and not self._make_way(place.model):
            return False
        key = (place.request_id, place.attempt)
        self._held[key] = Waiter(place, now_ms, gateway)
        self._queues.setdefault(place.model, deque()).append(key)
        return True

    def _make_way(self, model: str) -> bool:
        """Whether one does. Cost: one step for each that is due, until they are served."""
        if len(self._held) >= 2 * self.most:
            return False
        held = (self._held.get(key) for key in self._queues.get(model, ()))
        first = next((waiter for waiter in held if waiter is not None and not waiter.is_due), None)
        if first is not None:
            first.is_due = True
        return first is not None

    def drop(self, key: AttemptKey) -> None:
        """It waits no more. Unknown ones are ignored. Cost: O(1); its place in the queue goes when its turn comes."""
        self._held.pop(key, None)

    def serve(self, attempt: Callable[[Waiter], Answer | None]) -> Iterator[Answer]:
        """Answers, in order; of each model until the first that has none, which keeps those behind it waiting."""
        for model, queue in list(self._queues.items()):
            while queue:
                waiter = self._held.get(queue[0])
                answer = attempt(waiter) if waiter is not None else None
                if waiter is not None and answer is None:
                    break
                self._held.pop(queue.popleft(), None)
                if answer is not None:
                    yield answer
            if not queue:
                del self._queues[model]
