"""From one GPU to another that it cannot reach: out into pinned host memory, in from there, a few slots at a time."""

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from services.mempool.mover_engines import CopyEngine
from shared.errors import ClusterError
from shared.kernels.copy_pages.copier import DEFAULT_TIMEOUT_S
from shared.kernels.copy_pages.copies import Copies, Direction, Order
from shared.kernels.copy_pages.cuda_copier import Ticket, wait_until
from shared.kernels.copy_pages.plan import Choice, Method, Plan, cut

NUM_SLOTS = 4  # for each pair of GPUs
SLOT_BYTES = 8 << 20


class BounceCopier:
    """See copier.Copier. Sets share the slots, the oldest first; a slot is free when the copy out of it has ended."""

    def __init__(self, source: CopyEngine, target: CopyEngine, *, slot_bytes: int = SLOT_BYTES) -> None:
        """The engines stay the caller's. Raises: CopyFailed."""
        self._source = source
        self._target = target
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        source.gpu.copy.make_current()
        self._base = source.gpu.copy.allocate_host(NUM_SLOTS * slot_bytes)
        self._free = deque(self._base + slot * slot_bytes for slot in range(NUM_SLOTS))
        self._sets: list[BounceTicket] = []

    def submit(
        self,
        copies: Copies,
        direction: Direction,
        *,
        stream: int = 0,
        order: Order = Order.STREAM,
        staging: bool = False,
        kernels: bool = False,
    ) -> "BounceTicket":
        """See copier.Copier. `stream` means nothing: sets share the two GPUs' own. Copy engines alone copy."""
        plan = Plan(direction, Choice(Method.STAGED), copies, (), (), len(copies))
        ticket = BounceTicket(self, plan, _groups(cut(copies, self._slot_bytes), self._slot_bytes))
        with self._lock:
            self._sets.append(ticket)
            self._advance()
        return ticket

    def poll(self, ticket: "BounceTicket") -> bool:
        """Whether this set is done. Raises: ClusterError when it failed and nothing of it runs any more."""
        with self._lock:
            self._advance()
            if ticket.failure is not None and ticket.is_over:
                raise ticket.failure
            return ticket.is_over

    def _advance(self) -> None:
        for ticket in self._sets:
            ticket.step(self._source, self._target, self._free)
        self._sets = [ticket for ticket in self._sets if not ticket.is_over]

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """When nothing is in flight."""
        with self._lock:
            self._source.gpu.copy.make_current()
            self._source.gpu.copy.free_host(self._base)


@dataclass(slots=True)
class _Slot:
    """One slot under way: out of the source, then into the target."""

    address: int
    inward: Copies
    ticket: Ticket
    is_inward: bool = False
    is_stuck: bool = False  # nobody can say when the copy out of it ends

    def step(self, target: CopyEngine) -> bool:
        """Whether it is empty again; one that is stuck never is. Raises: ClusterError."""
        if self.is_stuck or not self.ticket.done():
            return False
        if self.is_inward:
            return True
        self.is_inward = True
        try:
            self.ticket = target.copier.submit(self.inward, Direction.HOST_TO_DEVICE, stream=target.into)
        except ClusterError as error:
            self.is_stuck = getattr(error, "running", False)  # and there is no ticket to ask
            raise
        return False


class BounceTicket:
    """One set; see copier.Ticket."""

    def __init__(self, copier: BounceCopier, plan: Plan, groups: "deque[Copies]") -> None:
        self.plan = plan
        self._copier = copier
        self._waiting = groups
        self._flying: list[_Slot] = []
        self.failure: ClusterError | None = None

    @property
    def is_over(self) -> bool:
        """Nothing of it runs, and nothing will."""
        return not self._flying and (self.failure is not None or not self._waiting)

    def done(self) -> bool:
        """See copier.Ticket."""
        return self._copier.poll(self)

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See copier.Ticket."""
        wait_until(self, timeout_s)  # type: ignore[arg-type]  # which asks done() alone

    def step(self, source: CopyEngine, target: CopyEngine, free: "deque[int]") -> None:
        """Whatever can go on. The copier holds its lock. A slot whose copy nobody can stop is never lent again."""
        still: list[_Slot] = []
        for slot in self._flying:
            try:
                is_empty = slot.step(target)
            except ClusterError as error:
                self.failure = self.failure or error
                is_empty = not getattr(error, "running", False)
            if is_empty:
                free.append(slot.address)
            else:
                still.append(slot)
        self._flying = still
        while free and self._waiting and self.failure is None:
            self._start(source, free)

    def _start(self, source: CopyEngine, free: "deque[int]") -> None:
        group = self._waiting.popleft()
        places = np.cumsum(group.sizes) - group.sizes + np.uint64(free[0])
        try:
            ticket = source.copier.submit(
                Copies(group.sources, places, group.sizes), Direction.DEVICE_TO_HOST, stream=source.out
            )
        except ClusterError as error:
            self.failure = error  # what may still run writes to the slot, which is not lent again then
            if getattr(error, "running", False):
                free.popleft()
            return
        self._flying.append(_Slot(free.popleft(), Copies(places, group.targets, group.sizes), ticket))


def _groups(pieces: Copies, slot_bytes: int) -> "deque[Copies]":
    """As many pieces as fit into a slot, in order; no piece is larger than one."""
    ends = np.cumsum(pieces.sizes)
    found: deque[Copies] = deque()
    first = 0
    while first < len(pieces):
        base = ends[first] - pieces.sizes[first]
        last = int(np.searchsorted(ends, base + np.uint64(slot_bytes), side="right"))
        found.append(pieces.take(slice(first, last)))
        first = last
    return found
