"""The nine calls (api.py) on the spaces of a running mempool: whose pages are whose, and what calls wait for. No I/O.

An instance's HBM is the space of its engine, whatever that is made of, and its DRAM the host memory behind it.
Engines hold nearly all pages of their space: a call that needs some there waits, `patience_ms` at most, until engines
have given back as many as it lacks; then it is decided at once, as if it had come then. Pages that a caller holds
are granted like an engine's; when it leaves they are free, or, if its process has mapped them, when that is dead.
"""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

from services.mempool.core import actions
from services.mempool.core.actions import Action, ApiSend, PoolLimits
from services.mempool.core.api import Api
from services.mempool.core.api_leased import Leased
from services.mempool.core.api_peers import FIRST_CONNECTION, ApiPeers
from services.mempool.core.api_state import (
    ApiAction,
    ApiLimits,
    CallPeer,
    Home,
    MovePages,
    Reply,
    side_by_side,
)
from services.mempool.core.claims import Claim
from services.mempool.core.dram import Dram
from services.mempool.core.locations import Locations
from services.mempool.core.own_pages import OwnPages
from services.mempool.core.page_state import PageEvent
from services.mempool.core.pool import Pool
from services.mempool.core.tiers import CopyPages, CopyResult, SwapDone, TierAction
from shared.errors import InvalidRequest, PeerProtocolError
from shared.ids import InstanceId, PageId, SpaceId
from shared.wire import mempool_api as wire
from shared.wire import mempool_peer as peer_wire
from shared.wire.mempool_api import ADDRESS_BYTES, TransferFlags

MAX_WAITING = 256  # calls that wait for engines to give pages back; more are decided at once


@dataclass(slots=True)
class _Waiting:
    connection: int
    call: wire.ApiCall | wire.PullPages
    pool: Pool
    claim: Claim
    until_ms: int


@dataclass(slots=True)
class _Move:
    """One MovePages: a copy for each space that it has targets in."""

    targets: dict[SpaceId, list[PageId]]
    open: set[int] = field(default_factory=set)
    failed: bool = False
    stale: bool = False
    in_doubt: dict[SpaceId, set[PageId]] = field(default_factory=dict)


