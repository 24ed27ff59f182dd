"""transfer and transfer_with_insert, and calls to other mempools. No I/O.

    caller -> source's mempool: pins the sources -> target's mempool (perhaps the same): takes targets, has them
    filled (MovePages), names them if asked to, delivers `private`, answers -> caller gets the addresses

Steps of MemServe 4.3 (allocation, transmission, insertion), pulled instead of pushed: the reader checks the
sources' epochs after the last byte. All or nothing: if one page was stale or failed, nothing is named, delivered
or kept. A page that a copy may still touch is busy, and is freed when it is idle. Everything goes by stretches of
one space: looked up once a stretch, checked page by page.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from services.mempool.core import api_state as state
from services.mempool.core.api_state import CallPeer, Holder, Home, MovePages, held, owned
from services.mempool.core.busy_pages import BusyPages
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
from shared.wire.mempool_api import ADDRESS_BYTES, AddressStretch, TransferFlags, behind

if TYPE_CHECKING:
    from services.mempool.core.api import Api

MAX_FREED = 4_096  # at once: its limit may be another one than ours
MAX_LATE = 4_096  # calls to peers that were given up, whose answers may still come


@dataclass(slots=True)
class _Sources:
    """Pages that are read: pinned or busy until released."""

    holder: Holder
    home: Home
    stretches: list[AddressStretch]
    pinned: list[tuple[SpaceId, list[Entry]]]
    busy: list[tuple[SpaceId, list[PageId]]]


@dataclass(slots=True)
class _Move:
    holder: Holder  # gets the answer
    call_id: int
    order: wire.Transfer
    source: InstanceId
    home: Home  # of the target
    sources: _Sources | None  # None: a peer pins them
    known: list[tuple[SpaceId, Entry]]  # of an insert: blocks that the target has, pinned
    targets: list[AddressStretch] = field(default_factory=list)
    answer: bytes = b""  # addresses of the targets
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
        self.busy = BusyPages()
        self._next_number = 1

    # -- the source's end ---------------------------------------------------------------------------

    def transfer(self, holder: Holder, call: wire.Transfer, now_ms: int) -> None:
        """From pages of this mempool to an instance anywhere."""
        stretches = self._api.stretches(call.sources)
        home = self._api.home_of(stretches)
        held([holder], home, stretches)
        if len(self._moves) + len(self.forwarded) >= self._api.limits.max_moves:
            raise Overloaded(f"{self._api.limits.max_moves} transfers are under way")
        sources = self._hold(holder, home, stretches)
        try:
            if call.target in self._api.homes:
                self._begin(holder, call.call_id, call, home.instance, sources)
            else:
                self.forward(holder, call.target, call, now_ms, sources)
        except ClusterError:
            self._let_go(sources)
            raise

    def _hold(self, holder: Holder, home: Home, stretches: list[AddressStretch]) -> _Sources:
        """What the caller owns is busy from now on; what it has pinned gets another pin."""
        sources = _Sources(holder, home, stretches, [], [])
        for stretch in stretches:
            space, pages = stretch.space, stretch.pages
            if holder.owns_all(stretch):
                sources.busy.append((space, pages))
                continue
            if not holder.owns_none(stretch):
                mine = [address.page for address in stretch.addresses() if holder.owns(address)]
                sources.busy.append((space, mine))
                pages = sorted(set(pages).difference(mine))
            pins = holder.pins[space]
            sources.pinned.append((space, [pins[page][-1] for page in pages]))
        for space, entries in sources.pinned:
            self._api.allocator(space).index.pin(entries)
        for space, pages in sources.busy:
            self.busy.touch(space, pages)
        return sources

    def _let_go(self, sources: _Sources, *, free: bool = False) -> None:
        """The copy reads them no more. `free`: the caller gives up what it held of them."""
        for space, entries in sources.pinned:
            self._api.allocator(space).index.unpin(entries)
        for stretch in sources.stretches if free else ():
            for address in stretch.addresses():
                if sources.holder.owns(address):
                    self._api.disown(sources.holder, address.space, [address.page])
                    self._api.give_up(address.space, [address.page])
                elif sources.holder.pinned(address):
                    self._api.unpin(sources.holder, address.space, address.page)
        for space, pages in sources.busy:
            self.busy.release(space, pages)

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

    def free_at(self, instance: InstanceId, addresses: Sequence[bytes]) -> None:
        """Give single pages at another mempool back, in calls that it takes."""
        most = min(MAX_FREED, self._api.limits.max_blocks_per_call)
        for first in range(0, len(addresses), most):
            free = wire.FreeMem(call_id=0, addresses=b"".join(addresses[first : first + most]))
            self._api.out.append(CallPeer(instance, free))

    def expire(self, now_ms: int) -> None:
        """See Api.tick."""
        for number in [n for n, waiting in self.forwarded.items() if waiting.deadline_ms <= now_ms]:
            instance = self.forwarded[number].instance
            self._give_up_call(number, PeerTimeout(f"the mempool of {instance} did not answer in time"))

    def lose_peer(self, instances: Collection[InstanceId]) -> None:
        """Nobody answers for these any more."""
        for number in [n for n, waiting in self.forwarded.items() if waiting.instance in instances]:
            self._give_up_call(number, PeerGone("nobody reaches the target any more"))

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
        if call.source in self._api.homes:  # its pages would be taken for these here
            raise InvalidRequest(f"{call.source!r} is, or was, an instance of the target's own mempool")
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
        num_sources, hashes = len(order.sources) // ADDRESS_BYTES, self._api.hashes(order.hashes)
        if not num_sources or (order.insert and len(hashes) != num_sources):
            raise InvalidRequest(f"{num_sources} source pages, {len(hashes)} hashes")
        stretches = sources.stretches if sources is not None else self._api.stretches(order.sources)
        move = _Move(holder, call_id, order, source, home, sources, [])
        if order.insert:
            self._api.check_path(home, order.parent, hashes, order.last_tokens)
            state.check_can_be_blocks(home, self._api.stretches(order.targets))
            found = home.places.prefix(hashes)
            move.known = [(stretch.space, entry) for stretch in found for entry in stretch.entries]
        for space, entry in move.known:  # else they might be evicted for the others
            self._api.allocator(space).index.pin([entry])
        try:
            self._take_targets(move, num_sources)
        except ClusterError:
            self._unpin_known(move)
            raise
        holder.num_open += 1
        number = self._number()
        self._moves[number] = move
        if len(move.known) == num_sources:
            self.on_moved(number, CopyResult())
            return
        for stretch in move.targets:
            self._api.allocator(stretch.space).begin(stretch.pages)
            self.busy.touch(stretch.space, stretch.pages)
        rest = behind(stretches, len(move.known))
        timeout_ms = max(1, min(order.timeout_ms, self._api.limits.max_timeout_ms))
        of_peer = call_id if sources is None else None
        self._api.out.append(
            MovePages(number, source, rest, home.instance, move.targets, timeout_ms, of_peer)
        )

    def _take_targets(self, move: _Move, num_sources: int) -> None:
        """Where the blocks go that the target lacks. Raises: what alloc_mem does, StaleEpoch, NotHeld."""
        order, num_known = move.order, len(move.known)
        if order.targets:
            given, num_given = self._api.stretches(order.targets), len(order.targets) // ADDRESS_BYTES
            if num_given != num_sources:
                raise InvalidRequest(f"{num_sources} source pages and {num_given} targets")
            holders = self._target_holders(move)
            held(holders, move.home, given)
            if any(self.busy.has_any(each.space, each.pages) for each in given) or not owned(holders, given):
                raise InvalidRequest("targets are allocated pages, not named yet, that nothing else writes")
            move.targets, move.answer = behind(given, num_known), order.targets[ADDRESS_BYTES * num_known :]
        elif num_sources > num_known:
            media = TransferFlags(order.flags) & TransferFlags.MIXED
            mem_type: wire.MemType = "hbm"
            if media is TransferFlags.DRAM:
                mem_type = "dram"
            elif media is TransferFlags.MIXED:
                mem_type = "mixed"
            move.own = Holder(-1, move.home.instance)
            move.answer = self._api.allocate(move.own, move.home, num_sources - num_known, mem_type)
            move.targets = wire.unpack_stretches(move.answer)

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
        for stretch in move.targets:
            pages = [p for p in stretch.pages if p not in quarantined] if quarantined else stretch.pages
            self.busy.release(stretch.space, pages)
        if error is None:
            self._finish(move)
        else:
            if move.own is not None:
                for space, pages in move.own.owned.items():
                    self._api.give_up(space, list(pages))
            self._api.fail(move.holder, move.call_id, error)
        self._unpin_known(move)
        if move.sources is not None:
            free = error is None and bool(move.order.flags & TransferFlags.FREE_SOURCE)
            self._let_go(move.sources, free=free)

    def _unpin_known(self, move: _Move) -> None:
        for space, entry in move.known:
            self._api.allocator(space).index.unpin([entry])

    def _error_of(self, move: _Move, result: CopyResult) -> ClusterError | None:
        order = move.order
        if result.failed or result.quarantined:
            return CopyFailed(f"{len(move.answer) // ADDRESS_BYTES} pages from {move.source} did not arrive")
        if result.stale:
            return StaleEpoch(f"{len(result.stale)} source pages were reused while they were read")
        if _is_delivered(order) and self._receiver(order.target) is None:
            return NoReceiver(f"who received for {order.target} has left")
        holders = [move.own] if move.own is not None else self._target_holders(move)
        if not owned(holders, move.targets):
            return StaleEpoch("a target page was given up while it was written")
        return None

    def _finish(self, move: _Move) -> None:
        order, home = move.order, move.home
        receiver = self._receiver(order.target)
        targets = move.answer
        hashes = self._api.hashes(order.hashes) if order.insert else []
        if order.insert:
            num_known = len(move.known)
            parent = hashes[num_known - 1] if num_known else BlockHash(order.parent)
            for holder in [move.own] if move.own is not None else self._target_holders(move):
                for stretch in move.targets:
                    mine = [address.page for address in stretch.addresses() if holder.owns(address)]
                    self._api.disown(holder, stretch.space, mine)
            new = self._api.name_pages(home, parent, hashes[num_known:], move.targets, order.last_tokens)
            targets = home.pack_entries([*move.known, *new])
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
