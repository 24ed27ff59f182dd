"""Who keeps sealed pages from eviction: leases of readers, handoffs on their way, calls that wait. No I/O.

    HandoffReady -> handoff (ttl) -- Acquire(handoff_id) --> lease (ttl) -- Release or expiry --> nothing
    KeepHandoff -> a later end of its ttl
    Acquire -> lease             \\-- expiry --> nothing

A handoff passes to its acquirer once: the lease is pinned before the handoff's own pins go, so the pages are
never without a pin in between.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.mempool.core.actions import PoolLimits
from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from shared.ids import Epoch, HandoffId, InstanceId, LeaseId
from shared.wire.mempool import Acquire, KeepHandoff

MAX_CLOSED_HANDOFFS = 8_192


@dataclass(slots=True)
class Lease:
    """Pins held for one reader. `connection` is None once the reader's connection has closed."""

    lease_id: LeaseId
    fencing_token: Epoch
    instance: InstanceId
    connection: int | None
    entries: list[Entry]
    expires_at_ms: int | None  # None: an engine works in the pages, only its release or its death ends it
    process: int = 0  # of that engine, as far as it is known


@dataclass(slots=True)
class Handoff:
    """Pins held between prefill's HandoffReady and decode's Acquire."""

    handoff_id: HandoffId
    entries: list[Entry]
    expires_at_ms: int


@dataclass(slots=True)
class Waiter:
    """An Acquire that came before its HandoffReady."""

    number: int
    connection: int
    instance: InstanceId
    call: Acquire
    expires_at_ms: int


@dataclass(slots=True)
class Expired:
    """What a tick ended; expired waiters still want their answer."""

    num_leases: int
    num_handoffs: int
    waiters: list[Waiter]


class Fence:
    """Numbers that grow with every lease, across restarts too; of all spaces of one mempool."""

    def __init__(self, boot_generation: Epoch) -> None:
        self.boot_generation = boot_generation
        self._last = int(boot_generation)

    def next(self) -> tuple[LeaseId, Epoch]:
        """A new lease's name and fencing token."""
        self._last += 1
        name = f"{self.boot_generation:x}-{self._last - self.boot_generation:x}"
        return LeaseId(name), Epoch(self._last)


