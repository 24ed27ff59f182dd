"""transfer and transfer_with_insert, and calls to other mempools. No I/O.

    caller -> source's mempool: pins the sources -> target's mempool (perhaps the same): takes targets, has them
    filled (MovePages), names them if asked to, delivers `private`, answers -> caller gets the addresses

Steps of MemServe 4.3 (allocation, transmission, insertion), pulled instead of pushed: the reader checks the
sources' epochs after the last byte. All or nothing: if one page was stale or failed, nothing is named, delivered
or kept. A page that a copy may still touch is busy, and is freed when it is idle.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from services.mempool.core.api_state import CallPeer, Holder, Home, MovePages, Page, held, stretches
from services.mempool.core.entry import Entry
from services.mempool.core.tiers import CopyResult
from shared.errors import (
    ClusterError,
    CopyFailed,
    InstanceUnknown,
    InvalidRequest,
    InvariantBroken,
    NoReceiver,
    Overloaded,
    PeerGone,
    PeerTimeout,
    StaleEpoch,
)
from shared.ids import BlockHash, InstanceId, PageId, SpaceId
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import ADDRESS_BYTES, PageAddress, TransferFlags

if TYPE_CHECKING:
    from services.mempool.core.api import Api

MAX_LATE = 4_096  # calls to peers that were given up, whose answers may still come
Free = Callable[[Sequence[PageId]], None]


@dataclass(slots=True)
class _Sources:
    """Pages that are read: pinned or busy until released."""

    holder: Holder
    home: Home
    addresses: list[PageAddress]
    entries: list[tuple[SpaceId, Entry]]


@dataclass(slots=True)
class _Move:
    holder: Holder  # gets the answer
    call_id: int
    order: wire.Transfer
    source: InstanceId
    home: Home  # of the target
    sources: _Sources | None  # None: a peer pins them
    known: list[tuple[SpaceId, Entry]]  # of an insert: blocks that the target has, pinned
    targets: list[PageAddress] = field(default_factory=list)
    own: Holder | None = None  # holds targets that were allocated for this move


@dataclass(slots=True)
class _Forwarded:
    holder: Holder
    call_id: int
    instance: InstanceId
    deadline_ms: int
    call: wire.AllocMem | wire.Transfer
    sources: _Sources | None = None


class Moves:
    """Of one Api."""

    def __init__(self, api: "Api") -> None:
        self._api = api
        self._moves: dict[int, _Move] = {}
        self.forwarded: dict[int, _Forwarded] = {}
        self._late: OrderedDict[int, InstanceId] = OrderedDict()  # allocations whose caller waits no more
        self._busy: Counter[Page] = Counter()
        self._dying: dict[Page, Free] = {}
        self._next_number = 1

    # -- pages that copies touch --------------------------------------------------------------------

    def when_idle(self, space: SpaceId, pages: Sequence[PageId], free: Free) -> None:
        """Free them now, or when the last copy that touches them has ended."""
        idle = [page for page in pages if (space, page) not in self._busy] if self._busy else pages
        for page in pages if len(idle) < len(pages) else ():
            if (space, page) in self._busy:
                self._dying[space, page] = free
        if idle:
            free(idle)

    def touch(self, pages: Collection[Page]) -> None:
        """A copy reads or writes these, until release()."""
        self._busy.update(pages)

    def release(self, pages: Collection[Page]) -> None:
        """It does so no more: what was given up meanwhile is free."""
        for page in pages:
            self._busy[page] -= 1
            if not self._busy[page]:
                del self._busy[page]
                free = self._dying.pop(page, None)
                if free is not None:
                    free([page[1]])

    def is_busy(self, space: SpaceId, page: PageId) -> bool:
        """Whether a copy reads or writes the page."""
        return (space, page) in self._busy

    def on_settled(self, space: SpaceId, pages: Sequence[PageId]) -> None:
        """See Api."""
        self.release([(space, page) for page in pages if (space, page) in self._busy])

    # -- the source's end ---------------------------------------------------------------------------

    def transfer(self, holder: Holder, call: wire.Transfer, now_ms: int) -> None:
        """From pages of this mempool to an instance anywhere."""
        addresses = self._api.addresses(call.sources)
        home = self._api.home_of(addresses)
        held([holder], home, addresses)
        if len(self._moves) + len(self.forwarded) >= self._api.limits.max_moves:
            raise Overloaded(f"{self._api.limits.max_moves} transfers are under way")
        sources = self._hold(holder, home, addresses)
        try:
            if call.target in self._api.homes:
                self._begin(holder, call.call_id, call, home.instance, sources)
            else:
                self.forward(holder, call.target, call, now_ms, sources)
        except ClusterError:
            self._let_go(sources)
            raise

    def _hold(self, holder: Holder, home: Home, addresses: list[PageAddress]) -> _Sources:
        entries = [(a.space, e) for a in addresses if not holder.owns(a) and (e := holder.pinned(a))]
        for space, entry in entries:
            self._api.allocator(space).index.pin([entry])
        self._busy.update((a.space, a.page) for a in addresses if holder.owns(a))
        return _Sources(holder, home, addresses, entries)

    def _let_go(self, sources: _Sources, *, free: bool = False) -> None:
        """The copy reads them no more. `free`: the caller gives up what it held of them."""
        pinned = {(space, entry.page) for space, entry in sources.entries}
        for space, entry in sources.entries:
            self._api.allocator(space).index.unpin([entry])
        if free:
            for address in sources.addresses:
                if sources.holder.owns(address):
                    self._api.disown(sources.holder, address.space, [address.page])
                    self._api.give_up(address.space, [address.page])
                elif sources.holder.pinned(address):
                    self._api.unpin(sources.holder, address.space, address.page)
        self.release([p for a in sources.addresses if (p := (a.space, a.page)) not in pinned])

    # -- calls to peers -----------------------------------------------------------------------------

    def forward(
        self,
        holder: Holder,
        instance: InstanceId,
        call: wire.AllocMem | wire.Transfer,
        now_ms: int,
        sources: _Sources | None = None,
    ) -> None:
        """Ask the mempool that serves the instance. Raises: InstanceUnknown."""
        if instance not in self._api.peers:
            raise InstanceUnknown(f"no mempool that is reached from here serves {instance!r}")
        timeout_ms = self._api.limits.max_timeout_ms
        message: wire.AllocMem | wire.PullPages
        if isinstance(call, wire.Transfer):
            assert sources is not None
            timeout_ms = max(1, min(call.timeout_ms, timeout_ms))
            message = wire.PullPages(call_id=self._next_number, source=sources.home.instance, order=call)
        else:
            message = msgspec.structs.replace(call, call_id=self._next_number)
        self.forwarded[self._number()] = _Forwarded(
            holder, call.call_id, instance, now_ms + timeout_ms, call, sources
        )
        holder.num_open += 1
        self._api.out.append(CallPeer(instance, message))

    def on_peer_reply(self, reply: wire.ApiReply) -> None:
        """See Api."""
        late = self._late.pop(reply.call_id, None)
        if late is not None and isinstance(reply, wire.Addresses):
            self._api.out.append(CallPeer(late, wire.FreeMem(call_id=0, addresses=reply.addresses)))
        waiting = self.forwarded.pop(reply.call_id, None)
        if waiting is None:
            return
        holder, call = waiting.holder, waiting.call
        holder.num_open -= 1
        arrived = isinstance(reply, wire.Addresses)
        if waiting.sources is not None and isinstance(call, wire.Transfer):
            self._let_go(waiting.sources, free=arrived and bool(call.flags & TransferFlags.FREE_SOURCE))
            if arrived and call.insert:  # what was named is the peer's now
                holder.remote.get(waiting.instance, set()).difference_update(_singles(call.targets))
        elif arrived:
            if self._api.holders.get(holder.connection) is not holder:
                free = wire.FreeMem(call_id=0, addresses=reply.addresses)
                self._api.out.append(CallPeer(waiting.instance, free))
            holder.remote.setdefault(waiting.instance, set()).update(_singles(reply.addresses))
        self._api.answer(holder, msgspec.structs.replace(reply, call_id=waiting.call_id))

    def expire(self, now_ms: int) -> None:
        """See Api.tick."""
        for number in [n for n, waiting in self.forwarded.items() if waiting.deadline_ms <= now_ms]:
            instance = self.forwarded[number].instance
            self._give_up_call(number, PeerTimeout(f"the mempool of {instance} did not answer in time"))

    def lose_peer(self, instances: Collection[InstanceId]) -> None:
        """Nobody answers for these any more."""
        for number in [n for n, waiting in self.forwarded.items() if waiting.instance in instances]:
            self._give_up_call(number, PeerGone("the connection to the target's mempool ended"))

    def _give_up_call(self, number: int, error: ClusterError) -> None:
        waiting = self.forwarded.pop(number)
        waiting.holder.num_open -= 1
        if waiting.sources is not None:
            self._let_go(waiting.sources)
        else:
            self._late[number] = waiting.instance
            if len(self._late) > MAX_LATE:
                self._late.popitem(last=False)
        self._api.fail(waiting.holder, waiting.call_id, error)

    def next_deadline_ms(self) -> int | None:
        """See Api."""
        return min((waiting.deadline_ms for waiting in self.forwarded.values()), default=None)

    # -- the target's end ---------------------------------------------------------------------------

    def pull(self, holder: Holder, call: wire.PullPages, now_ms: int) -> None:
        """Another mempool has pinned pages for an instance of this one."""
        if not holder.is_mempool:
            raise InvalidRequest("only mempools ask to pull")
        if len(self._moves) >= self._api.limits.max_moves:
            raise Overloaded(f"{self._api.limits.max_moves} transfers are under way at {now_ms} ms")
        self._begin(holder, call.call_id, call.order, call.source, None)

    def _begin(
        self, holder: Holder, call_id: int, order: wire.Transfer, source: InstanceId, sources: _Sources | None
    ) -> None:
        home = self._api.home(order.target)
        if len(order.private) > wire.MAX_PRIVATE_BYTES:
            raise InvalidRequest(
                f"private data of {len(order.private)} bytes; {wire.MAX_PRIVATE_BYTES} at most"
            )
        if _is_delivered(order) and self._receiver(order.target) is None:
            raise NoReceiver(f"nobody receives for {order.target}")
        addresses, hashes = self._api.addresses(order.sources), self._api.hashes(order.hashes)
        if not addresses or (order.insert and len(hashes) != len(addresses)):
            raise InvalidRequest(f"{len(addresses)} source pages, {len(hashes)} hashes")
        move = _Move(holder, call_id, order, source, home, sources, [])
        if order.insert:
            self._api.check_path(home, order.parent, hashes, order.last_tokens)
            found = home.places.prefix(hashes)
            move.known = [(stretch.space, entry) for stretch in found for entry in stretch.entries]
        rest = addresses[len(move.known) :]
        self._take_targets(move, len(addresses))
        for space, entry in move.known:
            self._api.allocator(space).index.pin([entry])
        holder.num_open += 1
        number = self._number()
        self._moves[number] = move
        if not rest:
            self.on_moved(number, CopyResult())
            return
        for space, group in stretches(move.targets):
            self._api.allocator(space).begin([address.page for address in group])
        self._busy.update((address.space, address.page) for address in move.targets)
        raw = order.sources[ADDRESS_BYTES * len(move.known) :]
        targets = b"".join(address.to_bytes() for address in move.targets)
        timeout_ms = max(1, min(order.timeout_ms, self._api.limits.max_timeout_ms))
        self._api.out.append(MovePages(number, source, raw, home.instance, targets, timeout_ms))

    def _take_targets(self, move: _Move, num_sources: int) -> None:
        """Where the blocks go that the target lacks. Raises: what alloc_mem does, StaleEpoch, NotHeld."""
        order, num_known = move.order, len(move.known)
        if order.targets:
            given = self._api.addresses(order.targets)
            if len(given) != num_sources:
                raise InvalidRequest(f"{num_sources} source pages and {len(given)} targets")
            holders = self._target_holders(move)
            held(holders, move.home, given)
            if any(self._busy[a.space, a.page] for a in given) or not all(
                any(h.owns(a) for h in holders) for a in given
            ):
                raise InvalidRequest("targets are allocated pages, not named yet, that nothing else writes")
            move.targets = given[num_known:]
        elif num_sources > num_known:
            media = TransferFlags(order.flags) & TransferFlags.MIXED
            mem_type: wire.MemType = "hbm"
            if media is TransferFlags.DRAM:
                mem_type = "dram"
            elif media is TransferFlags.MIXED:
                mem_type = "mixed"
            move.own = Holder(-1, move.home.instance)
            raw = self._api.allocate(move.own, move.home, num_sources - num_known, mem_type)
            move.targets = wire.unpack_addresses(raw)

    def _target_holders(self, move: _Move) -> list[Holder]:
        """Who may have allocated given targets: the caller, or who works for the target."""
        mine = [
            h for h in self._api.holders.values() if h.instance == move.home.instance and not h.is_mempool
        ]
        return [move.holder, *(holder for holder in mine if holder is not move.holder)]

    def _receiver(self, instance: InstanceId) -> Holder | None:
        return next((h for h in self._api.holders.values() if h.receives and h.instance == instance), None)

    # -- the end ------------------------------------------------------------------------------------

    def on_moved(self, move_id: int, result: CopyResult) -> None:
        """See Api."""
        move = self._moves.pop(move_id, None)
        if move is None:
            raise InvariantBroken(f"move {move_id} is not under way")
        move.holder.num_open -= 1
        error = self._error_of(move, result)
        quarantined = set(result.quarantined)
        self.release(
            [p for a in move.targets if (p := (a.space, a.page))[1] not in quarantined and self._busy[p]]
        )
        if error is None:
            self._finish(move)
        else:
            if move.own is not None:
                for space, pages in move.own.owned.items():
                    self._api.give_up(space, list(pages))
            self._api.fail(move.holder, move.call_id, error)
        for space, entry in move.known:
            self._api.allocator(space).index.unpin([entry])
        if move.sources is not None:
            free = error is None and bool(move.order.flags & TransferFlags.FREE_SOURCE)
            self._let_go(move.sources, free=free)

    def _error_of(self, move: _Move, result: CopyResult) -> ClusterError | None:
        order = move.order
        if result.failed or result.quarantined:
            return CopyFailed(f"{len(move.targets)} pages from {move.source} did not arrive")
        if result.stale:
            return StaleEpoch(f"{len(result.stale)} source pages were reused while they were read")
        if _is_delivered(order) and self._receiver(order.target) is None:
            return NoReceiver(f"who received for {order.target} has left")
        holders = [move.own] if move.own is not None else self._target_holders(move)
        if not all(any(holder.owns(a) for holder in holders) for a in move.targets):
            return StaleEpoch("a target page was given up while it was written")
        return None

    def _finish(self, move: _Move) -> None:
        order, home = move.order, move.home
        receiver = self._receiver(order.target)
        targets = b"".join(address.to_bytes() for address in move.targets)
        hashes = self._api.hashes(order.hashes) if order.insert else []
        if order.insert:
            num_known = len(move.known)
            parent = hashes[num_known - 1] if num_known else BlockHash(order.parent)
            for holder in [move.own] if move.own is not None else self._target_holders(move):
                for address in move.targets:
                    if holder.owns(address):
                        self._api.disown(holder, address.space, [address.page])
            new = self._api.name_pages(home, parent, hashes[num_known:], move.targets, order.last_tokens)
            targets = self._api.pack_entries(home, [*move.known, *new])
        elif move.own is not None:
            assert receiver is not None
            for space, pages in move.own.owned.items():
                receiver.add(space, list(pages), list(pages.values()))
        if receiver is not None and _is_delivered(order):
            delivered = wire.Delivered(
                source=move.source,
                addresses=targets,
                private=order.private,
                inserted=order.insert,
                hashes=order.hashes,
            )
            self._api.answer(receiver, delivered)
        reply = wire.Addresses(call_id=move.call_id, addresses=targets, num_known=len(move.known))
        self._api.answer(move.holder, reply)

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1


def _singles(raw: bytes) -> set[bytes]:
    return {raw[i : i + ADDRESS_BYTES] for i in range(0, len(raw), ADDRESS_BYTES)}


def _is_delivered(order: wire.Transfer) -> bool:
    """Whether somebody must be there to get private data, or pages that would be nobody's."""
    return bool(order.private) or not (order.insert or order.targets)
