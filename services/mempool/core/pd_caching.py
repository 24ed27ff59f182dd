"""PD-Basic and PD-Caching-1, -2, -3: which end keeps what, and what goes back to the prefill end. No I/O.

MemServe 5.1, Table 4. "P" is the prefill end, "D" the decode end.

| mode  | P after its prefill           | D while it decodes, and after it                        | who does it        |
|-------|-------------------------------|---------------------------------------------------------|--------------------|
| basic | computes every prompt anew    | keeps nothing                                           | both engines       |
| 1     | keeps the prompt's blocks     | keeps nothing                                           | D's engine         |
| 2     | as 1                          | keeps the prompt's blocks and those that it completes   |                    |
| 3     | as 1, and has what D completes | as 2; what it completes goes back to P                 | the mempool, below |

The block in which the prompt ends is completed by D, so it goes back too. Going back needs no step of P's engine: its
mempool copies, into pages that are free, that nobody pins or that the engine has in stock, at most a part of its stock
(decision 0054), and gives up where there are none: P reads it from D when it wants it, or computes it. What goes back
to another host's P does so by returns.py, in runs of blocks and not at once.
In modes 1 and 2 P does not read from D's space either; in mode 3 it does, for what has not come back. Where both ends
are one space, what D names is P's at once, in every mode but basic.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from services.mempool.core.pool import Pool
from services.mempool.core.pull import SPARE_WITHIN_MS
from shared.ids import BlockHash, HandoffId
from shared.kv.block_hash import split_hashes
from shared.wire.mempool import Sealed

MAX_HANDOFFS = 4_096  # whose source is remembered
MAX_CHAINS = 65_536  # blocks whose successors go back
MAX_WAITING = 4_096  # blocks that wait to go back, of one pair of spaces; older ones are dropped
MAX_BLOCKS = 64  # in one copy
MAX_COPIES = 4  # at once, of one pair of spaces

Pair = tuple[int, int]  # D's space, P's space


class PdCaching(StrEnum):
    """The setting `pd_caching`."""

    BASIC = "basic"
    PREFILL = "1"
    BOTH = "2"
    FULL = "3"


class Chain(NamedTuple):
    """A block that D took or completed behind one: where such go back to, and in whose trace."""

    source: int
    traceparent: str


class Push(Protocol):
    """See Pulls.push()."""

    def __call__(
        self,
        source: Pool,
        target: Pool,
        hashes: Sequence[BlockHash],
        now_ms: int,
        *,
        traces: Mapping[BlockHash, str],
        within_ms: int,
    ) -> int: ...


class PushBack:
    """What D completes behind a chain that P handed over is copied into P's space as it is sealed.

    Args: room: how many blocks may go there now.
    """

    def __init__(
        self,
        mode: PdCaching,
        pools: Mapping[int, Pool],
        push: Push,
        room: Callable[[Pool], int],
        counters: Counter[str],
    ) -> None:
        self.mode = mode
        self._pools = pools
        self._push, self._room = push, room
        self._counters = counters
        self._sources: OrderedDict[HandoffId, int] = OrderedDict()
        self._chains: OrderedDict[tuple[int, BlockHash], Chain] = OrderedDict()  # by D's space and block
        self._waiting: dict[Pair, OrderedDict[BlockHash, str]] = {}
        self._open: Counter[Pair] = Counter()
        self.takers: set[int] = set()  # spaces that took a handoff of another

    def hides(self, reader: Pool, other: Pool, *, for_handoff: bool) -> bool:
        """Whether this reader may not have blocks of the other space."""
        return self.mode is not PdCaching.FULL and not for_handoff and other.number in self.takers

    def handed(self, handoff_id: HandoffId, source: Pool) -> None:
        """P says that a prompt is ready."""
        _remember(self._sources, handoff_id, source.number, MAX_HANDOFFS)

    def taken(
        self, handoff_id: HandoffId, taker: Pool, hashes: Sequence[BlockHash], traceparent: str
    ) -> None:
        """D has the blocks of a handoff, the last one perhaps partial."""
        source = self._sources.pop(handoff_id, taker.number)
        if source == taker.number:
            return
        self.takers.add(taker.number)
        if self.mode is not PdCaching.FULL:
            return
        for entry in taker.index.prefix(hashes)[-2:]:
            for block_hash in (entry.parent, entry.block_hash):
                _remember(self._chains, (taker.number, block_hash), Chain(source, traceparent), MAX_CHAINS)

    def on_sealed(self, pool: Pool, message: Sealed) -> None:
        """An engine has sealed blocks; the message was checked."""
        if not self._chains:
            return
        for block_hash, parent in zip(
            split_hashes(message.hashes), split_hashes(message.parents), strict=True
        ):
            chain = self._chains.get((pool.number, parent))
            if chain is None:
                continue
            _remember(self._chains, (pool.number, block_hash), chain, MAX_CHAINS)
            waiting = self._waiting.setdefault((pool.number, chain.source), OrderedDict())
            waiting[block_hash] = chain.traceparent
            if len(waiting) > MAX_WAITING:
                waiting.popitem(last=False)
                self._counters["push_backs_dropped"] += 1

    def advance(self, now_ms: int) -> None:
        """After every event: begin copies. What there is no room for is dropped."""
        for pair, waiting in list(self._waiting.items()):
            source, target = self._pools[pair[0]], self._pools[pair[1]]
            while waiting and self._open[pair] < MAX_COPIES:
                blocks = dict(waiting.popitem(last=False) for _ in range(min(MAX_BLOCKS, len(waiting))))
                going = list(blocks)[: self._room(target)]
                self._counters["push_backs_dropped"] += len(blocks) - len(going)
                if self._push(source, target, going, now_ms, traces=blocks, within_ms=SPARE_WITHIN_MS):
                    self._open[pair] += 1
            if not waiting:
                del self._waiting[pair]

    def ended(self, source: Pool, target: Pool) -> None:
        """A copy that was begun has ended, however."""
        self._open[source.number, target.number] -= 1

    def forget(self, number: int) -> None:
        """The space is over: nothing goes back there, nor comes from there. Cost: a look at all that is remembered."""
        self.takers.discard(number)
        for handoff_id in [each for each, source in self._sources.items() if source == number]:
            del self._sources[handoff_id]
        for key in [key for key, chain in self._chains.items() if number in (key[0], chain.source)]:
            del self._chains[key]
        for pair in [pair for pair in self._waiting if number in pair]:
            del self._waiting[pair]


def _remember(where: OrderedDict, key: object, value: object, most: int) -> None:
    where[key] = value
    where.move_to_end(key)
    if len(where) > most:
        where.popitem(last=False)