class ApiSpaces:
    """After every method, take_actions() behind the words of all spaces.

    Args:
        pools: of all spaces, and `space_of` of every instance that has been here: views.
        numbers: of copies, shared with whoever else orders some.
        mapped: processes that may write pages that they hold, and live.
        touched: called with every pool that a later flush() must bring up to date.
        wanted: how many pages of a space of lent pages are to leave it.
    """

    def __init__(
        self,
        limits: PoolLimits,
        pools: Mapping[int, Pool],
        space_of: Mapping[InstanceId, int],
        dram: Dram,
        numbers: Iterator[int],
        mapped: Container[int],
        touched: Callable[[Pool], None],
        wanted: Callable[[int], int] = lambda number: 0,
    ) -> None:
        self._limits = limits
        self._pools = pools
        self._space_of = space_of
        self._dram = dram
        self._numbers = numbers
        self._mapped = mapped
        self._touched = touched
        self._out: list[Action] = []
        self._copies: dict[int, tuple[int, SpaceId]] = {}  # copy -> move, targets' space
        self._moves: dict[int, _Move] = {}
        self._waiting: list[_Waiting] = []
        self.api = Api(ApiLimits(max_blocks_per_call=limits.max_blocks_per_call))
        self.peers = ApiPeers(self.api, self._on_pull_ended)
        self._leased = Leased(self.api, pools, numbers, wanted, touched, limits.copy_timeout_ms)
        dram.swapped = self._on_swapped

    # -- callers --------------------------------------------------------------------------------------

    def connect(
        self, connection: int, hello: wire.ApiHello, process: int | None, *, is_mempool: bool = False
    ) -> None:
        """A caller's first message. `process`: number of the living process, where that can be proven."""
        self.api.connect(
            connection, hello.instance, process=process, receives=hello.receives, is_mempool=is_mempool
        )

    def knows(self, connection: int) -> bool:
        """Whether it has said who it is."""
        return connection in self.api.holders

    def on_call(self, connection: int, call: wire.ApiCall | wire.PullPages, now_ms: int) -> None:
        """Any call after the first message. Raises: PeerProtocolError; end the connection."""
        self._find_homes()
        order = call.order if isinstance(call, wire.PullPages) else call
        wanted = self._wanted(order)
        if wanted is None or len(self._waiting) >= MAX_WAITING or not self._can_wait(order):
            self._perform(self.api.on_call(connection, call, now_ms))
            return
        pool, count = wanted
        until_ms = now_ms + self._limits.pull_patience_ms
        self._waiting.append(_Waiting(connection, call, pool, pool.claim(count), until_ms))
        self.advance(now_ms)

    def on_copied_directly(self, connection: int, message: wire.CopiedDirectly) -> None:
        """For the counters. Raises: PeerProtocolError of nobody, or nonsense."""
        if not self.knows(connection) or min(message.transfers, message.num_bytes, message.mediated) < 0:
            raise PeerProtocolError("CopiedDirectly of nobody, or of less than nothing")
        self.api.counters["transfers_direct"] += message.transfers
        self.api.counters["transfers_direct_bytes"] += message.num_bytes
        self.api.counters["transfers_mediated"] += message.mediated

    def on_closed(self, connection: int) -> None:
        """Harmless for a connection without a hello."""
        for waiting in [w for w in self._waiting if w.connection == connection]:
            self._waiting.remove(waiting)
            waiting.pool.cancel(waiting.claim)
        holder = self.api.holders.get(connection)
        if holder is not None:
            self._leased.on_closed(holder)
        if holder is not None and (holder.process is None or holder.process not in self._mapped):
            holder.process = None  # it cannot write pages
        self._perform(self.api.disconnect(connection))

    def on_process_dead(self, process: int) -> None:
        """Proof of death."""
        self._perform(self.api.on_process_dead(process))

    def on_process_unmapped(self, process: int) -> None:
        """It lives, and says that it writes no page that it held by an ended connection."""
        self._perform(self.api.on_process_dead(process, PageEvent.ACKNOWLEDGED))

    def has_home(self, instance: InstanceId, space: int) -> bool:
        """Whether a space is an instance's, or the host memory behind it. Lent pages are not its own."""
        self._find_homes()
        home = self.api.homes.get(instance)
        return home is not None and any(
            each.space == space for medium, each in home.spaces() if medium is not wire.Medium.LEASED
        )

    def _find_homes(self) -> None:
        for instance, number in self._space_of.items():
            known = self.api.homes.get(instance)
            pool, tiers = self._pools[number], self._dram.tiers.get(number)
            is_current = known is not None and known.hbm is not None and known.hbm.space == number
            if is_current and known is not None:  # a home of before keeps what was lent to its space
                self._leased.find(known, number)
            if is_current and known is not None and pool.memory is not None:  # an engine may have come since
                known.is_for_callers = pool.memory.engines.none_computes
            if pool.memory is None or (is_current and known is not None and known.tiers is tiers):
                continue
            hbm = OwnPages(SpaceId(number), pool.memory.table, pool.index, pool.note)
            indexes = {hbm.space: pool.index}
            if tiers is not None:
                indexes[tiers.slow.space] = tiers.slow.index
            slow = tiers.slow if tiers is not None else None
            home = Home(instance, Locations(indexes), hbm, slow, tiers, pool.memory.block_tokens)
            home.is_for_callers = pool.memory.engines.none_computes
            self._leased.find(home, number)
            try:
                self.api.add_home(home)
            except InvalidRequest:
                self.api.counters["instances_of_one_key"] += 1

    # -- pages that engines have ------------------------------------------------------------------------

    def _wanted(self, call: wire.ApiCall) -> tuple[Pool, int] | None:
        """How many pages of which space this call needs that are not free; None: it needs none."""
        instance, count = InstanceId(""), 0
        match call:
            case wire.AllocMem() if call.mem_type == "hbm":
                instance, count = call.instance, call.num_blocks
            case wire.Transfer() if (
                not call.targets and TransferFlags.MIXED & call.flags != TransferFlags.DRAM
            ):
                instance, count = call.target, len(call.sources) // ADDRESS_BYTES
            case wire.SwapIn():
                key = wire.unpack_addresses(call.addresses[:ADDRESS_BYTES])
                found = [i for i in self.api.homes if key and wire.instance_key(i) == key[0].instance_key]
                instance, count = found[0] if found else instance, len(call.addresses) // ADDRESS_BYTES
            case _:
                return None
        pool = self._pools[self._space_of[instance]] if instance in self.api.homes else None
        if pool is None or pool.memory is None or count <= pool.memory.table.num_free:
            return None
        most = int(self.api.limits.max_held_ratio * pool.memory.table.num_pages)
        return (pool, count) if count <= min(most, self._limits.max_blocks_per_call) else None

    def _can_wait(self, call: wire.ApiCall) -> bool:
        """False: it is refused at once. Raises: PeerProtocolError now; later it would be in another peer's event."""
        try:
            match call:
                case wire.Transfer():
                    self.api.stretches(call.sources)
                case wire.SwapIn():
                    self.api.stretches(call.addresses)
        except InvalidRequest:
            return False
        return True

    def advance(self, now_ms: int) -> None:
        """After every event: decide the calls whose pages have come, or that have waited long enough."""
        for waiting in list(self._waiting):
            if waiting.claim.lacking and now_ms < waiting.until_ms:
                continue
            self._waiting.remove(waiting)
            waiting.pool.cancel(waiting.claim)  # its pages are free: nobody else comes in between
            self._perform(self.api.on_call(waiting.connection, waiting.call, now_ms))
        self._leased.advance()

    # -- copies -----------------------------------------------------------------------------------------

    def _perform(self, decided: Sequence[ApiAction]) -> None:
        for pool in self._pools.values() if decided else ():
            self._touched(pool)
        for action in decided:
            match action:
                case Reply() if action.connection >= FIRST_CONNECTION:
                    self.peers.reply(action.connection, action.message)
                case Reply():
                    self._out.append(ApiSend(action.connection, action.message))
                case MovePages() if action.order is not None:
                    move = self._moves[action.move_id] = _Move({})
                    self.peers.move(action, partial(self._begin_copy, action.move_id, move))
                case MovePages():
                    self._move(action)
                case CallPeer():
                    self.peers.call(action)
                case CopyPages():
                    fast = action.source if self._pools[action.target].is_behind else action.target
                    self._dram.perform(fast, [action])
                case SwapDone():
                    pass  # of a caller that has left

    def _move(self, action: MovePages) -> None:
        move = self._moves[action.move_id] = _Move({})
        copies: dict[int, tuple[list[PageId], list[tuple[int, PageId]]]] = {}
        for source, target in side_by_side(action.sources, action.targets):
            into, pages = copies.setdefault(int(target.space), ([], []))
            into += target.pages
            pages += zip(repeat(int(source.space)), source.pages)
        for space, (into, pages) in copies.items():
            copy_id = next(self._numbers)
            self._begin_copy(action.move_id, move, copy_id, space, into)
            self._out.append(actions.CopyPages(copy_id, space, into, pages, action.timeout_ms))

    def _begin_copy(self, move_id: int, move: _Move, copy_id: int, space: int, into: list[PageId]) -> None:
        move.targets.setdefault(SpaceId(space), []).extend(into)
        move.open.add(copy_id)
        self._copies[copy_id] = (move_id, SpaceId(space))

    def _on_pull_ended(self, copy_id: int, failed: bool, in_doubt: Collection[int], stale: bool) -> None:
        self._moves[self._copies[copy_id][0]].stale |= stale
        self.on_copied(copy_id, failed=failed, in_doubt=in_doubt)

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int]) -> bool:
        """False: not a copy of ours."""
        if self._leased.on_copied(copy_id, failed=failed, in_doubt=in_doubt):
            return True
        found = self._copies.pop(copy_id, None)
        if found is None:
            return False
        number, space = found
        move = self._moves[number]
        move.open.discard(copy_id)
        move.failed |= failed
        move.in_doubt.setdefault(space, set()).update(PageId(page) for page in in_doubt)
        if not move.open:
            del self._moves[number]
            doubted = set().union(*move.in_doubt.values())
            result = CopyResult((0,) if move.stale else (), move.failed, doubted)
            self._perform(self.api.on_moved(number, result))
            for each, pages in move.targets.items() if doubted else ():
                # the result names pages alone: in other spaces they are sound
                sound = [page for page in pages if page in doubted and page not in move.in_doubt[each]]
                self._perform(self.api.on_settled(each, sound))
        return True

    def evacuates(self, copy_id: int) -> bool:
        """Whether it brings what callers keep in lent pages to the pages beside them."""
        return self._leased.has_copy(copy_id)

    def on_settled(self, number: int, pages: Sequence[PageId]) -> list[PageId]:
        """Nothing can write these any more: the ones that are not ours."""
        busy = self.api.moves.busy
        mine = [page for page in pages if busy.has(SpaceId(number), page)]
        self._perform(self.api.on_settled(SpaceId(number), mine))
        return [page for page in pages if page not in mine]

    def _on_swapped(self, number: int, decided: Sequence[TierAction]) -> None:
        self._perform(self.api.on_tiers(SpaceId(number), decided))

    # -- time, and what is to be done -------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Fail calls to peers that wait too long, and ask peers who they serve."""
        self._perform(self.api.tick(now_ms))
        self.peers.expire(self.api.moves.forwarded)
        self.peers.tick(now_ms)

    def next_deadline_ms(self) -> int | None:
        """When tick() or advance() has something to do."""
        due = [self.api.next_deadline_ms(), *(waiting.until_ms for waiting in self._waiting)]
        due.append(self.peers.next_deadline_ms())
        return min((when for when in due if when is not None), default=None)

    def take_actions(self) -> list[Action]:
        """To perform behind the words of their pages."""
        out, self._out = self._out + self._leased.take_actions() + self.peers.take_actions(), []
        return out

    # -- other hosts ------------------------------------------------------------------------------------

    def on_peer_call(self, link: int, message: peer_wire.PeerCall | peer_wire.WhoIsHere, now_ms: int) -> None:
        """A mempool of another host calls, for callers of its own, or asks which instances it may name."""
        self._find_homes()
        if isinstance(message, peer_wire.WhoIsHere):
            self.peers.tell_who_is_here(link)
            return
        connection = self.peers.connection_of(link)
        if not self.knows(connection):
            self.api.connect(connection, InstanceId(f"link-{link}"), is_mempool=True)
        self.on_call(connection, message.call, now_ms)

    def on_peer_gone(self, link: int) -> None:
        """It calls no more: what it held is given up."""
        self.on_closed(self.peers.connection_of(link))

    def on_peer_answer(self, address: str, message: peer_wire.ToReader, now_ms: int) -> bool:
        """False: not an answer to what was asked here."""
        if not self.peers.is_mine(message):
            return False
        reply = self.peers.on_answer(address, message, now_ms)
        self._perform(self.api.tick(now_ms) if reply is None else self.api.on_peer_reply(reply))
        return True

    def on_peer_lost(self, address: str) -> None:
        """The mempool is not reached, or not any more."""
        for number in self.peers.on_lost(address):
            self._perform(self.api.lose_peer(number))
