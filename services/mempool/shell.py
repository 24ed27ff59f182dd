"""The mempool's event loop: frames, deaths and time in, the pool decides, its actions out."""

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from services.mempool.api_server import ApiServer
from services.mempool.checks import Checks
from services.mempool.core.actions import (
    Action,
    ApiSend,
    AskPeer,
    CopyPages,
    CreateMemory,
    CreateSlabs,
    Disconnect,
    EndSpace,
    KeepCaller,
    KillProcess,
    MapFarPages,
    OfferSlabs,
    OweMemory,
    PoolLimits,
    PullRemote,
    PunchPages,
    ReleaseUnits,
    RestoreUnits,
    Send,
    SendLayerWords,
    SendSlabs,
    StepOver,
    TellPeer,
    WriteEntries,
    WriteWords,
)  # fmt: skip
from services.mempool.core.callers import refusal
from services.mempool.core.memory_ahead import memory_ahead
from services.mempool.core.mempool import Mempool
from services.mempool.core.space import Plan
from services.mempool.deadline_timer import DeadlineTimer
from services.mempool.descriptors import shortage
from services.mempool.kept import Kept
from services.mempool.outbox import Outbox
from services.mempool.processes import ProcessWatch
from services.mempool.spaces import DEFAULT_COPYING, Spaces
from services.mempool.system_memory import CopyOptions
from services.mempool.takeover import Adopted, ProcessMeta, Takeover
from shared.errors import OutOfPages, PeerProtocolError
from shared.ids import Epoch, InstanceId, PageId
from shared.kv.words import u32_bytes
from shared.observe.log import get_logger
from shared.transport.clock import Clock
from shared.transport.unix_channel import UnixConnection, UnixServer
from shared.transport.unix_socket import OutOfDescriptors
from shared.wire import mempool as wire
from shared.wire.mempool_callers import AttachCaller

if TYPE_CHECKING:
    from services.mempool.peers import Peers

REPORT_DEADLINE_S = 10.0  # for processes that hold pages of an earlier mempool

log = get_logger("mempool")


