"""Calls to this host's mempool from a worker's front or a tool, on asyncio. Only a help, never a failure.

Whatever goes wrong (no pool, a pool that restarts, a late answer) means "nothing held": the engine computes.
The client counts it and reconnects by itself.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shared.background_task import begin_task
from shared.errors import ClusterError, PeerGone
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId
from shared.loop_timeout import loop_timeout
from shared.observe.log import get_logger
from shared.transport.unix_channel import UnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from shared.wire.lending import Grant, Offer, ReclaimOrder
from shared.wire.mempool_lending import (
    LendingCall,
    LendingDone,
    MemoryShares,
    PresentGrant,
    PresentOffer,
    PresentReclaim,
    ReleaseLoan,
    RenewLoan,
    ReportLoad,
)
from shared.wire.mempool_reach import HostReach

RETRY_MIN_MS, RETRY_MAX_MS = 20, 1_000
CALL_TIMEOUT_MS = 1_000  # beyond what the pool itself was asked to wait
MAX_PENDING = 8_192

_log = get_logger("mempool.client")
_ANSWERS = (
    wire.Acquired,
    wire.Matched,
    wire.Deleted,
    wire.PoolStatus,
    wire.MemoryChanged,
    LendingDone,
    wire.CallFailed,
)
_NO_HANDOFF = HandoffId("")
_NO_EPOCH = Epoch(0)
R = TypeVar("R", wire.Acquired, wire.Matched, wire.Deleted, wire.PoolStatus, wire.MemoryChanged)
Call = (
    wire.Acquire
    | wire.Match
    | wire.Delete
    | wire.StatusCall
    | wire.ReleaseMemory
    | wire.RegainMemory
    | LendingCall
)


class MempoolClient:
    """start() once on a running loop, close() once. Calls may overlap.

    `counters`: calls, failures by kind, connections and losses. A lease that arrives after its caller gave up
    is released at once.
    """

    def __init__(
        self,
        socket: str | Path,
        instance: InstanceId,
        *,
        instance_epoch: Epoch = _NO_EPOCH,
        on_up: Callable[[], None] | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.memory_id = _NO_EPOCH  # of the pool's pages: equal after a restart that kept them; 0: none yet
        self.peer_address = ""  # where other hosts' mempools reach the pool; "": they do not
        self.crosses_hosts = True  # blocks of the instance's space can go there and come from there
        self.load_interval_ms = 0  # how often the pool wants to hear report_load(); 0: never
        self.memory: MemoryShares | None = None  # of the instance's space, as the pool said last
        self.on_memory: Callable[[MemoryShares], None] | None = None  # called with each change
        self._boot = _NO_EPOCH  # of the pool that it is, or last was, connected to
        self._path = Path(socket)
        self._attach = wire.Attach(kind="client", instance=instance, instance_epoch=instance_epoch)
        self._on_up = on_up
        self._link: UnixLink[wire.ToMempool, wire.FromMempool] = UnixLink(
            self._path,
            out=wire.TO_MEMPOOL,
            into=wire.FROM_MEMPOOL,
            on_message=self._on_message,
            on_down=self._on_down,
        )
        self._up = asyncio.Event()
        self._call_id = 0
        self._pending: dict[int, asyncio.Future[wire.FromMempool]] = {}
        self._down = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def boot_generation(self) -> Epoch:
        """Of the pool that it is, or last was, connected to."""
        return self._boot

    @property
    def connected(self) -> bool:
        """Attached to a pool now."""
        return self._up.is_set()

    def start(self) -> None:
        """Begin to connect; calls before that is done hold nothing."""
        if self._task is None:
            self._task = begin_task(self._stay_connected(), "mempool-client")

    async def wait_connected(self, timeout_ms: int) -> bool:
        """For tools and tests: whether it is connected within the time."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the connection; leases end with it, or at their TTL. Harmless when closed already."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._up.clear()  # nothing is lost
        self._link.close()

    # -- calls ------------------------------------------------------------------------------------

    async def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        handoff_id: HandoffId = _NO_HANDOFF,
        wait_ms: int = 0,
        ttl_ms: int = 30_000,
        traceparent: str = "",
        until_release: bool = False,
        source_mempool: str = "",
        own_space_only: bool = False,
        timeout_ms: int | None = None,
    ) -> wire.Acquired:
        """Pin the longest known prefix of `hashes`; release() its lease. num_blocks 0: nothing is held.

        Args:
            until_release: no expiry: an engine of this instance works in the pages, and releases them.
            source_mempool: that has the pages, if not this one: of a hand-off, or of the best holder.
            own_space_only: bring nothing from other spaces either.
            timeout_ms: None: a second more than wait_ms.
        """
        call = wire.Acquire(
            call_id=self._next_call(),
            hashes=b"".join(hashes),
            handoff_id=handoff_id,
            wait_ms=wait_ms,
            ttl_ms=ttl_ms,
            traceparent=traceparent,
            until_release=until_release,
            source_mempool=source_mempool,
            own_space_only=own_space_only,
        )
        limit_ms = wait_ms + CALL_TIMEOUT_MS if timeout_ms is None else timeout_ms
        reply = await self._call(call, wire.Acquired, limit_ms)
        if reply is None:
            return wire.Acquired(
                call_id=call.call_id, lease_id=LeaseId(""), fencing_token=_NO_EPOCH, num_blocks=0
            )
        return reply

    def release(self, lease_id: LeaseId) -> None:
        """End a lease. Never fails: a pool that is gone has ended it already."""
        self._send(wire.Release(lease_id=lease_id))

    def drop_handoff(self, handoff_id: HandoffId) -> None:
        """End a handoff that nobody will acquire, come or still to come. Never fails: its time ends it otherwise."""
        # acquiring nothing of it ends it like any other acquire; the answer holds no lease and finds no caller
        self._send(wire.Acquire(call_id=self._next_call(), hashes=b"", handoff_id=handoff_id))

    def keep_handoff(self, handoff_id: HandoffId, ttl_ms: int) -> None:
        """Have a handoff held for longer: its reader waits for room. Never fails: its time ends it otherwise."""
        self._send(wire.KeepHandoff(handoff_id=handoff_id, ttl_ms=ttl_ms))

    async def match(self, hashes: Sequence[BlockHash], *, timeout_ms: int = CALL_TIMEOUT_MS) -> int:
        """How many leading blocks are known: a hint. 0 without a pool."""
        call = wire.Match(call_id=self._next_call(), hashes=b"".join(hashes))
        reply = await self._call(call, wire.Matched, timeout_ms)
        return reply.num_blocks if reply else 0

    async def delete(
        self, hashes: Sequence[BlockHash] = (), *, timeout_ms: int = CALL_TIMEOUT_MS
    ) -> int | None:
        """Drop these blocks, or with none named all that are not pinned; how many. None: no answer."""
        call = wire.Delete(call_id=self._next_call(), hashes=b"".join(hashes))
        reply = await self._call(call, wire.Deleted, timeout_ms)
        return reply.num_blocks if reply else None

    async def status(self, *, timeout_ms: int = CALL_TIMEOUT_MS) -> wire.PoolStatus | None:
        """The pool now. None: no answer."""
        return await self._call(wire.StatusCall(call_id=self._next_call()), wire.PoolStatus, timeout_ms)

    async def release_memory(
        self, num_bytes: int, *, wait_ms: int = 5_000, space: int = -1
    ) -> wire.MemoryChanged | None:
        """Press for memory: as much as can be done without goes back to the system. None: no answer, or refused.

        Free pages go first, then those used longest ago; engines keep what requests use, and room for their longest.
        Args: space: SpaceStatus.number; -1: that of this client's instance.
        """
        call = wire.ReleaseMemory(
            call_id=self._next_call(), num_bytes=num_bytes, wait_ms=wait_ms, space=space
        )
        return await self._call(call, wire.MemoryChanged, wait_ms + CALL_TIMEOUT_MS)

    async def regain_memory(
        self, num_bytes: int = 0, *, wait_ms: int = 5_000, space: int = -1
    ) -> wire.MemoryChanged | None:
        """Take memory for released pages again, 0: for all, as far as there is some. None: no answer, or refused."""
        call = wire.RegainMemory(call_id=self._next_call(), num_bytes=num_bytes, wait_ms=wait_ms, space=space)
        return await self._call(call, wire.MemoryChanged, wait_ms + CALL_TIMEOUT_MS)

    async def present(
        self, what: Offer | Grant | ReclaimOrder, *, timeout_ms: int = CALL_TIMEOUT_MS
    ) -> LendingDone | wire.CallFailed | None:
        """What the memory market answered takes effect here, or is refused by CallFailed. None: no answer.

        Said again it does nothing twice: after None, say it again.
        """
        call_id = self._next_call()
        match what:
            case Offer():
                call = PresentOffer(call_id=call_id, offer=what)
            case Grant():
                call = PresentGrant(call_id=call_id, grant=what)
            case _:
                call = PresentReclaim(call_id=call_id, order=what)
        return _lending(await self._ask(call, timeout_ms))

    async def renew_loan(self, lease_id: LeaseId, ttl_ms: int) -> LendingDone | wire.CallFailed | None:
        """It ends ttl_ms from now, or later if it would anyway. As present()."""
        call = RenewLoan(call_id=self._next_call(), lease_id=lease_id, ttl_ms=ttl_ms)
        return _lending(await self._ask(call, CALL_TIMEOUT_MS))

    async def release_loan(self, lease_id: LeaseId) -> LendingDone | wire.CallFailed | None:
        """Done with it: its blocks leave for host memory. As present()."""
        call = ReleaseLoan(call_id=self._next_call(), lease_id=lease_id)
        return _lending(await self._ask(call, CALL_TIMEOUT_MS))

    def report_load(self, message: ReportLoad) -> None:
        """How busy the instance's engine is. Never fails: a pool that is gone hears the next one."""
        self._send(message)

    # -- parts ------------------------------------------------------------------------------------

    def _next_call(self) -> int:
        self._call_id += 1
        return self._call_id

    async def _call(
        self,
        message: Call,
        kind: type[R],
        timeout_ms: int,
    ) -> R | None:
        """The answer, or None for whatever reason; the reason is counted."""
        reply = await self._ask(message, timeout_ms)
        if reply is None or isinstance(reply, kind):
            return reply
        self.counters["calls_refused"] += 1
        _log.warning("mempool_call_refused", answer=repr(reply))
        return None

    async def _ask(self, message: Call, timeout_ms: int) -> wire.FromMempool | None:
        """Whatever is answered; None without an answer, which is counted."""
        self.counters["calls"] += 1
        if len(self._pending) >= MAX_PENDING:
            self.counters["calls_unsent"] += 1
            return None
        future: asyncio.Future[wire.FromMempool] = asyncio.get_running_loop().create_future()
        self._pending[message.call_id] = future  # first: sending may be what finds that the pool is gone
        try:
            if not self._send(message):
                self.counters["calls_unsent"] += 1
                return None
            async with loop_timeout(timeout_ms / 1000):
                return await future
        except TimeoutError:
            self._abandon(future)
            self.counters["calls_timed_out"] += 1
            return None
        except asyncio.CancelledError:
            self._abandon(future)
            raise
        except PeerGone:
            self.counters["calls_lost"] += 1
            return None
        finally:
            self._pending.pop(message.call_id, None)

    def _abandon(self, future: asyncio.Future[wire.FromMempool]) -> None:
        """The caller gave up in the moment in which its answer came."""
        if future.done() and not future.cancelled() and future.exception() is None:
            reply = future.result()
            if isinstance(reply, wire.Acquired) and reply.lease_id:
                self.release(reply.lease_id)

    def _send(self, message: wire.ToMempool) -> bool:
        if not self._up.is_set():
            return False
        try:
            self._link.send(message)
        except ClusterError as error:
            _log.info("mempool_send_failed", code=error.code)
            return False
        return True

    def _on_message(self, _seq: int, message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
        close_fds(fds)
        if isinstance(message, wire.Attached):
            self._up.set()
            self._boot = message.boot_generation
            self.memory_id = message.memory_id
            self.peer_address, self.load_interval_ms = message.peer_address, message.load_interval_ms
            self.crosses_hosts = True
            self.counters["connections"] += 1
            if self._on_up is not None:
                self._on_up()
        elif isinstance(message, _ANSWERS):
            future = self._pending.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)
            elif isinstance(message, wire.Acquired) and message.lease_id:
                self.release(message.lease_id)  # its caller gave up
        elif isinstance(message, HostReach):
            self.crosses_hosts = message.crosses
        elif isinstance(message, MemoryShares):
            self.memory = message
            if self.on_memory is not None:
                self.on_memory(message)
        elif isinstance(message, wire.AttachRefused):
            _log.warning("mempool_refused", code=message.code, reason=message.reason)

    def _on_down(self, error: Exception | None) -> None:
        if self._up.is_set():
            self.counters["losses"] += 1
            _log.info("mempool_lost", error=str(error or ""))
        self._up.clear()
        self.load_interval_ms, self.memory = 0, None
        for future in self._pending.values():
            if not future.done():
                future.set_exception(PeerGone("the mempool's connection ended"))
        self._down.set()

    async def _stay_connected(self) -> None:
        retry_ms = RETRY_MIN_MS
        while True:
            self._down.clear()
            connections = self.counters["connections"]
            try:
                await self._link.connect()
                self._link.send(self._attach)
                await self._down.wait()
                if self.counters["connections"] > connections:
                    retry_ms = RETRY_MIN_MS
            except ClusterError:
                self.counters["connects_failed"] += 1
            await asyncio.sleep(retry_ms * random.uniform(0.5, 1.0) / 1000)
            retry_ms = min(2 * retry_ms, RETRY_MAX_MS)


def _lending(reply: wire.FromMempool | None) -> LendingDone | wire.CallFailed | None:
    return reply if isinstance(reply, LendingDone | wire.CallFailed) else None
