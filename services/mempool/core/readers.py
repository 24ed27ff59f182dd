"""Acquire and HandoffReady: who reads which sealed pages, and for how long they stay. No I/O."""

from array import array
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from services.mempool.core import parse
from services.mempool.core.actions import PoolLimits, Send
from services.mempool.core.leases import Leases, Waiter
from services.mempool.core.radix import Index
from shared.errors import Overloaded
from shared.ids import Epoch, InstanceId, LeaseId
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire import mempool as wire

# in `came` beside the tiers: blocks of the largest copy that was waited for, and how long it took
TIMED, TIMED_US = "timed", "timed_us"
LATE, LATE_US = "late", "late_us"  # blocks that did not come in time from another host, and since when
_NOTHING: Mapping[str, int] = MappingProxyType({})


class Readers:
    """Answers readers from the index; methods return messages to send.

    A call that names a handoff waits for it at most wait_ms, unless all its blocks are there already.
    """

    def __init__(
        self, limits: PoolLimits, index: Index, leases: Leases, counters: Counter[str], space: int = 0
    ) -> None:
        self._space = space
        self.epochs = array("Q")  # of every page: the page table's own, once there is one
        self._limits = limits
        self._index = index
        self._leases = leases
        self._counters = counters

    def on_acquire(
        self, connection: int, instance: InstanceId, call: wire.Acquire, now_ms: int
    ) -> list[Send]:
        """Answered now or, for a handoff on its way, later. Raises: PeerProtocolError."""
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        self._counters["acquires"] += 1
        handoff_id = call.handoff_id
        has_come = handoff_id in self._leases.handoffs or self._leases.is_closed(handoff_id)
        if has_come or not handoff_id or all(block_hash in self._index for block_hash in hashes):
            return [self.answer(connection, instance, call, now_ms)]
        if call.wait_ms <= 0:
            return [self._acquire(connection, instance, call, now_ms)]
        if len(self._leases.waiters) >= self._limits.max_waiting:
            return [self._fail(connection, call, f"{self._limits.max_waiting} calls wait for handoffs")]
        self._counters["acquires_waited"] += 1
        until_ms = now_ms + min(call.wait_ms, self._limits.max_wait_ms)
        self._leases.wait(connection, instance, call, until_ms)
        return []

    def on_handoff_ready(self, message: wire.HandoffReady, now_ms: int) -> list[Send]:
        """Hold what is indexed of it, and answer who waited. Raises: PeerProtocolError."""
        hashes = parse.hashes(message.hashes, self._limits.max_blocks_per_call)
        entries = [entry for h in hashes if (entry := self._index.get(h)) is not None]
        self._counters["handoffs"] += 1
        if self._leases.is_closed(message.handoff_id):  # its acquirer was faster
            return []
        if len(self._leases.handoffs) < self._limits.max_handoffs:
            self._leases.hold(message.handoff_id, entries, now_ms + self._ttl(message.ttl_ms))
        else:
            self._counters["handoffs_refused"] += 1
        waiters = self._leases.take_waiters(message.handoff_id)
        return [self.answer(w.connection, w.instance, w.call, now_ms) for w in waiters]

    def take_late(self, now_ms: int) -> list[Waiter]:
        """Calls that have waited long enough, the caller's to answer."""
        late = self._leases.take_late_waiters(now_ms)
        self._counters["waits_expired"] += len(late)
        return late

    def expire(self, now_ms: int) -> list[Send]:
        """End leases and handoffs that are due; a call that waited long enough gets what there is."""
        expired = self._leases.expire(now_ms)
        self._counters["leases_expired"] += expired.num_leases
        self._counters["handoffs_expired"] += expired.num_handoffs
        self._counters["waits_expired"] += len(expired.waiters)
        return [self.answer(w.connection, w.instance, w.call, now_ms) for w in expired.waiters]

    def answer(
        self,
        connection: int,
        instance: InstanceId,
        call: wire.Acquire,
        now_ms: int,
        came: Mapping[str, int] = _NOTHING,
    ) -> Send:
        """With what there is; the handoff, if the call names one, is over. Raises: PeerProtocolError."""
        answer = self._acquire(connection, instance, call, now_ms, came)
        if call.handoff_id:  # its acquirer has pinned the pages: the handoff's own hold may go
            self._leases.close_handoff(call.handoff_id)
        return answer

    def _acquire(
        self,
        connection: int,
        instance: InstanceId,
        call: wire.Acquire,
        now_ms: int,
        came: Mapping[str, int] = _NOTHING,
    ) -> Send:
        """The longest indexed prefix, pinned."""
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        entries = self._index.prefix(hashes)
        self._counters["blocks_hit"] += len(entries)
        self._counters["blocks_missed"] += len(hashes) - len(entries)
        if not entries:
            nothing = wire.Acquired(
                call_id=call.call_id,
                lease_id=LeaseId(""),
                fencing_token=Epoch(0),
                num_blocks=0,
                blocks_late=came.get(LATE, 0),
                late_us=came.get(LATE_US, 0),
            )
            return Send(connection, nothing)
        if len(self._leases.leases) >= self._limits.max_leases:
            return self._fail(connection, call, f"{self._limits.max_leases} leases are held")
        until_ms = None if call.until_release else now_ms + self._ttl(call.ttl_ms)
        lease = self._leases.grant(connection, instance, entries, until_ms)
        pages = [entry.page for entry in entries]
        acquired = wire.Acquired(
            call_id=call.call_id,
            lease_id=lease.lease_id,
            fencing_token=lease.fencing_token,
            num_blocks=len(entries),
            pages=u32_bytes(pages),
            epochs=u64_bytes(map(self.epochs.__getitem__, pages)),
            blocks_peer=min(len(entries), came.get("peer", 0)),
            # what came from another host lands behind a GPU and is copied on from there
            blocks_dram=max(0, came.get("dram", 0) - came.get("remote", 0)),
            blocks_remote=came.get("remote", 0),
            blocks_timed=came.get(TIMED, 0),
            timed_us=came.get(TIMED_US, 0),
            blocks_late=came.get(LATE, 0),
            late_us=came.get(LATE_US, 0),
        )
        return Send(connection, acquired, space=self._space)

    def _ttl(self, ttl_ms: int) -> int:
        return max(1, min(ttl_ms, self._limits.max_ttl_ms))

    def _fail(self, connection: int, call: wire.Acquire, reason: str) -> Send:
        self._counters["calls_refused"] += 1
        return Send(connection, wire.CallFailed(call_id=call.call_id, code=Overloaded.code, reason=reason))
