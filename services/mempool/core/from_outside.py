"""What other hosts' mempools and the system underneath answer: the part of Mempool that hears them. No I/O."""

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from services.mempool.core.actions import Action, PoolLimits
from services.mempool.core.api_spaces import ApiSpaces
from services.mempool.core.desk import Desk
from services.mempool.core.dram import Dram
from services.mempool.core.engines import CALLER
from services.mempool.core.entry import Entry
from services.mempool.core.lending import Lending
from services.mempool.core.lending_report import obey
from services.mempool.core.pool import Pool
from services.mempool.core.pools import Pools
from services.mempool.core.pulls import Pulls
from services.mempool.core.remote import Remote
from services.mempool.core.remote_serve import RemoteServe
from services.mempool.core.returns import Returns
from services.mempool.core.swaps import Swaps
from services.mempool.core.wishes import Answer, Wish
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, InstanceId, LeaseId, PageId
from shared.lending.rules import EngineProfile, LendingRules
from shared.wire import mempool as wire
from shared.wire import mempool_peer as peer_wire
from shared.wire.lending import ReportReply
from shared.wire.mempool_lending import ReportLoad, ToLending


class FromOutside(ABC):
    """See Mempool, which has these."""

    limits: PoolLimits
    pools: Pools
    pulls: Pulls
    remote: Remote
    returns: Returns
    serve: RemoteServe
    swaps: Swaps
    lending: Lending
    dram: Dram
    api: ApiSpaces
    desk: Desk | None = None
    load_interval_ms: int = 0
    counters: Counter[str]
    _space_of: dict[InstanceId, int]
    _members: dict[int, int]

    @abstractmethod
    def _touch(self, *pools: Pool) -> None: ...

    @abstractmethod
    def _after(self, now_ms: int) -> list[Action]: ...

    def has_member(self, connection: int) -> bool:
        """Whether it is an engine's, a rank's or a caller's."""
        return connection in self._members

    def awaited(self) -> set[int]:
        """Processes of an earlier mempool that must say what they hold, and have not. An engine that is back in
        another space need not, nor its ranks: its pages wait for its death."""
        found = set[int]()
        for pool in self.pools.values():
            others = [p.memory.engines for p in self.pools.values() if p.memory is not None and p is not pool]
            ranks = {r.process for e in others for r in e.ranks.values() if r.instance != CALLER}
            found |= pool.owing() - ranks - {one.process for e in others for one in e.attached.values()}
        return found

    # -- copies -------------------------------------------------------------------------------------

    def on_copied(
        self,
        copy_id: int,
        now_ms: int,
        *,
        failed: bool = False,
        in_doubt: Collection[int] = (),
        took_us: int = 0,
    ) -> list[Action]:
        """Answer to CopyPages. `in_doubt`: targets that may still be written; on_settled follows. `took_us`: 0: not
        known."""
        if not (
            self.dram.on_copied(copy_id, failed=failed, in_doubt=in_doubt, now_ms=now_ms)
            or self.api.on_copied(copy_id, failed=failed, in_doubt=in_doubt)
            or self.swaps.on_copied(copy_id, failed=failed, in_doubt=in_doubt)
        ):
            self.pulls.on_copied(copy_id, failed=failed, in_doubt=in_doubt, now_ms=now_ms, took_us=took_us)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    def on_settled(self, number: int, pages: Sequence[PageId], now_ms: int) -> list[Action]:
        """Nothing can write these pages any more, which a failed copy had left in doubt."""
        for each, mine in self.lending.by_space(number, pages).items():
            rest = self.api.on_settled(each, self.dram.on_settled(each, mine, now_ms))
            if each in self.pools:
                self.pools[each].settled(rest)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    # -- looks at pages (checks.py) -------------------------------------------------------------------

    def hold(self, number: int, block_hash: BlockHash, page: int, epoch: int) -> Entry | None:
        """Pin a sealed page, whose bytes are about to be read. None: it is another block's by now, or nobody's."""
        pool = self.pools.get(number)
        entry = pool.index.get(block_hash) if pool is not None else None
        if pool is None or pool.memory is None or entry is None:
            return None
        if entry.page != page or pool.memory.table.epochs[page] != epoch:
            return None
        pool.index.pin([entry])
        return entry

    def let_go(self, number: int, entries: Sequence[Entry], now_ms: int) -> list[Action]:
        """End as many hold()s."""
        self.pools[number].index.unpin(entries)
        self._touch(self.pools[number])
        return self._after(now_ms)

    def end_lease(self, number: int, lease_id: LeaseId, now_ms: int) -> list[Action]:
        """Its reader gets none of its pages, and never hears of it."""
        pool = self.pools.get(number)
        if pool is not None and (lease := pool.leases.leases.get(lease_id)) is not None:
            pool.leases.release(lease_id, lease.instance)
            self._touch(pool)
        return self._after(now_ms)

    def on_corrupt(self, number: int, block_hash: BlockHash, now_ms: int) -> list[Action]:
        """Somebody wrote into a sealed page, or its memory failed. The block, and what may have been computed from it,
        is found in no space any more. Requests that read it now are not told: their pages stay until they end."""
        origin = self.pools.get(number)
        for pool in self.pools.values():
            if origin is not None and pool.memory is not None and pool.shares_content(origin):
                self.counters["blocks_condemned"] += pool.condemn(block_hash)
                self._touch(pool)
        return self._after(now_ms)

    # -- other hosts --------------------------------------------------------------------------------

    def on_peer_call(self, link: int, message: peer_wire.ToSource, now_ms: int) -> list[Action]:
        """A reader of another host calls. Raises: PeerProtocolError; end its connection."""
        if isinstance(message, peer_wire.PeerCall | peer_wire.WhoIsHere):
            self.api.on_peer_call(link, message, now_ms)
            self._touch(*self.pools.values())
        elif isinstance(message, peer_wire.BlocksCompleted):
            self.returns.on_told(message, now_ms)
        else:
            self.serve.on_message(link, message, now_ms)
        return self._after(now_ms)

    def on_peer_gone(self, link: int, now_ms: int) -> list[Action]:
        """A reader's connection ended."""
        self.serve.on_lost(link)
        self.api.on_peer_gone(link)
        self.pulls.forget(-link, now_ms)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    def on_peer_answer(self, address: str, message: peer_wire.ToReader, now_ms: int) -> list[Action]:
        """Answer to AskPeer. One that cannot be right costs its readers a miss, and is counted."""
        if not self.api.on_peer_answer(address, message, now_ms):
            with contextlib.suppress(PeerProtocolError):
                self.remote.on_message(address, message, now_ms)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    def on_peer_lost(self, address: str, now_ms: int) -> list[Action]:
        """The mempool at the address cannot be reached."""
        self.remote.on_lost(address, now_ms)
        self.api.on_peer_lost(address)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    def on_remote_pulled(
        self, number: int, now_ms: int, *, failed: bool = False, in_doubt: Collection[int] = ()
    ) -> list[Action]:
        """Answer to PullRemote. `in_doubt`: targets that may still be written; on_settled follows."""
        if not self.api.peers.on_pulled(number, failed=failed, in_doubt=in_doubt, now_ms=now_ms):
            self.remote.on_pulled(number, failed=failed, in_doubt=in_doubt, now_ms=now_ms)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    def on_market_reply(self, reply: ReportReply, now_ms: int) -> list[Action]:
        """The coordinator answered the newest report of what is lent."""
        obey(self.lending, reply, now_ms)
        self._touch(*self.pools.values())
        return self._after(now_ms)

    # -- the market, asked by itself ------------------------------------------------------------------

    def open_desk(
        self,
        rules: LendingRules,
        profiles: Mapping[str, EngineProfile],
        name: InstanceId,
        load_interval_ms: int,
    ) -> Desk:
        """From now on engines are asked for their load, and lend and borrow by it. Before anybody attaches."""
        self.load_interval_ms = load_interval_ms
        self.desk = Desk(
            self.lending, self.pools, rules, profiles, name, self.space_number, self._touch, self.swaps.far.need
        )  # fmt: skip
        return self.desk

    def learn_rates(self, gb_per_s: Mapping[tuple[str, str], float]) -> None:
        """What the mover has measured so far, by (source, target) device: budgets follow from it."""
        if self.desk is not None:
            self.desk.budgets.gb_per_s = gb_per_s

    def space_number(self, instance: InstanceId) -> int | None:
        """Of the space that the instance's engine is in, or was; None: it never had one."""
        return self._space_of.get(instance)

    def _on_lending(self, pool: Pool, connection: int, message: ToLending, now_ms: int) -> None:
        """Something of the market is presented, or the front of an engine says how busy it is."""
        if not isinstance(message, ReportLoad):
            self.lending.on_call(pool, connection, message, now_ms)
            return
        instance = pool.instance_of(connection)
        if self.desk is not None and instance is not None:
            self.desk.on_load(connection, instance, message, now_ms)

    def _begin(self, copies: Sequence[Action], now_ms: int) -> list[Action]:
        """Copies that may begin now, and what comes of those that may not at all."""
        has_reader, goes_first = self.pulls.pulls.__contains__, self.swaps.has_copy
        out, refused = self.lending.issue(copies, now_ms, has_reader, goes_first, self._evacuates)
        for copy_id in refused:
            out += self.on_copied(copy_id, now_ms, failed=True)
        return out

    def _evacuates(self, copy_id: int) -> bool:
        """Whether a copy brings away from lent pages what nobody may lose: tensors, and blocks that are read there."""
        return self.api.evacuates(copy_id) or self.swaps.far.evacuates(copy_id)

    def forget_load(self, connection: int) -> None:
        """The connection ended."""
        if self.desk is not None:
            self.desk.on_closed(connection)

    def decide_market(self, now_ms: int) -> tuple[list[Wish], list[Action]]:
        """What the coordinator is to hear, and what is to be done here, of what the desk decides now."""
        wishes = self.desk.decide(now_ms) if self.desk is not None else []
        return wishes, self._after(now_ms)

    def on_wish_answered(self, wish: Wish, answer: Answer, now_ms: int) -> list[Action]:
        """The coordinator's answer; None: none came in time."""
        if self.desk is not None:
            self.desk.answered(wish, answer, now_ms)
        return self._after(now_ms)

    # -- memory of the system's -----------------------------------------------------------------------

    def _change_memory(
        self, pool: Pool, connection: int, call: wire.ReleaseMemory | wire.RegainMemory, now_ms: int
    ) -> None:
        """Give memory of a space back to the system, or take it again; answered later."""
        found = self.pools.get(call.space) if call.space >= 0 else pool
        if found is None or found.releases is None:
            failed = wire.CallFailed(call_id=call.call_id, code="space.unknown", reason="it has no memory")
            pool.say(connection, failed)
            self._touch(pool)
            return
        found.releases.on_call(connection, call, now_ms, self.limits.max_wait_ms)
        self._touch(found)

    def on_released(
        self, number: int, units: Sequence[int], now_ms: int, *, failed: bool = False
    ) -> list[Action]:
        """Answer to ReleaseUnits. Failed: their memory must stay, and is where it was."""
        pool = self.pools.get(number)  # None: it has ended meanwhile
        if pool is not None and pool.releases is not None:
            pool.releases.on_released(units, failed=failed)
            self._touch(pool)
        return self._after(now_ms)

    def on_restored(self, number: int, units: Sequence[int], num_made: int, now_ms: int) -> list[Action]:
        """Answer to RestoreUnits: there is memory for the first `num_made` of them."""
        pool = self.pools.get(number)  # None: it has ended, and asked for no unit
        if pool is not None and pool.releases is not None:
            pool.releases.on_restored(units, num_made)
            self._touch(pool)
        return self._after(now_ms)