class MempoolShell:
    """start() once, close() once. Everything runs on one loop; nothing here waits."""

    def __init__(
        self,
        path: Path,
        limits: PoolLimits,
        boot_generation: Epoch,
        clock: Clock,
        allowed_uids: frozenset[int] | None = None,
        kept: Kept | None = None,
        *,
        copying: CopyOptions = DEFAULT_COPYING,
        api_path: Path | None = None,
        checksum_rate: float = 0.0,
    ) -> None:
        self.pool = Mempool(limits, boot_generation)
        self.kept = kept or Kept("", boot_generation)
        self.spaces = Spaces(self.kept, boot_generation, self._on_copied, self._on_settled, copying=copying)
        self.peers: Peers | None = None  # other hosts'; see open_peers
        self.clock = clock
        self.server: UnixServer[wire.ToMempool, wire.FromMempool] = UnixServer(
            path,
            into=wire.TO_MEMPOOL,
            out=wire.FROM_MEMPOOL,
            on_message=self._on_message,
            on_connect=self._on_connect,
            on_disconnect=self._on_disconnect,
            allowed_uids=allowed_uids,
        )
        self._processes = ProcessWatch(self._on_process_dead)
        self.api = ApiServer(
            api_path, self.pool, self._processes, clock, self.perform, allowed_uids=allowed_uids
        )
        self.checks = Checks(checksum_rate, self.pool, self.spaces, clock, self.perform)
        self.outbox = Outbox(self.spaces, self.checks, limits.max_waiting)
        self._connections = self.outbox.connections
        self._next_connection = 1
        self._actions: deque[Action] = deque()
        self._performing = False
        self._is_closed = False
        self._timer = DeadlineTimer(clock, lambda: self.pool.next_deadline_ms(), self._on_timer)

    async def start(self) -> None:
        """Listen. Raises: SettingsError when the socket cannot be had."""
        await self.server.start()
        await self.api.start()
        log.info("mempool_listening", socket=str(self.server.path), boot=self.pool.boot_generation)

    async def open_peers(
        self, listen: str, instance: str, *, max_peers: int, pins_memory: bool, silent_ms: int
    ) -> None:
        """Reach mempools of other hosts, and be reached. Before start(). Raises: SettingsError."""
        from services.mempool.peers import Peers  # a host that is alone needs none of it

        self.peers = Peers(
            listen, instance, self.pool, self.spaces, self.clock, self.perform, self.checks,
            max_peers=max_peers, pins_memory=pins_memory, silent_ms=silent_ms,
        )  # fmt: skip
        await self.peers.start()

    def adopt(self, found: Takeover) -> None:
        """Go on where an earlier mempool stopped. Once, before start(); on the running loop."""
        members: dict[int, ProcessMeta] = {}
        dead: set[InstanceId] = set()  # of engines
        for one in found.processes:
            if one.dead:
                self.kept.found_dead(one.number, one.pidfd)
                dead.update([InstanceId(one.meta.instance)] if one.meta.kind == "engine" else [])
                continue
            number = self._processes.adopt(one.number, one.pidfd)
            meta = one.meta
            self.kept.adopted(one.number, one.pidfd, meta)
            members[number] = meta
        bereft = dead - {InstanceId(one.instance) for one in members.values() if one.kind == "engine"}
        for space in found.adopted:
            self._adopt(space, members, bereft)
        asyncio.get_running_loop().call_later(REPORT_DEADLINE_S, self._end_silent)

    def _adopt(self, found: Adopted, members: dict[int, ProcessMeta], bereft: set[InstanceId]) -> None:
        meta = found.meta
        self.spaces.adopt(found)
        planned = Plan(meta.num_pages, meta.page_bytes, meta.num_ranks, meta.pages_per_slab)
        others = {n: one for n, one in members.items() if one.kind != "caller"}
        mine = {n: one for n, one in others.items() if not one.spaces or meta.number in one.spaces}
        calling = [number for number, one in members.items() if meta.number in one.called]
        mapping = [*(number for number, one in mine.items() if one.maps), *calling]
        actions = self.pool.adopt(
            meta.number, meta.description, planned, found.words, found.entries,
            memory_id=meta.memory_id, processes=[*mine, *(-each for each in calling)], label=meta.label,
            engines=[number for number, one in mine.items() if one.kind == "engine"],
            instances=[InstanceId(one.instance) for one in mine.values()], mappers=mapping, devices=meta.devices,
            is_owed=meta.is_owed, bereft=bereft,
        )  # fmt: skip
        log.info("memory_adopted", space=meta.number, num_pages=meta.num_pages, num_awaited=len(mine))
        self.perform(actions)
        self.checks.adopted(meta.number, found.words, found.entries)

    def _end_silent(self) -> None:
        for number in sorted(self.pool.awaited()):
            self._processes.kill(abs(number), "silent")
        self.kept.forget_found_dead()

    def close(self) -> None:
        """End every connection. Peers keep the memory that they mapped, and reconnect to the next mempool."""
        self._is_closed = True  # what the loop still calls finds no memory to act on
        self._timer.close()
        self.server.close()
        if self.peers is not None:
            self.peers.close()
        self.api.close()
        self.checks.close()
        self.spaces.close()
        self.kept.close()

    def status(self) -> dict[str, Any]:
        """For /status."""
        status = msgspec.to_builtins(self.pool.status())
        status.pop("call_id")
        status["resident_bytes"] = self.spaces.resident_bytes()
        status["copies"] = self.spaces.status()
        status["hosts"] = self.peers.status() if self.peers is not None else {}
        status["peers_refused"] = self.server.num_refused
        status["peers_malformed"] = self.server.num_malformed
        status["api"] = self.api.status()
        status["counters"] |= self.checks.counters
        status["checks_waiting"] = self.checks.num_waiting
        status["checks_failing"] = self.checks.failing
        return status

    # -- events -----------------------------------------------------------------------------------

    def _on_connect(self, connection: UnixConnection[wire.FromMempool]) -> None:
        connection.state = self._next_connection
        self._next_connection += 1
        self._connections[connection.state] = connection

    def _on_message(
        self,
        connection: UnixConnection[wire.FromMempool],
        _seq: int,
        message: wire.ToMempool,
        _raw: list[bytes],
    ) -> None:
        number = connection.state
        actions: list[Action]
        if number not in self._connections:  # ended by an action, its last bytes do not count
            return
        try:
            if isinstance(message, wire.Attach | AttachCaller):
                actions = self._attach(connection, message)
            else:
                if isinstance(message, wire.Acquire) and message.traceparent:
                    self.outbox.trace(number, message)
                actions = self.pool.on_message(number, message, self.clock.now_ms())
        except PeerProtocolError as error:
            self.server.num_malformed += 1
            log.warning("peer_protocol_error", connection=number, pid=connection.peer.pid, reason=str(error))
            actions = [Disconnect(number, error.code)]
        self.perform(actions)
        self.spaces.ready.drop()

    def _attach(
        self, connection: UnixConnection[wire.FromMempool], message: wire.Attach | AttachCaller
    ) -> list[Action]:
        process, kind = 0, message.kind if isinstance(message, wire.Attach) else "caller"
        # A caller that comes back says so that it copies nothing any more: that is heard in any case.
        says_more = isinstance(message, AttachCaller) and message.memory_id != 0
        if kind != "client" and not says_more and (reason := shortage()):
            log.error("descriptors_lacking", connection=connection.state, reason=reason)
            return refusal(connection.state, OutOfDescriptors.code, reason)
        if kind != "client":
            process = self._processes.number_of(connection)
            if process is None:
                reason = "the kernel gives no pidfd of this peer, or it is dead"
                return refusal(connection.state, "peer.credentials", reason)
        log.info(
            "peer_attaches", kind=kind, peer_instance=message.instance, pid=connection.peer.pid,
            connection=connection.state,
        )  # fmt: skip
        if isinstance(message, AttachCaller):
            return self.pool.on_attach_caller(connection.state, process, message, self.clock.now_ms())
        if reason := self.spaces.ready.make(memory_ahead(self.pool, message)):
            log.error("memory_lacking", connection=connection.state, reason=reason)
            return refusal(connection.state, OutOfPages.code, reason)
        actions = self.pool.on_attach(connection.state, process, message, self.clock.now_ms())
        found = self._processes.pidfd_of(process) if self.pool.has_member(connection.state) else None
        if found is not None and message.kind != "client":  # kept before the actions give it memory
            self.kept.process(*found, message.kind, message.instance, [self.pool.space_of(message.instance)])
        return actions

    def _on_disconnect(self, connection: UnixConnection[wire.FromMempool], error: Exception | None) -> None:
        number = connection.state
        self.outbox.forget(number)
        log.info("peer_left", connection=number, pid=connection.peer.pid, error=str(error or ""))
        self.perform(self.pool.on_closed(number, self.clock.now_ms()))

    def _on_process_dead(self, process: int, pid: int) -> None:
        log.info("process_dead", process=process, pid=pid)
        self.kept.dead(pid)
        self.perform(self.pool.on_process_dead(process, self.clock.now_ms()))

    def _on_timer(self) -> None:
        self.perform(self.pool.tick(self.clock.now_ms()))

    # -- actions ----------------------------------------------------------------------------------

    def perform(self, actions: list[Action]) -> None:
        """In order, also when performing one causes an event with actions of its own."""
        self._actions.extend(actions)
        if self._performing or self._is_closed:
            return
        self._performing = True
        try:
            while self._actions:
                self._perform_one(self._actions.popleft())
                if not self._actions:
                    self.checks.begin()
        finally:  # an action that raises is a bug, which must not keep all later ones from being performed
            self._performing = False
        self._timer.look()

    def _perform_one(self, action: Action) -> None:
        match action:
            case WriteWords():
                self.spaces.memories[action.space].write_words(action.words)
            case WriteEntries():
                self.spaces.memories[action.space].write_entries(action.entries)
                self.checks.sealed(action)
            case Send():
                self.outbox.send(action)
            case CreateMemory():
                self.spaces.create(action)
            case CreateSlabs():
                made = self.spaces.create_slabs(action)
                if not made and (connection := self._connections.get(action.connection)) is not None:
                    connection.close()  # else it ended while an earlier action was performed
            case SendSlabs():
                slabs = range(action.first, action.first + action.count)
                reply = wire.Slabs(call_id=action.call_id, first=action.first, count=action.count)
                self.outbox.give(
                    action.connection, lambda: (reply, self.spaces.export(action.space, action.rank, slabs))
                )
            case PunchPages():
                self._punch(action)
            case CopyPages():
                self.checks.copying(action)
                self.spaces.copy(action)
            case Disconnect():
                if (connection := self._connections.get(action.connection)) is not None:
                    log.warning("peer_disconnected", connection=action.connection, reason=action.reason)
                    connection.close()
            case _:
                self._perform_other(action)

    def _perform_other(self, action: Action) -> None:
        """For other processes than those of this host, and the system's memory."""
        match action:
            case AskPeer() | TellPeer() | PullRemote():
                self._to_peer(action)
            case ApiSend():
                self.api.send(action)
            case OfferSlabs():
                offer = wire.MapSlabs(slabs=u32_bytes(action.slabs))
                self.outbox.give(
                    action.connection,
                    lambda: (offer, self.spaces.export(action.space, action.rank, action.slabs)),
                )
            case StepOver():
                self.spaces.step_over(action.copy_id)
            case SendLayerWords():
                words, make = wire.LayerWords(call_id=action.call_id), self.spaces.make_layer_words
                self.outbox.give(
                    action.connection, lambda: (words, [make(action.space, action.instance, action.rank)])
                )
            case ReleaseUnits() | RestoreUnits():
                self._change_memory(action)
            case OweMemory():
                self.kept.owes(action.space, action.is_owed)
            case EndSpace():
                self.checks.ended(action.space)
                self.spaces.end(action.space)
            case MapFarPages():
                self.outbox.give(action.connection, lambda: self.spaces.far_pages(action))
            case KillProcess():
                self._processes.kill(action.process, action.reason)
            case KeepCaller():
                if (found := self._processes.pidfd_of(action.process)) is not None:
                    self.kept.caller(*found, action.spaces)

    def _punch(self, action: PunchPages) -> None:
        if self.peers is None or self.peers.may_punch(action.space):
            self.spaces.punch(action.space, action.pages)

    def _to_peer(self, action: AskPeer | TellPeer | PullRemote) -> None:
        assert self.peers is not None  # else the core knows no address, and asks nobody
        match action:
            case AskPeer():
                self.peers.ask(action)
            case TellPeer():
                self.peers.tell(action)
            case PullRemote():
                self.peers.pull(action)

    def _on_copied(self, copy_id: int, failed: bool, in_doubt: Sequence[int], took_us: int) -> None:
        def over(failed: bool) -> None:
            now_ms = self.clock.now_ms()
            self.perform(
                self.pool.on_copied(copy_id, now_ms, failed=failed, in_doubt=in_doubt, took_us=took_us)
            )

        if not self.checks.copied(copy_id, failed, over):
            over(failed)

    def _on_settled(self, space: int, pages: Sequence[int]) -> None:
        self.perform(self.pool.on_settled(space, [PageId(page) for page in pages], self.clock.now_ms()))

    def _change_memory(self, action: ReleaseUnits | RestoreUnits) -> None:
        number, units = action.space, action.units

        def released(failed: bool) -> None:
            self.perform(self.pool.on_released(number, units, self.clock.now_ms(), failed=failed))

        def restored(num_made: int) -> None:
            self.perform(self.pool.on_restored(number, units, num_made, self.clock.now_ms()))

        if isinstance(action, RestoreUnits):
            self.spaces.restore(action, restored)
        else:
            may_punch = self.peers is None or self.peers.may_punch(number)
            self.spaces.release(action, released, may_punch=may_punch)
