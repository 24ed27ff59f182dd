"""All spaces of one mempool: who belongs to which, and what passes between them. No I/O.

A *space* is memory of one kind for blocks of one content: the pages of one GPU (of one per rank), or of host memory.
Each has a Pool, which knows nothing of the others. Engines and ranks belong to the space of their device, the
clients of an instance to that of its engine, whichever comes first.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import count

from services.mempool.core import parse, space
from services.mempool.core.action_order import told_last
from services.mempool.core.actions import Action, PoolLimits
from services.mempool.core.api_spaces import ApiSpaces
from services.mempool.core.audience import Audience
from services.mempool.core.belonging import is_outdated, pool_for, why_refused
from services.mempool.core.callers import Callers, refusal
from services.mempool.core.claims import Client
from services.mempool.core.dram import Dram
from services.mempool.core.endings import Endings
from services.mempool.core.from_outside import FromOutside
from services.mempool.core.layered import LayerPulls
from services.mempool.core.leases import Fence, has_come, keep_handoff
from services.mempool.core.lending import Lending
from services.mempool.core.pool import Pool
from services.mempool.core.pools import Pools
from services.mempool.core.pull import Reader, take_late
from services.mempool.core.pulls import Pulls
from services.mempool.core.reach import Reach
from services.mempool.core.remote import Remote
from services.mempool.core.remote_serve import RemoteServe
from services.mempool.core.returns import Returns
from services.mempool.core.swaps import Swaps
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.wire import mempool as wire
from shared.wire.mempool_callers import AttachCaller
from shared.wire.mempool_lending import ToLending
from shared.wire.mempool_swap import SwapCall


class Mempool(FromOutside):
    """Methods return the actions to perform, in order. After a PeerProtocolError, end the connection."""

    def __init__(self, limits: PoolLimits, boot_generation: Epoch) -> None:
        self.limits = limits
        self.boot_generation = boot_generation
        self._fence = Fence(boot_generation)
        self.pools = Pools(limits, boot_generation, self._fence)
        self.counters: Counter[str] = Counter()
        self.copy_numbers = count(1)
        self.pulls = Pulls(limits, self.pools, self._answer, self.counters, self.copy_numbers)
        self.peer_address = ""  # where mempools of other hosts reach this one; set before the shell listens
        self._space_of: dict[InstanceId, int] = {}
        self.layers = LayerPulls(self.pulls, self.pools, self._space_of, self._touch)
        self._clients: dict[int, InstanceId] = {}  # by connection
        self._members: dict[int, int] = {}  # connection of an engine or rank -> its space
        self._touched: dict[int, Pool] = {}  # by number: by answers since the last actions
        self.dram = Dram(limits, self.pools, self.copy_numbers, self._touch)
        self.lending = Lending(
            limits, boot_generation, self._fence, self.pools, self.dram, self.space_number, self._touch
        )
        self.swaps = Swaps(limits, self.pools, self.dram.behind, self.copy_numbers, self._touch)
        self.swaps.use(self.dram)
        self.lending.on_wanted_back = self._leave_loan
        self.lending.num_read, self.lending.on_overdue = self.swaps.far.num_at, self.swaps.far.end_readers
        self.pulls.distance = self.lending.distance
        self.audience = Audience(self.pools, self._space_of, self.dram, limits.space_idle_ms)
        landing = self.dram.landing
        self._reach = Reach(self._clients, lambda name: self.pools[self.space_of(name)], landing)
        self.remote = Remote(limits, self._bring, landing, self.pulls.reachable, self.counters)
        self.returns = Returns(limits, self.pools, self.remote, lambda: self.peer_address, self.counters)
        self.callers = Callers(self.pools, lambda: self.api)
        self.api = ApiSpaces(
            limits, self.pools, self._space_of, self.dram, self.copy_numbers, self.callers, self._touch,
            self.lending.wanted_back,
        )  # fmt: skip
        named = self.api.peers.names
        self.serve = RemoteServe(limits, self.pools, landing, self.pulls.want, self.counters, named)
        self.endings = Endings(self, self._space_of, self._clients, self._members)

    # -- connections ------------------------------------------------------------------------------

    def adopt(
        self,
        number: int,
        description: EngineDescription,
        planned: space.Plan,
        words: Sequence[int],
        entries: bytes,
        *,
        memory_id: Epoch,
        processes: Sequence[int],
        engines: Sequence[int],
        instances: Sequence[InstanceId],
        devices: Sequence[str] = (),
        label: str = "",
        mappers: Sequence[int] = (),
        is_owed: bool = False,
        bereft: Collection[InstanceId] = (),
    ) -> list[Action]:
        """Pool.adopt of one space. `instances`: of each process; their engines or ranks were in it. A negative process
        was a caller there, and has no instance."""
        pool = self.pools.get(number) or self.pools.make(number)
        self._space_of.update(dict.fromkeys(instances, number))
        self.callers.adopt(number, processes)
        actions = pool.adopt(
            description, planned, words, entries,
            memory_id=memory_id, processes=processes, engines=engines, devices=devices, label=label,
            instances=instances, mappers=mappers, is_owed=is_owed, bereft=bereft,
        )  # fmt: skip
        self.dram.link()
        return actions

    def _touch(self, *pools: Pool) -> None:
        """Their actions are due with the next ones that are returned."""
        self._touched.update((pool.number, pool) for pool in pools if pool.number in self.pools)

    def _leave_loan(self, number: int, is_overdue: bool, now_ms: int) -> None:
        self.swaps.let_go(number, now_ms)
        if is_overdue:
            self._touch(*self.pulls.let_go(number, now_ms))

    def space_of(self, instance: InstanceId) -> int:
        """Number of the space that the instance's engine is in, or would be."""
        return self._space_of.get(instance, min(self.pools))

    def on_attach(self, connection: int, process: int, message: wire.Attach, now_ms: int) -> list[Action]:
        """As Pool.on_attach."""
        if connection in self._clients or connection in self._members:
            raise PeerProtocolError("attached already")
        if message.kind == "client":
            pool = self.pools[self.space_of(message.instance)]
            pool.peer_address, pool.load_interval_ms = self.peer_address, self.load_interval_ms
            actions = pool.on_attach(connection, process, message, now_ms)
            self._clients[connection] = message.instance
            return actions + self._reach.news(self.peer_address)
        if is_outdated(message, self.pools):
            return self._refuse(connection, "epoch.stale", f"a later {message.instance} is attached")
        actions = self.endings.make_room(message, process)
        last = self._space_of.get(message.instance)
        pool = pool_for(message, self.pools, last, is_full=self.pools.is_full)
        if why := why_refused(message, process, pool, self.pools, is_new=last is None):
            return actions + self._refuse(connection, *why)
        pool = pool or self.pools.make()
        is_first = pool.is_first(process)
        actions += pool.on_attach(connection, process, message, now_ms)
        actions += self.endings.make_room_behind(pool, message)
        actions += self.dram.put_behind(pool, message, self.pools.make, is_full=self.pools.is_full)
        if pool.has_member(connection):
            if is_first:
                self.dram.wake(pool, now_ms)
            self._members[connection] = pool.number
            self.callers.computes([process])
            self._space_of[message.instance] = pool.number
            actions += self._reach.news(self.peer_address)
        return actions + self._after(now_ms)

    def on_attach_caller(
        self, connection: int, process: int, message: AttachCaller, now_ms: int
    ) -> list[Action]:
        """As on_attach(), of a caller of the nine calls that copies by itself."""
        if connection in self._clients or connection in self._members:
            raise PeerProtocolError("attached already")
        actions = self.callers.on_attach(connection, process, message)
        if self.callers.has(connection):
            self._members[connection] = message.space
        return actions + self._after(now_ms)

    def _refuse(self, connection: int, code: str, reason: str) -> list[Action]:
        self.counters["attaches_refused"] += 1
        return refusal(connection, code, reason)

    def on_closed(self, connection: int, now_ms: int) -> list[Action]:
        """A connection ended, by either side. Unknown ones are ignored."""
        self._clients.pop(connection, None)
        self._members.pop(connection, None)
        self._reach.forget(connection)
        self.callers.on_closed(connection)
        self.pulls.forget(connection, now_ms)
        self.remote.forget(connection)
        self.swaps.forget(connection)
        self.forget_load(connection)
        actions: list[Action] = []
        for pool in self.pools.values():
            if pool.has_member(connection):
                actions += pool.on_closed(connection, now_ms)
        return actions + self._after(now_ms)

    def on_process_dead(self, process: int, now_ms: int) -> list[Action]:
        """Proof of death: as Pool.on_process_dead, in every space."""
        actions: list[Action] = []
        for pool in self.pools.values():
            actions += pool.on_process_dead(process, now_ms)
        self.callers.on_process_dead(process)
        self.api.on_process_dead(process)
        self.lending.on_process_dead(now_ms)
        self.swaps.prune()
        self._touch(*self.pools.values())
        return actions + self._after(now_ms)

    # -- messages ---------------------------------------------------------------------------------

    def on_message(self, connection: int, message: wire.ToMempool, now_ms: int) -> list[Action]:
        """Any message after Attach. Raises: PeerProtocolError; nothing has changed then."""
        pool = self._pool_of(connection, message)
        actions: list[Action] = []
        here = ("", self.peer_address)
        match message:
            case wire.Acquire() if not message.own_space_only and message.source_mempool not in here:
                actions += self._acquire_remote(pool, connection, message, now_ms)
            case wire.Acquire() if len(self.pools) > 1 and not message.own_space_only:
                actions += self._acquire(pool, connection, message, now_ms)
            case wire.HandoffReady():
                self.pulls.push_back.handed(message.handoff_id, pool)
                actions += pool.on_message(connection, message, now_ms)
                self.returns.handed(pool, message)
                self._handed_off(pool, message, now_ms)
            case wire.Match() if len(self.pools) > 1:
                hashes = parse.hashes(message.hashes, self.limits.max_blocks_per_call)
                count = len(self.pulls.reachable(pool, hashes))
                actions += pool.tell(connection, wire.Matched(call_id=message.call_id, num_blocks=count))
            case wire.Delete() if len(self.pools) > 1:
                hashes = parse.hashes(message.hashes, self.limits.max_blocks_per_call)
                count = sum(p.delete(hashes) for p in self.pools.values() if p.shares_content(pool))
                self._touch(*self.pools.values())
                actions += pool.tell(connection, wire.Deleted(call_id=message.call_id, num_blocks=count))
            case wire.Sealed():
                actions += pool.on_message(connection, message, now_ms)
                self.pulls.push_back.on_sealed(pool, message)
                self.returns.on_sealed(pool, message, now_ms)
            case wire.ReleaseMemory() | wire.RegainMemory():
                self._change_memory(pool, connection, message, now_ms)
            case wire.StepLayers() | wire.LayersSealed():
                self.layers.on_message(pool, connection, message, now_ms)
            case _ if isinstance(message, ToLending):
                self._on_lending(pool, connection, message, now_ms)
            case _ if isinstance(message, SwapCall):
                self.swaps.on_message(pool, connection, message)
            case wire.Detach() if self.callers.has(connection):
                del self._members[connection]
                actions += self.callers.on_detach(connection)
                self._touch(*self.pools.values())
            case wire.KeepHandoff():
                keep_handoff((p.leases for p in self.pools.values()), message, self.limits, now_ms)
            case wire.StatusCall():
                actions += pool.tell(connection, self.status(message.call_id))
            case _:
                actions += pool.on_message(connection, message, now_ms)
        return actions + self._after(now_ms)

    def _pool_of(self, connection: int, message: wire.ToMempool) -> Pool:
        """Whose message it is. A client that came before its engine moves to the engine's space."""
        instance = self._clients.get(connection)
        if instance is None:
            found = self.pools.get(self._members.get(connection, -1))
            if found is None or not found.has_member(connection):
                raise PeerProtocolError(f"{type(message).__name__} before Attach")
            return found
        if isinstance(message, wire.Release):
            for pool in self.pools.values():
                if message.lease_id in pool.leases.leases:
                    pool.clients.setdefault(connection, Client(connection, instance))
                    return pool
        pool = self.pools[self.space_of(instance)]
        pool.clients.setdefault(connection, Client(connection, instance))
        return pool

    def _acquire(self, pool: Pool, connection: int, call: wire.Acquire, now_ms: int) -> list[Action]:
        instance = pool.instance_of(connection)
        hashes = parse.hashes(call.hashes, self.limits.max_blocks_per_call)
        has = has_come((p.leases for p in self.pools.values()), call.handoff_id)
        expects = call.handoff_id and call.wait_ms > 0 and not has
        if instance is None or (expects and not all(h in pool.index for h in hashes)):
            return pool.on_message(connection, call, now_ms)
        pool.counters["acquires"] += 1
        self._read(pool, self._reader(connection, instance, call, hashes, now_ms), now_ms)
        return []

    def _acquire_remote(self, pool: Pool, connection: int, call: wire.Acquire, now_ms: int) -> list[Action]:
        """As _acquire, of blocks that another host's mempool has."""
        instance = pool.instance_of(connection)
        if instance is None:
            raise PeerProtocolError("Acquire before Attach")
        pool.counters["acquires"] += 1
        hashes = parse.hashes(call.hashes, self.limits.max_blocks_per_call)
        self._read(pool, self._reader(connection, instance, call, hashes, now_ms), now_ms, far=True)
        return []

    def _reader(
        self, connection: int, instance: InstanceId, call: wire.Acquire, hashes: list[BlockHash], now_ms: int
    ) -> Reader:
        """Of a call with these hashes, which takes a while to cut apart: once."""
        patience_ms = min(max(call.wait_ms, self.limits.pull_patience_ms), self.limits.max_wait_ms)
        return Reader(connection, instance, call, hashes, now_ms + patience_ms)

    def _read(self, pool: Pool, reader: Reader, now_ms: int, *, far: bool = False) -> None:
        """Answer, after what is missing has come from another space; `far`: of another host."""
        if not (far and self.peer_address and self.remote.want(pool, reader, now_ms)):
            self._bring(pool, reader, now_ms)

    def _bring(self, pool: Pool, reader: Reader, now_ms: int) -> None:
        """What other spaces have, then the answer."""
        if not self.pulls.want(pool, reader, now_ms):
            self._answer(pool, reader, now_ms)
        self._touch(pool)

    def _answer(self, pool: Pool, reader: Reader, now_ms: int) -> None:
        if reader.connection < 0:
            self.serve.staged(pool, reader, now_ms)
            return
        reader.came["peer"] += self.layers.num_came(reader.call.handoff_id)
        pool.answer(reader.connection, reader.instance, reader.call, now_ms, reader.came)
        self._touch(pool)
        if reader.call.handoff_id:
            self.pulls.taken(pool, reader)
            self.returns.taken(pool, reader)
            for other in self.pools.values():
                if other is not pool:
                    other.leases.close_handoff(reader.call.handoff_id)
                    self._touch(other)

    def _handed_off(self, source: Pool, message: wire.HandoffReady, now_ms: int) -> None:
        """Readers have waited for it, or are on their way."""
        for pool in self.pools.values():
            if pool is not source:
                for each in pool.leases.take_waiters(message.handoff_id):
                    hashes = parse.hashes(each.call.hashes, self.limits.max_blocks_per_call)
                    reader = self._reader(each.connection, each.instance, each.call, hashes, now_ms)
                    self._read(pool, reader, now_ms)
        self.layers.on_handoff(source, message, now_ms)
        self.serve.on_handoff(message.handoff_id, now_ms)

    def after_api(self, now_ms: int) -> list[Action]:
        """After calls of `api`'s methods: what they have caused."""
        self._touch(*self.pools.values())
        return self._after(now_ms)

    # -- time -------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Action]:
        """As Pool.tick, in every space."""
        actions: list[Action] = []
        for pool in self.pools.values():
            for reader in take_late(pool, now_ms):
                self._answer(pool, reader, now_ms)
            actions += pool.tick(now_ms)
        self.serve.tick(now_ms)
        self.api.tick(now_ms)
        return actions + self._after(now_ms)

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do, or earlier; None: not before the next event."""
        parts = (self.remote, self.returns, self.serve, self.api, self.pulls, self.dram, self.swaps.far)
        due = [each.next_deadline_ms() for each in (*parts, *self.pools.values())]
        due.append(self.lending.tick_at_ms())
        return min((when for when in due if when is not None), default=None)

    def _after(self, now_ms: int) -> list[Action]:
        """Copies that can begin now, behind the words of their pages; and what answers have caused."""
        self.pulls.push_back.advance(now_ms)
        self.returns.advance(now_ms)
        had_work = self.pulls.has_work() or bool(self.remote.pulls)
        copies = self._begin_reads(now_ms)
        if had_work or copies:
            self._touch(*self.pools.values())
        out: list[Action] = []
        self.swaps.advance(now_ms)
        self.lending.advance(now_ms)
        self.dram.advance(now_ms)
        self.api.advance(now_ms)
        while self._touched:  # pages that come free are granted, and that may have blocks leave
            while self._touched:
                out += self._touched.pop(min(self._touched)).flush()
            self.lending.advance(now_ms)
            self.dram.advance(now_ms)
            if begun := self._begin_reads(now_ms):  # these pages were for readers
                copies += begun
                self._touch(*self.pools.values())
        copies += self.swaps.take_actions() + self.dram.take_copies() + self.api.take_actions()
        return told_last(out) + self._begin(copies, now_ms)

    def _begin_reads(self, now_ms: int) -> list[Action]:
        copies = self.pulls.advance(now_ms) if self.pulls.has_work() else []
        self.remote.advance(now_ms)
        return copies + self.returns.take_actions() + self.remote.take_actions() + self.serve.take_actions()

    def status(self, call_id: int = 0) -> wire.PoolStatus:
        """All spaces together, and each."""
        parts = [pool.status() for pool in self.pools.values()]
        spaces = [found for pool in self.pools.values() if (found := pool.space_status()) is not None]
        counters = self.counters + self.dram.counters() + self.lending.counters()
        counters += self.swaps.counters + self.swaps.far.counters
        return space.total(parts, self.layers.count_ahead(spaces), call_id, counters)
