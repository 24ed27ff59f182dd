"""What this mempool gives to mempools of other hosts: sealed pages, pinned for a while, and its word on epochs. No I/O.

A peer's pins end by its release, at their time, or with its link, whose loss is noticed within 2 s. That is safe at any
moment: the peer copies, then asks whether every page is still sealed under the epoch that it was told (CheckEpochs),
and drops what is not. So no proof of its death is needed, and nothing here waits for a peer.

Peers read host memory only: blocks that are on GPUs alone are copied to the DRAM behind them first (dram.py, pulls.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.mempool.core import parse
from services.mempool.core.actions import Action, PoolLimits, TellPeer
from services.mempool.core.entry import Entry
from services.mempool.core.leases import has_come
from services.mempool.core.pool import Pool
from services.mempool.core.pull import Reader
from shared.errors import Overloaded, PeerProtocolError
from shared.ids import BlockHash, HandoffId, InstanceId, LeaseId, PageId
from shared.kv.page import PageState
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire import mempool_peer as wire
from shared.wire.mempool import Acquire


@dataclass(slots=True)
class Waiting:
    """A call that came before its handoff."""

    link: int
    call: wire.RemoteAcquire
    hashes: list[BlockHash]
    until_ms: int


class RemoteServe:
    """Answers readers of other hosts. `link` numbers a peer's connection.

    Args:
        pools: of all spaces, a view.
        landing: the space in host memory beside this one, or itself; None: there is none.
        bring: have blocks copied into a space; staged() follows. False: there is nothing to copy.
        names: whether a transfer of the nine calls (its number, 0: any) is under way and names these pages of a space.
    """

    def __init__(
        self,
        limits: PoolLimits,
        pools: Mapping[int, Pool],
        landing: Callable[[Pool], Pool | None],
        bring: Callable[[Pool, Reader, int], bool],
        counters: Counter[str],
        names: Callable[[int, int, Iterable[int]], bool],
    ) -> None:
        self._limits = limits
        self._pools = pools
        self._landing = landing
        self._bring = bring
        self._names = names
        self._staging: dict[
            tuple[int, int], wire.RemoteAcquire
        ] = {}  # by link and call: copied to host memory
        self._counters = counters
        self._out: list[Action] = []
        self._waiting: dict[HandoffId, list[Waiting]] = {}
        self._leases: dict[int, dict[LeaseId, tuple[int, list[PageId]]]] = {}  # by link: space, pages
        self._readable: dict[tuple[int, int, int], int] = {}  # (link, space, page) -> leases of it

    def take_actions(self) -> list[Action]:
        """What was decided since the last call."""
        out, self._out = self._out, []
        return out

    @property
    def waits(self) -> bool:
        """Whether some reader waits for a handoff."""
        return bool(self._waiting)

    def may_read(self, link: int, space: int, pages: Iterable[int]) -> bool:
        """Whether all of these are leased to the peer, now or a moment ago. From any thread."""
        return all((link, space, page) in self._readable for page in pages)

    # -- events -----------------------------------------------------------------------------------

    def on_message(self, link: int, message: wire.ToSource, now_ms: int) -> None:
        """A reader's call. Raises: PeerProtocolError."""
        match message:
            case wire.RemoteAcquire():
                self._on_acquire(link, message, now_ms)
            case wire.CheckEpochs():
                self._on_check(link, message)
            case wire.RemoteRelease():
                self._release(link, message.lease_id)
            case _:
                raise PeerProtocolError(f"{type(message).__name__} is no call of a reader")

    def on_lost(self, link: int) -> None:
        """The connection ended: its pins go, its calls want no answer."""
        for lease_id in list(self._leases.get(link, ())):
            self._release(link, lease_id)
        self._leases.pop(link, None)
        self._staging = {key: call for key, call in self._staging.items() if key[0] != link}
        for handoff_id, calls in list(self._waiting.items()):
            self._set_waiting(handoff_id, [call for call in calls if call.link != link])

    def on_handoff(self, handoff_id: HandoffId, now_ms: int) -> None:
        """It has come: who waited for it is answered."""
        for waiting in self._waiting.pop(handoff_id, ()):
            self._answer(waiting.link, waiting.call, waiting.hashes, now_ms)

    def tick(self, now_ms: int) -> None:
        """Who waited long enough gets what there is. Leases end by their pool's own clock."""
        for handoff_id, calls in list(self._waiting.items()):
            self._set_waiting(handoff_id, [call for call in calls if now_ms < call.until_ms])
            for waiting in calls:
                if now_ms >= waiting.until_ms:
                    self._counters["peer_waits_expired"] += 1
                    self._answer(waiting.link, waiting.call, waiting.hashes, now_ms)

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do."""
        return min((call.until_ms for calls in self._waiting.values() for call in calls), default=None)

    def _set_waiting(self, handoff_id: HandoffId, calls: list[Waiting]) -> None:
        if calls:
            self._waiting[handoff_id] = calls
        else:
            del self._waiting[handoff_id]

    # -- calls ------------------------------------------------------------------------------------

    def _on_acquire(self, link: int, call: wire.RemoteAcquire, now_ms: int) -> None:
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        self._counters["peer_acquires"] += 1
        handoff_id = call.handoff_id
        here = has_come((pool.leases for pool in self._pools.values()), handoff_id)
        if not handoff_id or here or call.wait_ms <= 0 or not hashes or self._has_all(call, hashes):
            self._answer(link, call, hashes, now_ms)
            return
        if sum(map(len, self._waiting.values())) >= self._limits.max_waiting:
            self._refuse(link, call.call_id, f"{self._limits.max_waiting} calls wait for handoffs")
            return
        until_ms = now_ms + min(call.wait_ms, self._limits.max_wait_ms)
        self._waiting.setdefault(handoff_id, []).append(Waiting(link, call, hashes, until_ms))

    def _has_all(self, call: wire.RemoteAcquire, hashes: list[BlockHash]) -> bool:
        return any(len(pool.index.prefix(hashes)) == len(hashes) for pool in self._of(call))

    def _has_in_other_cut(self, call: wire.RemoteAcquire, hashes: list[BlockHash]) -> bool:
        """Whether the first block is here, but in no space whose pages this reader can use: hashes say nothing of them.

        Cost: a look-up for each space.
        """
        found = False
        for pool in self._pools.values():
            if pool.memory is not None and pool.index.prefix(hashes[:1]):
                if _is_usable(pool, call):
                    return False
                found = True
        return found

    def _of(self, call: wire.RemoteAcquire) -> list[Pool]:
        return [pool for pool in self._pools.values() if _is_usable(pool, call)]

    def _answer(self, link: int, call: wire.RemoteAcquire, hashes: list[BlockHash], now_ms: int) -> None:
        """With the space that has most, if need be in another cut; the handoff, if the call names one, is over."""
        found = [(pool, pool.index.prefix(hashes)) for pool in self._of(call)]

        def order(item: tuple[Pool, list[Entry]]) -> tuple[int, bool, bool]:
            pool, entries = item
            return len(entries), _is_same_cut(pool, call), self._landing(pool) is pool

        best = max(found, key=order, default=None)
        if best is None or not best[1]:
            self._give(link, call, None, now_ms)
        elif not self._stage(link, call, *best, now_ms):
            self._give(link, call, self._landing(best[0]), now_ms)
        if call.handoff_id:  # the lease, or the copy, has pinned the pages: the handoff's own hold may go
            for pool in self._pools.values():
                pool.leases.close_handoff(call.handoff_id)

    def _stage(
        self, link: int, call: wire.RemoteAcquire, pool: Pool, entries: list[Entry], now_ms: int
    ) -> bool:
        """Whether these blocks are being copied to host memory, after which staged() answers."""
        landing = self._landing(pool)
        if landing is None or landing is pool or (link, call.call_id) in self._staging:
            return False
        hashes = [entry.block_hash for entry in entries]
        patience_ms = min(max(call.wait_ms, self._limits.pull_patience_ms), self._limits.max_wait_ms)
        inner = Acquire(call_id=call.call_id, hashes=b"".join(hashes))
        reader = Reader(-link, _instance(link), inner, hashes, now_ms + patience_ms)
        if not self._bring(landing, reader, now_ms):
            return False
        self._staging[link, call.call_id] = call
        self._counters["peer_calls_staged"] += 1
        return True

    def staged(self, landing: Pool, reader: Reader, now_ms: int) -> None:
        """What could be copied to host memory is there."""
        call = self._staging.pop((-reader.connection, reader.call.call_id), None)
        if call is not None:
            self._give(-reader.connection, call, landing, now_ms)

    def _give(self, link: int, call: wire.RemoteAcquire, pool: Pool | None, now_ms: int) -> None:
        """What this space has of it, leased."""
        hashes = parse.hashes(call.hashes, self._limits.max_blocks_per_call)
        entries = pool.index.prefix(hashes) if pool is not None else []
        if pool is None or not entries:
            self._counters["peer_misses"] += 1
            other_cut = self._has_in_other_cut(call, hashes)
            self._counters["peer_misses_other_cut"] += other_cut
            self._out.append(TellPeer(link, wire.RemoteAcquired(call_id=call.call_id), other_cut))
        elif self._num_held(link) >= self._limits.max_leases:
            self._refuse(link, call.call_id, f"{self._limits.max_leases} leases are held")
        else:
            self._grant(link, call, pool, entries, now_ms)

    def _grant(
        self, link: int, call: wire.RemoteAcquire, pool: Pool, entries: list[Entry], now_ms: int
    ) -> None:
        assert pool.memory is not None
        until_ms = now_ms + max(1, min(call.ttl_ms, self._limits.max_ttl_ms))
        lease = pool.leases.grant(-link, _instance(link), entries, until_ms)
        held = self._leases.setdefault(link, {})
        pages = [entry.page for entry in entries]
        held[lease.lease_id] = pool.number, pages
        for page in pages:
            key = (link, pool.number, page)
            self._readable[key] = self._readable.get(key, 0) + 1
        self._counters["peer_blocks_pinned"] += len(entries)
        epochs = pool.memory.table.epochs
        self._tell(
            link,
            wire.RemoteAcquired(
                call_id=call.call_id,
                lease_id=lease.lease_id,
                space=pool.number,
                num_blocks=len(entries),
                pages=u32_bytes(pages),
                epochs=u64_bytes(epochs[page] for page in pages),
                parents=b"".join(entry.parent for entry in entries),
                valid_tokens=u32_bytes(entry.valid_tokens for entry in entries),
                checksums=bytes(4 * len(entries)),  # an earlier version asks for as many as pages
                is_recut=not _is_same_cut(pool, call),
            ),
        )

    def _num_held(self, link: int) -> int:
        """Leases of the peer, without those that ended at their time."""
        held = self._leases.get(link, {})
        for lease_id in [known for known, (space, _) in held.items() if not self._is_held(known, space)]:
            self._release(link, lease_id)
        return len(held)

    def _is_held(self, lease_id: LeaseId, space: int) -> bool:
        return (pool := self._pools.get(space)) is not None and lease_id in pool.leases.leases

    def _on_check(self, link: int, call: wire.CheckEpochs) -> None:
        """The seqlock's second look, taken after the peer's copy has ended."""
        pages = parse.pages(call.pages, call.epochs, self._limits.max_blocks_per_call)
        pool = self._pools.get(call.space)
        table = None if pool is None or pool.memory is None else pool.memory.table
        if call.held and not self._names(call.order, call.space, [page for page, _ in pages]):
            table = None  # their holder has been told that the transfer failed, and may write into them
        stale = [
            position
            for position, (page, epoch) in enumerate(pages)
            if table is None
            or page >= table.num_pages
            or (table.states[page] != PageState.SEALED and not call.held)
            or table.epochs[page] != epoch
        ]
        self._counters["peer_pages_stale"] += len(stale)
        self._tell(link, wire.EpochsChecked(call_id=call.call_id, stale=u32_bytes(stale)))

    def _release(self, link: int, lease_id: LeaseId) -> None:
        space, pages = self._leases.get(link, {}).pop(lease_id, (-1, []))
        for page in pages:
            key = (link, space, page)
            self._readable[key] -= 1
            if not self._readable[key]:
                del self._readable[key]
        if (pool := self._pools.get(space)) is not None:
            pool.leases.release(lease_id, _instance(link))

    def _tell(self, link: int, message: wire.ToReader) -> None:
        self._out.append(TellPeer(link, message))

    def _refuse(self, link: int, call_id: int, reason: str) -> None:
        self._counters["calls_refused"] += 1
        self._tell(link, wire.CallRefused(call_id=call_id, code=Overloaded.code, reason=reason))


def _instance(link: int) -> InstanceId:
    """Whose leases these are; no worker is called so."""
    return InstanceId(f"peer:{link}")


def _is_same_cut(pool: Pool, call: wire.RemoteAcquire) -> bool:
    """Whether pages of the space are the reader's own, byte for byte."""
    return pool.memory is not None and pool.memory.content_key == call.content_key


def _is_usable(pool: Pool, call: wire.RemoteAcquire) -> bool:
    """Whether the reader can use pages of the space: they are its own, or it cuts them anew. Lent pages are cut as
    their borrower's, whose description the lender's space does not have."""
    if _is_same_cut(pool, call):
        return True
    memory = pool.memory
    return memory is not None and not memory.is_loan and memory.family_key == call.family_key != ""
