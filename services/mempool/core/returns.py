"""PD-Caching-3 between hosts: what D completes behind a prompt of another host's P goes back to P's mempool. No I/O.

    D: Acquire(handoff, source_mempool) answered -> Sealed behind it, gathered -> BlocksCompleted --> P
    P: a hand-off of an engine here, blocks that are missing, spare pages -> RemoteAcquire --> D, and so on (remote.py)

Within one mempool pd_caching.py copies each block as it is sealed. Between two a block is ten messages, so they are
gathered, of one chain each, for GATHER_MS: a prompt that comes sooner does not find two seconds' worth of tokens.
All of it may be lost on the way, or dropped where there is no room: P computes that then.

P takes no word of D's on trust but for the bytes, as any reader of a hand-off: it pulls only behind a hand-off that an
engine here has made, what continues blocks that it has, and under the rules of every pull (leases, epochs, sums).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.mempool.core import parse
from services.mempool.core.actions import Action, AskPeer, PoolLimits
from services.mempool.core.pd_caching import PdCaching
from services.mempool.core.pool import Pool
from services.mempool.core.pull import Reader
from services.mempool.core.remote import Remote
from services.mempool.core.remote_pull import Back
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, HandoffId
from shared.kv.block_hash import split_hashes
from shared.wire.mempool import HandoffReady, Sealed
from shared.wire.mempool_peer import BlocksCompleted

GATHER_MS = 2_000  # from a chain's first block to the message about it
MAX_GATHERED = 16  # blocks of one chain: with so many it is said at once
MAX_CHAINS = 65_536  # blocks whose successors go back
MAX_WAITING = (
    4_096  # blocks that wait to be told, and as many to be pulled; those of older chains are dropped
)
MAX_BLOCKS = 64  # in one message, and in one pull
MAX_PULLS = 4  # at once
MAX_ADDRESS = 256  # characters
MAX_TRACEPARENT = 64  # characters


class Chain(NamedTuple):
    """A block that D took from another host, or completed behind one."""

    address: str  # P's mempool
    handoff_id: HandoffId
    traceparent: str


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one chain on their way back."""

    chain: Chain  # at P: with D's address
    parent: BlockHash  # of the first
    hashes: list[BlockHash]
    since_ms: int

    def takes(self, more: "Run", most: int) -> bool:
        """Whether it may go on with these, and is no longer than `most` blocks then."""
        is_same = (self.chain.address, self.chain.handoff_id) == (more.chain.address, more.chain.handoff_id)
        fits = len(self.hashes) + len(more.hashes) <= most
        return is_same and fits and set(self.hashes).isdisjoint(more.hashes)


@dataclass(slots=True)
class Runs:
    """Runs, the oldest first; blocks join the one that they continue."""

    num_blocks: int = 0
    _by_first: OrderedDict[BlockHash, Run] = field(default_factory=OrderedDict)
    _by_last: dict[BlockHash, Run] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._by_first)

    def __iter__(self) -> Iterator[Run]:
        """All of them; they may be removed meanwhile."""
        return iter(list(self._by_first.values()))

    def oldest(self) -> Run | None:
        """None: there is none."""
        return next(iter(self._by_first.values()), None)

    def add(self, new: Run, most: int) -> Run:
        """As a run of its own, or joined to one, which is returned; no run is longer than `most` blocks."""
        run = self._by_last.get(new.parent)
        if run is not None and run.takes(new, most):
            del self._by_last[new.parent]
            run.hashes += new.hashes
        else:
            if new.hashes[0] in self._by_first:
                self.remove(self._by_first[new.hashes[0]])
            run = self._by_first[new.hashes[0]] = new
        self._by_last[run.hashes[-1]] = run
        self.num_blocks += len(new.hashes)
        return run

    def remove(self, run: Run) -> None:
        """It is one of these."""
        del self._by_first[run.hashes[0]]
        if self._by_last.get(run.hashes[-1]) is run:
            del self._by_last[run.hashes[-1]]
        self.num_blocks -= len(run.hashes)


