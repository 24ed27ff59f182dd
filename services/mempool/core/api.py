"""MemServe's nine calls (Table 1), decided: who gets which pages, what is named, what must move. No I/O.

    alloc_mem -> granted, held by the connection -> insert -> sealed, indexed, the pool's (MemServe's "historical")
    match(PIN), insert(PIN) -> pinned by the connection          free_mem, or the connection's end -> given up

Calls about an instance of another mempool go there (CallPeer), and what they took is given up with the caller.
Transfers are in api_moves.py. Errors become ApiFailed; a caller that breaks the protocol gets PeerProtocolError.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain

from services.mempool.core import api_state as state
from services.mempool.core.api_moves import Moves
from services.mempool.core.api_state import Allocator, ApiAction, ApiLimits, CallPeer, Holder, Home, Reply
from services.mempool.core.api_swaps import Swaps
from services.mempool.core.entry import Entry
from services.mempool.core.page_state import PageEvent
from services.mempool.core.tiers import CopyResult, TierAction
from shared.errors import (
    ClusterError,
    InstanceUnknown,
    InvalidRequest,
    OutOfPages,
    Overloaded,
    PeerProtocolError,
)
from shared.ids import BlockHash, InstanceId, PageId, SpaceId
from shared.kv.block_hash import HASH_BYTES, split_hashes
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import ADDRESS_BYTES, AddressStretch, InsertFlags, MatchFlags, PageAddress


class Api:
    """Every method returns the actions to perform, in order. `counters`: calls and failures by kind."""

    def __init__(self, limits: ApiLimits | None = None) -> None:
        self.limits = limits or ApiLimits()
        self.homes = state.Homes()
        self.peers: dict[InstanceId, int] = {}  # instance -> number of the peer mempool that serves it
        self.holders: dict[int, Holder] = {}
        self.counters: Counter[str] = Counter()
        self._by_key: dict[int, InstanceId] = {}
        self._lost: dict[int, list[Holder]] = {}  # process -> what its connections had held
        self.moves = Moves(self)
        self._swaps = Swaps(self)
        self.out: list[ApiAction] = []
        self.beside: state.Beside = state.nothing_beside

    # -- who is there -------------------------------------------------------------------------------

    def add_home(self, home: Home) -> None:
        """An instance whose pages are here. Raises: InvalidRequest when its key is another instance's."""
        self._know(home.instance)
        self.homes[home.instance] = home

    def add_peer(self, instance: InstanceId, peer: int) -> None:
        """An instance that another mempool serves. Raises: InvalidRequest when its key is another instance's."""
        self._know(instance)
        self.peers[instance] = peer

    def _know(self, instance: InstanceId) -> None:
        known = self._by_key.setdefault(wire.instance_key(instance), instance)
        if known != instance:
            raise InvalidRequest(f"instances {known} and {instance} have one key: rename one")

    def lose_peer(self, peer: int) -> list[ApiAction]:
        """A peer mempool is gone, and what its instances had: calls to it fail."""
        return self.lose([instance for instance, number in self.peers.items() if number == peer])

    def lose(self, gone: Collection[InstanceId]) -> list[ApiAction]:
        """Instances of peers are gone, and what they had: calls about them fail."""
        for instance in gone:
            del self.peers[instance]
            for holder in self.holders.values():
                holder.remote.pop(instance, None)
        self.moves.lose_peer(gone)
        return self._done()

    def connect(
        self, connection: int, instance: InstanceId, *, process: int | None = None, receives: bool = False,
        is_mempool: bool = False,
    ) -> None:  # fmt: skip
        """A caller. `process`: number of the living process, if it maps the pages and so may write them."""
        self.holders[connection] = Holder(connection, instance, process, receives, is_mempool)

    def disconnect(self, connection: int) -> list[ApiAction]:
        """All that the connection held is given up; what its process may still write is quarantined."""
        holder = self.holders.pop(connection, None)
        if holder is None:
            return []
        for space, pins in holder.pins.items():
            for entries in pins.values():
                self.allocator(space).index.unpin(entries)
        holder.pins.clear()
        for instance, addresses in holder.remote.items():
            if instance in self.peers:
                self.moves.free_at(instance, sorted(addresses))
        holder.owned = {space: pages for space, pages in holder.owned.items() if pages}
        if holder.process is None:
            for space, pages in holder.owned.items():
                self.give_up(space, list(pages))
        else:
            for space, pages in holder.owned.items():
                self.allocator(space).lose(pages)
            self._lost.setdefault(holder.process, []).append(holder)
        return self._done()

    def on_process_dead(self, process: int, proof: PageEvent = PageEvent.HOLDER_DEAD) -> list[ApiAction]:
        """Proof of death, or its word that it writes no page: what its ended connections had held is free."""
        for holder in self._lost.pop(process, []):
            for space, pages in holder.owned.items():
                free = partial(self.allocator(space).recover, proof=proof)
                self.moves.busy.when_idle(space, list(pages), free)
        return self._done()

    # -- calls --------------------------------------------------------------------------------------

    def on_call(self, connection: int, call: wire.ApiCall | wire.PullPages, now_ms: int) -> list[ApiAction]:
        """Any call. Raises: PeerProtocolError for a caller that is not connected."""
        holder = self.holders.get(connection)
        if holder is None:
            raise PeerProtocolError(f"{type(call).__name__} of nobody")
        self.counters[type(call).__name__] += 1
        try:
            if holder.num_open >= self.limits.max_calls_open and not isinstance(call, wire.FreeMem):
                raise Overloaded(f"{holder.num_open} calls are open")
            self._call(holder, call, now_ms)
        except ClusterError as error:
            if isinstance(error, PeerProtocolError):
                raise
            self.fail(holder, call.call_id, error)
        return self._done()

    def _call(self, holder: Holder, call: wire.ApiCall | wire.PullPages, now_ms: int) -> None:
        match call:
            case wire.AllocMem():
                self._alloc(holder, call, now_ms)
            case wire.FreeMem():
                self._free(holder, call)
            case wire.InsertBlocks():
                self._insert(holder, call)
            case wire.MatchBlocks():
                self._match(holder, call)
            case wire.DeleteBlocks():
                self._delete(holder, call)
            case wire.SwapOut() | wire.SwapIn():
                self._swaps.swap(holder, call, now_ms)
            case wire.Transfer():
                self.moves.transfer(holder, call, now_ms)
            case wire.PullPages():
                self.moves.pull(holder, call, now_ms)

    def _alloc(self, holder: Holder, call: wire.AllocMem, now_ms: int) -> None:
        if call.instance not in self.homes:
            self.moves.forward(holder, call.instance, call, now_ms)
            return
        raw = self.allocate(holder, self.homes[call.instance], call.num_blocks, call.mem_type)
        raw += self.beside(holder, self.homes[call.instance], raw)
        self.answer(holder, wire.Addresses(call_id=call.call_id, addresses=raw))

    def allocate(self, holder: Holder, home: Home, count: int, mem_type: wire.MemType) -> bytes:
        """Pages that are the holder's from now on: their addresses. Mixed: HBM first.

        Raises: OutOfPages, and nothing was taken; InvalidRequest.
        Cost: below 1 us a page while pages are free; an eviction each where none is.
        """
        if not 0 < count <= self.limits.max_blocks_per_call:
            raise InvalidRequest(f"{count} blocks; 1 to {self.limits.max_blocks_per_call} at once")
        taken: list[tuple[SpaceId, list[PageId]]] = []
        parts: list[bytes] = []
        left = count
        for medium, space in home.spaces():
            if left and state.serves(mem_type, medium):
                num_held = len(holder.owned.get(space.space, ()))
                wanted = min(left, home.room(medium, space, num_held, self.limits.max_held_ratio))
                while space.num_free < wanted and space.evict() is not None:
                    self.counters["pages_evicted"] += 1
                pages, epochs = space.take(wanted)
                holder.add(space.space, pages, epochs)
                taken.append((space.space, pages))
                parts.append(home.pack(medium, space, pages, epochs))
                left -= len(pages)
        if left:
            for number, pages in taken:
                self.disown(holder, number, pages)
                self.give_up(number, pages)
            raise OutOfPages(f"{left} of {count} blocks of {mem_type} memory are not to be had")
        return b"".join(parts)

    def _free(self, holder: Holder, call: wire.FreeMem) -> None:
        count = 0
        own: dict[SpaceId, list[PageId]] = {}
        for address in self.addresses(call.addresses, each=2):  # as many as one call gives: see api_leased.py
            if holder.owns(address):
                del holder.owned[address.space][address.page]
                own.setdefault(address.space, []).append(address.page)
                count += 1
            elif holder.pinned(address) and state.is_current(self.allocator(address.space), address):
                self.unpin(holder, address.space, address.page)
                count += 1
            else:
                count += self._free_remote(holder, address)
        for space, pages in own.items():
            self.give_up(space, pages)
        self.answer(holder, wire.Counted(call_id=call.call_id, count=count))

    def _free_remote(self, holder: Holder, address: PageAddress) -> bool:
        instance = self._by_key.get(address.instance_key)
        raw = address.to_bytes()
        if instance is None or raw not in holder.remote.get(instance, ()):
            return False
        holder.remote[instance].discard(raw)
        self.out.append(CallPeer(instance, wire.FreeMem(call_id=0, addresses=raw)))
        return True

    def _insert(self, holder: Holder, call: wire.InsertBlocks) -> None:
        stretches, hashes = self.stretches(call.addresses), self.hashes(call.hashes)
        home, pages = self.home_of(stretches), list(chain.from_iterable(each.pages for each in stretches))
        if len(pages) != len(hashes) or not state.owned([holder], stretches):
            state.held([holder], home, stretches)
            raise InvalidRequest(f"{len(hashes)} hashes for {len(pages)} pages that were allocated")
        state.check_can_be_blocks(home, stretches)
        if any(self.moves.busy.has_any(each.space, each.pages) for each in stretches):
            raise InvalidRequest("a copy still touches one of the pages")
        entries = self.name_pages(home, call.parent, hashes, stretches, call.last_tokens)
        for stretch in stretches:
            self.disown(holder, stretch.space, stretch.pages)
        if call.flags & InsertFlags.PIN:
            self.pin(holder, entries)
        num_known = sum(entry.page != page for (_, entry), page in zip(entries, pages, strict=True))
        raw = home.pack_entries(entries)
        self.answer(holder, wire.Addresses(call_id=call.call_id, addresses=raw, num_known=num_known))

    def name_pages(
        self,
        home: Home,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        stretches: Sequence[AddressStretch],
        last_tokens: int,
    ) -> list[tuple[SpaceId, Entry]]:
        """Index granted pages as consecutive blocks and seal them; a page whose block was known is given up.

        Raises: InvalidRequest; nothing has changed.
        """
        self.check_path(home, parent, hashes, last_tokens)
        out: list[tuple[SpaceId, Entry]] = []
        at = 0
        for stretch in stretches:
            number, pages = stretch.space, stretch.pages
            _, space = home.space(number)
            part, end = hashes[at : at + len(pages)], at + len(pages)
            before = hashes[at - 1] if at else parent
            tokens = last_tokens if end == len(hashes) else 0
            entries = space.index.insert_path(before, part, pages, home.block_tokens, last_tokens=tokens)
            space.seal([entry for entry, page in zip(entries, pages, strict=True) if entry.page == page])
            self.give_up(number, [p for e, p in zip(entries, pages, strict=True) if e.page != p])
            out += [(number, entry) for entry in entries]
            at = end
        return out

    def check_path(
        self, home: Home, parent: BlockHash, hashes: Sequence[BlockHash], last_tokens: int
    ) -> None:
        """Raises: InvalidRequest when these cannot be consecutive blocks of this instance."""
        if len(parent) != HASH_BYTES or not 0 <= last_tokens <= home.block_tokens:
            raise InvalidRequest(f"a parent of {len(parent)} bytes, {last_tokens} tokens in the last block")
        if len({parent, *hashes}) <= len(hashes):
            raise InvalidRequest("a block is named twice")

    def _match(self, holder: Holder, call: wire.MatchBlocks) -> None:
        home = self.home(call.instance)
        found = [
            (stretch.space, entry)
            for stretch in home.places.prefix(self.hashes(call.hashes))
            for entry in stretch.entries
        ]
        if call.flags & MatchFlags.PIN:
            self.pin(holder, found)
        raw = home.pack_entries(found)
        self.answer(holder, wire.Addresses(call_id=call.call_id, addresses=raw, num_known=len(found)))

    def _delete(self, holder: Holder, call: wire.DeleteBlocks) -> None:
        home = self.home(call.instance)
        removed = home.places.delete(self.hashes(call.hashes))
        for place in removed:
            home.space(place.space)[1].retire([place.entry])
        self.answer(holder, wire.Counted(call_id=call.call_id, count=len(removed)))

    # -- answers of others --------------------------------------------------------------------------

    def on_moved(self, move_id: int, result: CopyResult) -> list[ApiAction]:
        """A MovePages ended. Raises: InvariantBroken for one that is not under way."""
        self.moves.on_moved(move_id, result)
        return self._done()

    def on_settled(self, space: SpaceId, pages: Sequence[PageId]) -> list[ApiAction]:
        """Nothing can write these targets of a failed move any more."""
        self.moves.busy.release(space, pages)
        return self._done()

    def on_peer_reply(self, reply: wire.ApiReply) -> list[ApiAction]:
        """A peer mempool answered a CallPeer. Late and unknown answers are harmless."""
        self.moves.on_peer_reply(reply)
        return self._done()

    def on_tiers(self, space: SpaceId, actions: Sequence[TierAction]) -> list[ApiAction]:
        """What a space's Tiers decided: what is left of it when callers of swaps are answered."""
        self._swaps.on_tiers(space, actions)
        return self._done()

    def tick(self, now_ms: int) -> list[ApiAction]:
        """Fail calls to peers that wait too long."""
        self.moves.expire(now_ms)
        return self._done()

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do; None: not before the next call."""
        return self.moves.next_deadline_ms()

    # -- for the parts ------------------------------------------------------------------------------

    def answer(self, holder: Holder, message: wire.FromMempoolApi) -> None:
        """Send to a connection, if it is still there."""
        if self.holders.get(holder.connection) is holder:
            self.out.append(Reply(holder.connection, message))

    def fail(self, holder: Holder, call_id: int, error: ClusterError) -> None:
        """Answer a call by its error."""
        self.counters[f"failed {error.code}"] += 1
        self.answer(holder, wire.ApiFailed(call_id=call_id, code=error.code, reason=error.message))

    def addresses(self, raw: bytes, *, each: int = 1) -> list[PageAddress]:
        """Args: each: of a block. Raises: PeerProtocolError on a broken list, InvalidRequest on a long one."""
        return wire.one_by_one(self.stretches(raw, each=each))

    def stretches(self, raw: bytes, *, each: int = 1) -> list[AddressStretch]:
        """As addresses()."""
        most = each * self.limits.max_blocks_per_call
        if len(raw) > ADDRESS_BYTES * most:
            raise InvalidRequest(f"more than {most} addresses")
        return wire.unpack_stretches(raw)

    def hashes(self, raw: bytes) -> list[BlockHash]:
        """Raises: InvalidRequest on a broken or long list."""
        if len(raw) % HASH_BYTES or len(raw) > HASH_BYTES * self.limits.max_blocks_per_call:
            raise InvalidRequest(f"{len(raw)} bytes of hashes")
        return split_hashes(raw)

    def home(self, instance: InstanceId) -> Home:
        """Raises: InstanceUnknown unless its pages are here."""
        home = self.homes.get(instance)
        if home is None:
            raise InstanceUnknown(f"the pages of {instance!r} are not in this mempool")
        return home

    def home_of(self, addresses: Sequence[AddressStretch]) -> Home:
        """The one local instance of these addresses. Raises: InvalidRequest, InstanceUnknown."""
        keys = {address.instance_key for address in addresses}
        if len(keys) != 1:
            raise InvalidRequest(f"addresses of {len(keys)} instances in one call")
        instance = self._by_key.get(keys.pop())
        return self.home(instance if instance is not None else InstanceId(""))

    def allocator(self, space: SpaceId) -> Allocator:
        """Of a space that a holder has pages of."""
        return self.homes.allocator(space)

    def pin(self, holder: Holder, entries: Sequence[tuple[SpaceId, Entry]]) -> None:
        """One more pin on each, the holder's."""
        for space, entry in entries:
            self.allocator(space).index.pin([entry])
            holder.pins.setdefault(space, {}).setdefault(entry.page, []).append(entry)

    def unpin(self, holder: Holder, space: SpaceId, page: PageId) -> None:
        """One pin of the holder's less."""
        entries = holder.pins[space][page]
        self.allocator(space).index.unpin([entries.pop()])
        if not entries:
            del holder.pins[space][page]

    def disown(self, holder: Holder, space: SpaceId, pages: Sequence[PageId]) -> None:
        """They are not the holder's any more."""
        owned = holder.owned.get(space, {})
        for page in pages:
            del owned[page]

    def give_up(self, space: SpaceId, pages: Sequence[PageId]) -> None:
        """Free pages that nobody holds, those that a copy reads or writes after its end."""
        if pages:  # else the space may be over
            self.moves.busy.when_idle(space, pages, self.allocator(space).give_up)

    def _done(self) -> list[ApiAction]:
        out, self.out = self.out, []
        return out