class Leases:
    """Owns every pin of readers: taken and dropped here only.

    Args: engine_of: process of the instance's engine, which works in what is leased without an end; 0: not known.
    """

    def __init__(
        self, index: Index, fence: Fence, engine_of: Callable[[InstanceId], int] = lambda instance: 0
    ) -> None:
        self._index = index
        self._fence = fence
        self._engine_of = engine_of
        self._num_waiters_made = 0
        self.leases: dict[LeaseId, Lease] = {}
        self.handoffs: dict[HandoffId, Handoff] = {}
        self.waiters: dict[int, Waiter] = {}
        self._waiting_for: dict[HandoffId, list[int]] = {}
        self._closed: OrderedDict[HandoffId, None] = OrderedDict()  # acquired or expired, the last ones
        # (when, kind, key), one item per lease, handoff or waiter ever made; dead ones are skipped
        self._deadlines: list[tuple[int, str, str | int]] = []

    def num_pages(self) -> int:
        """Kept by leases and handoffs, each page once. Cost: their entries; for whoever looks now and then."""
        holds = (*self.leases.values(), *self.handoffs.values())
        return len({entry.page for hold in holds for entry in hold.entries})

    # -- leases -----------------------------------------------------------------------------------

    def grant(
        self, connection: int, instance: InstanceId, entries: list[Entry], expires_at_ms: int | None
    ) -> Lease:
        """Pin entries under a new lease. The fencing token grows with every lease, across restarts too."""
        lease_id, token = self._fence.next()
        lease = Lease(lease_id, token, instance, connection, entries, expires_at_ms)
        self._index.pin(entries)
        self.leases[lease_id] = lease
        if expires_at_ms is not None:
            self._note_deadline(expires_at_ms, "lease", lease_id)
        else:
            lease.process = self._engine_of(instance)
        return lease

    def restore(self, lease_id: LeaseId, instance: InstanceId, entries: list[Entry], process: int) -> None:
        """A lease of an earlier mempool that an engine still works in. One that is known already stays as it is."""
        if lease_id in self.leases:
            return
        self._index.pin(entries)
        self.leases[lease_id] = Lease(lease_id, Epoch(0), instance, None, entries, None, process)

    def release(self, lease_id: LeaseId, instance: InstanceId) -> bool:
        """False when there is no such lease of this instance: harmless."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.instance != instance:
            return False
        del self.leases[lease_id]
        self._index.unpin(lease.entries)
        return True

    def has(self, instance: InstanceId, entry: Entry) -> bool:
        """Whether a lease of the instance pins it. Cost: their entries."""
        return any(entry in x.entries for x in self.leases.values() if x.instance == instance)

    def orphan(self, connection: int) -> None:
        """The connection closed, its leases live on without it until their time ends."""
        for lease in self.leases.values():
            if lease.connection == connection:
                lease.connection = None

    def release_of(self, connection: int | None, instance: InstanceId, *, engine_lives: bool) -> int:
        """Release an instance's leases of one connection, or with None those without one. How many.

        While an engine of the instance may still run, what it works in stays (`expires_at_ms` None).
        """
        gone = [
            x
            for x in self.leases.values()
            if x.connection == connection
            and x.instance == instance
            and not (engine_lives and x.expires_at_ms is None)
        ]
        for lease in gone:
            self.release(lease.lease_id, instance)
        return len(gone)

    def release_kept(self, instance: InstanceId, process: int | None = None) -> int:
        """The instance's engine of this process, or with None none at all, can be running any more: release what it
        worked in. How many."""
        kept = [x for x in self.leases.values() if x.instance == instance and x.expires_at_ms is None]
        gone = [x for x in kept if process in (None, x.process)]
        for lease in gone:
            self.release(lease.lease_id, instance)
        return len(gone)

    # -- handoffs ---------------------------------------------------------------------------------

    def hold(self, handoff_id: HandoffId, entries: list[Entry], expires_at_ms: int) -> None:
        """Pin a handoff's pages. Said twice, the later word counts."""
        self._index.pin(entries)
        self._drop(handoff_id)
        self.handoffs[handoff_id] = Handoff(handoff_id, entries, expires_at_ms)
        self._note_deadline(expires_at_ms, "handoff", handoff_id)

    def keep(self, handoff_id: HandoffId, expires_at_ms: int) -> bool:
        """Its reader will come later: no earlier end than this. False: it is not held here."""
        handoff = self.handoffs.get(handoff_id)
        if handoff is not None and expires_at_ms > handoff.expires_at_ms:
            handoff.expires_at_ms = expires_at_ms
            self._note_deadline(expires_at_ms, "handoff", handoff_id)
        return handoff is not None

    def close_handoff(self, handoff_id: HandoffId) -> None:
        """Acquired or expired: drop its pins and remember that nobody needs to wait for it."""
        self._drop(handoff_id)
        self._closed[handoff_id] = None
        self._closed.move_to_end(handoff_id)
        if len(self._closed) > MAX_CLOSED_HANDOFFS:
            self._closed.popitem(last=False)

    def is_closed(self, handoff_id: HandoffId) -> bool:
        """Whether the handoff has passed already."""
        return handoff_id in self._closed

    # -- waiters ----------------------------------------------------------------------------------

    def wait(self, connection: int, instance: InstanceId, call: Acquire, expires_at_ms: int) -> None:
        """Keep a call until take_waiters() of its handoff, forget() of its connection, or expiry."""
        self._num_waiters_made += 1
        waiter = Waiter(self._num_waiters_made, connection, instance, call, expires_at_ms)
        self.waiters[waiter.number] = waiter
        self._waiting_for.setdefault(call.handoff_id, []).append(waiter.number)
        self._note_deadline(expires_at_ms, "waiter", waiter.number)

    def take_waiters(self, handoff_id: HandoffId) -> list[Waiter]:
        """Calls that waited for this handoff, first come first."""
        return [self.waiters.pop(number) for number in self._waiting_for.pop(handoff_id, ())]

    def take_late_waiters(self, now_ms: int) -> list[Waiter]:
        """Calls whose time is over. Cost: where nothing is due none."""
        if not self._deadlines or self._deadlines[0][0] > now_ms:
            return []
        late = [waiter for waiter in self.waiters.values() if waiter.expires_at_ms <= now_ms]
        for waiter in late:
            self._remove_waiter(waiter)
        return late

    def forget_waiters(self, connection: int) -> None:
        """The connection closed: nobody wants these answers."""
        for waiter in [w for w in self.waiters.values() if w.connection == connection]:
            self._remove_waiter(waiter)

    # -- time -------------------------------------------------------------------------------------

    def expire(self, now_ms: int) -> Expired:
        """End what is due. Cost: O(log n) per ended item."""
        out = Expired(0, 0, [])
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            when, kind, key = heapq.heappop(self._deadlines)
            if kind == "lease":
                lease = self.leases.get(LeaseId(str(key)))
                if lease is not None and lease.expires_at_ms == when:
                    self.release(lease.lease_id, lease.instance)
                    out.num_leases += 1
            elif kind == "handoff":
                handoff = self.handoffs.get(HandoffId(str(key)))
                if handoff is not None and handoff.expires_at_ms == when:
                    self.close_handoff(handoff.handoff_id)
                    out.num_handoffs += 1
            elif isinstance(key, int) and (waiter := self.waiters.get(key)) is not None:
                self._remove_waiter(waiter)
                out.waiters.append(waiter)
        return out

    def next_deadline_ms(self) -> int | None:
        """When expire() may have something to do; perhaps too early, never too late."""
        return self._deadlines[0][0] if self._deadlines else None

    def pins(self) -> Sequence[list[Entry]]:
        """Every list of pinned entries: what the index's pin counts must add up to."""
        return [x.entries for x in (*self.leases.values(), *self.handoffs.values())]

    def _drop(self, handoff_id: HandoffId) -> None:
        handoff = self.handoffs.pop(handoff_id, None)
        if handoff is not None:
            self._index.unpin(handoff.entries)

    def _remove_waiter(self, waiter: Waiter) -> None:
        del self.waiters[waiter.number]
        numbers = self._waiting_for[waiter.call.handoff_id]
        numbers.remove(waiter.number)
        if not numbers:
            del self._waiting_for[waiter.call.handoff_id]

    def _note_deadline(self, when_ms: int, kind: str, key: str | int) -> None:
        heapq.heappush(self._deadlines, (when_ms, kind, key))
        live = len(self.leases) + len(self.handoffs) + len(self.waiters)
        if len(self._deadlines) > 4 * live + 256:
            self._deadlines = [
                *(
                    (x.expires_at_ms, "lease", x.lease_id)
                    for x in self.leases.values()
                    if x.expires_at_ms is not None
                ),
                *((x.expires_at_ms, "handoff", x.handoff_id) for x in self.handoffs.values()),
                *((x.expires_at_ms, "waiter", x.number) for x in self.waiters.values()),
            ]
            heapq.heapify(self._deadlines)


def has_come(leases: Iterable["Leases"], handoff_id: HandoffId) -> bool:
    """Whether one of these spaces has the handoff, or had it."""
    return any(handoff_id in each.handoffs or each.is_closed(handoff_id) for each in leases)


def keep_handoff(spaces: Iterable[Leases], message: KeepHandoff, limits: PoolLimits, now_ms: int) -> None:
    """In whichever space holds it."""
    until_ms = now_ms + max(1, min(message.ttl_ms, limits.max_ttl_ms))
    any(leases.keep(message.handoff_id, until_ms) for leases in spaces)