class Returns:
    """Both ends of it, of one mempool.

    Args: address: where other hosts reach this mempool; "": they do not.
    """

    def __init__(
        self,
        limits: PoolLimits,
        pools: Mapping[int, Pool],
        remote: Remote,
        address: Callable[[], str],
        counters: Counter[str],
    ) -> None:
        self.is_on = PdCaching(limits.pd_caching) is PdCaching.FULL
        self._limits, self._pools, self._remote = limits, pools, remote
        self._address, self._counters = address, counters
        self._chains: OrderedDict[tuple[int, BlockHash], Chain] = OrderedDict()  # D: by space and block
        self._gathered = Runs()  # D
        self._handed: OrderedDict[HandoffId, tuple[int, BlockHash | None]] = OrderedDict()  # P: space, seed
        self._told = Runs()  # P
        self._out: list[Action] = []

    def take_actions(self) -> list[Action]:
        """What was decided since the last call."""
        out, self._out = self._out, []
        return out

    # -- decode's end ---------------------------------------------------------------------------------

    def taken(self, pool: Pool, reader: Reader) -> None:
        """D has the blocks of a hand-off, or computes those that did not come; the last one may be partial."""
        call = reader.call
        is_far = call.source_mempool not in ("", self._address())
        if not (self.is_on and self._address() and is_far) or self._remote.landing(pool) is None:
            return
        chain = Chain(call.source_mempool, call.handoff_id, call.traceparent)
        before = [entry.parent for entry in pool.index.prefix(reader.hashes)[-2:]]
        for block_hash in (*before, *reader.hashes[-2:]):
            _remember(self._chains, (pool.number, block_hash), chain, MAX_CHAINS)

    def on_sealed(self, pool: Pool, message: Sealed, now_ms: int) -> None:
        """An engine has sealed blocks; the message was checked."""
        if not self._chains:
            return
        parents = split_hashes(message.parents)
        for block_hash, parent in zip(split_hashes(message.hashes), parents, strict=True):
            chain = self._chains.get((pool.number, parent))
            if chain is None:
                continue
            _remember(self._chains, (pool.number, block_hash), chain, MAX_CHAINS)
            run = self._gathered.add(Run(chain, parent, [block_hash], now_ms), MAX_GATHERED)
            if len(run.hashes) == MAX_GATHERED:
                self._tell(run)
        self._drop_old(self._gathered)

    def _tell(self, run: Run) -> None:
        self._gathered.remove(run)
        self._counters["push_backs_told"] += len(run.hashes)
        message = BlocksCompleted(
            handoff_id=run.chain.handoff_id, address=self._address(), parent=run.parent,
            hashes=b"".join(run.hashes), traceparent=run.chain.traceparent,
        )  # fmt: skip
        self._out.append(AskPeer(run.chain.address, message))

    # -- prefill's end --------------------------------------------------------------------------------

    def handed(self, pool: Pool, message: HandoffReady) -> None:
        """An engine here says that a prompt is ready; the message was checked."""
        if not (self.is_on and self._address()):
            return
        first = pool.index.get(BlockHash(message.hashes[:32]))
        known = pool.number, first.parent if first is not None else None
        _remember(self._handed, message.handoff_id, known, self._limits.max_handoffs)

    def on_told(self, message: BlocksCompleted, now_ms: int) -> None:
        """Another host's D has completed blocks. Raises: PeerProtocolError."""
        parents, hashes = parse.hashes(message.parent, 1), parse.hashes(message.hashes, MAX_BLOCKS)
        if not parents or not hashes or len({*parents, *hashes}) <= len(hashes):  # one is named twice
            raise PeerProtocolError("BlocksCompleted: these blocks are no chain")
        if len(message.address) > MAX_ADDRESS or len(message.traceparent) > MAX_TRACEPARENT:
            raise PeerProtocolError("BlocksCompleted: no address or traceparent is as long")
        if message.handoff_id not in self._handed or message.address in ("", self._address()):
            self._counters["push_backs_refused"] += 1
            return
        chain = Chain(message.address, message.handoff_id, message.traceparent)
        self._told.add(Run(chain, parents[0], hashes, now_ms), MAX_BLOCKS)
        self._drop_old(self._told)

    def _pull(self, run: Run, now_ms: int) -> bool:
        """Whether it begins."""
        number, seed = self._handed.get(run.chain.handoff_id, (-1, None))
        pool, back = self._pools.get(number), Back(run.parent, run.chain.traceparent)
        return pool is not None and self._remote.bring_back(
            pool, run.chain.address, run.hashes, back, now_ms, is_first=run.parent == seed
        )

    # -- time -----------------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """After every event: say what was gathered long enough, pull what was told."""
        while (run := self._gathered.oldest()) is not None and now_ms >= run.since_ms + GATHER_MS:
            self._tell(run)
        for run in self._told if self._told else ():
            coming = self._remote.coming_back()
            if len(coming) >= MAX_PULLS:
                break
            if any(run.parent in hashes for hashes in coming):
                continue  # what it continues is on its way
            self._told.remove(run)
            self._counters["push_backs_dropped"] += not self._pull(run, now_ms)

    def next_deadline_ms(self) -> int | None:
        """When advance() has something to do without an event."""
        run = self._gathered.oldest()
        return run.since_ms + GATHER_MS if run is not None else None

    def _drop_old(self, runs: Runs) -> None:
        while runs.num_blocks > MAX_WAITING and (run := runs.oldest()) is not None:
            runs.remove(run)
            self._counters["push_backs_dropped"] += 1


def _remember(where: OrderedDict, key: object, value: object, most: int) -> None:
    where[key] = value
    where.move_to_end(key)
    if len(where) > most:
        where.popitem(last=False)
