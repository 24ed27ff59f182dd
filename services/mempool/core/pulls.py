"""Blocks that a reader wants and that another space of this mempool has: copied before the reader is answered. No I/O.

    Acquire -> own prefix pinned, the rest found elsewhere and pinned there -> pages claimed in the reader's space
            -> CopyPages -> sealed and indexed -> the lease is granted over all of it

A space is one GPU's pages, or a part of host memory (architecture.md section 4, "Paths"; MemServe 4.3 `transfer`).
Sources are sealed and pinned until the copy has ended, so no byte of theirs can change; targets are nobody's else.
A reader never waits longer than it asked to: it is answered with what is there, and computes the rest.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.mempool.core.actions import Action, CopyPages, PoolLimits
from services.mempool.core.attachments import Claim
from services.mempool.core.entry import Entry
from services.mempool.core.pd_caching import PdCaching, PushBack
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, InstanceId
from shared.wire.mempool import Acquire

ASK_AGAIN_MS = 50


@dataclass(frozen=True, slots=True)
class Reader:
    """An Acquire that is answered once what it misses has come, or its time is over."""

    connection: int
    instance: InstanceId
    call: Acquire
    hashes: list[BlockHash]
    until_ms: int
    came: Counter[str] = field(default_factory=Counter, compare=False)  # blocks brought for it, by tier


@dataclass(slots=True)
class Pull:
    """One copy on its way into `pool`."""

    number: int
    pool: Pool
    own: list[Entry]  # pinned in `pool`
    sources: list[tuple[Pool, Entry]]  # pinned there
    claim: Claim
    until_ms: int  # for pages to copy into
    readers: list[Reader] = field(default_factory=list)
    copying: bool = False
    is_push: bool = False  # blocks that D completed, on their way back (pd_caching.py)
    ask_ms: int = 0  # when engines are asked for pages again


class Pulls:
    """Decides copies between the spaces of one mempool.

    Args:
        pools: of all spaces, a view.
        answer: called with readers to answer now, from what the index has.
        numbers: of copies, shared with whoever else orders some.
    """

    def __init__(
        self,
        limits: PoolLimits,
        pools: Mapping[int, Pool],
        answer: Callable[[Pool, Reader, int], None],
        counters: Counter[str],
        numbers: Iterator[int],
    ) -> None:
        self._limits = limits
        self._pools = pools
        self._answer = answer
        self._counters = counters
        self._numbers = numbers
        self.pulls: dict[int, Pull] = {}
        self._arriving: dict[tuple[int, BlockHash], Pull] = {}
        self.push_back = PushBack(PdCaching(limits.pd_caching), pools, self._push, counters)

    def elsewhere(
        self, pool: Pool, hashes: Sequence[BlockHash], *, for_handoff: bool = False
    ) -> list[tuple[Pool, Entry]]:
        """The longest prefix of `hashes` that other spaces of the same content have, block by block.

        Cost: a look-up per block and stretch; nothing where there is one space.
        """
        others = [
            p
            for p in self._pools.values()
            if p is not pool
            and p.shares_content(pool)
            and not self.push_back.hides(pool, p, for_handoff=for_handoff)
        ]
        found: list[tuple[Pool, Entry]] = []
        while others and len(found) < len(hashes):
            rest = hashes[len(found) :]
            best = max(((p, p.index.prefix(rest)) for p in others), key=lambda item: len(item[1]))
            if not best[1]:
                break
            found += [(best[0], entry) for entry in best[1]]
        return found

    def want(self, pool: Pool, reader: Reader, now_ms: int) -> bool:
        """Begin to bring what the reader misses. False: nothing is to come, answer it now."""
        own = pool.index.prefix(reader.hashes)
        missing = reader.hashes[len(own) :]
        if pool.memory is None or not missing or now_ms >= reader.until_ms:
            return False
        arriving = self._arriving.get((pool.number, missing[0]))
        if arriving is not None and (arriving.copying or not arriving.is_push):
            arriving.readers.append(reader)
            return True
        sources = self.elsewhere(pool, missing, for_handoff=bool(reader.call.handoff_id))
        most = pool.memory.table.num_pages - len(own)
        if not sources or len(sources) > most or self._num_readers() >= self._limits.max_waiting:
            return False
        pool.index.pin(own)
        pull = self._begin(pool, own, sources, reader.until_ms)
        pull.readers.append(reader)
        pull.ask_ms = now_ms + ASK_AGAIN_MS
        self._counters["pulls"] += 1
        return True

    def _begin(
        self,
        pool: Pool,
        own: list[Entry],
        sources: list[tuple[Pool, Entry]],
        until_ms: int,
        *,
        ask: bool = True,
    ) -> Pull:
        for source, entry in sources:
            source.index.pin([entry])
        # not before the pins: to make room, it may have blocks leave for the host memory that has the sources
        claim = pool.claim(len(sources), ask=ask)
        number = next(self._numbers)
        pull = self.pulls[number] = Pull(number, pool, own, sources, claim, until_ms)
        for _, entry in sources:
            self._arriving[pool.number, entry.block_hash] = pull
        return pull

    def _push(self, source: Pool, target: Pool, hashes: Sequence[BlockHash], now_ms: int) -> int:
        """PushBack's: nobody waits for it, and no engine is asked for pages."""
        found = [
            (source, entry)
            for h in hashes
            if (entry := source.index.get(h)) is not None
            and h not in target.index
            and (target.number, h) not in self._arriving
        ]
        if not found or target.memory is None or len(found) > target.memory.table.num_pages:
            return 0
        pull = self._begin(target, [], found, now_ms + self._limits.pull_patience_ms, ask=False)
        pull.is_push = True
        self._counters["push_backs"] += 1
        return len(found)

    def _num_readers(self) -> int:
        return sum(len(pull.readers) for pull in self.pulls.values())

    def advance(self, now_ms: int) -> list[Action]:
        """After every event: start what has its pages, give up what waited too long for them."""
        out: list[Action] = []
        for pull in [p for p in self.pulls.values() if not p.copying]:
            if not pull.claim.lacking:
                pull.copying = True
                pull.pool.begin_writing(pull.claim)
                out.append(
                    CopyPages(
                        pull.number,
                        pull.pool.number,
                        list(pull.claim.pages),
                        [(source.number, entry.page) for source, entry in pull.sources],
                        self._limits.copy_timeout_ms,
                    )
                )
            elif now_ms >= pull.until_ms:
                self._counters["pulls_without_pages"] += 1
                pull.pool.cancel(pull.claim)
                self._end(pull, now_ms)
            elif now_ms >= pull.ask_ms and not pull.is_push:
                pull.ask_ms = now_ms + ASK_AGAIN_MS
                pull.pool.ask_again(pull.claim)
        return out

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int], now_ms: int) -> None:
        """The copy has ended. A failed one may still write the pages `in_doubt`, until settled."""
        pull = self.pulls[copy_id]
        pool, claim = pull.pool, pull.claim
        if not failed:
            entries = [
                Entry(e.block_hash, e.parent, page, e.valid_tokens, e.checksum)
                for (_, e), page in zip(pull.sources, claim.pages, strict=True)
            ]
            pool.take_in(entries)
            self._counters["blocks_pushed_back" if pull.is_push else "blocks_pulled"] += len(entries)
            from_dram = sum(source.is_dram for source, _ in pull.sources)
            self._counters["blocks_pulled_from_dram"] += from_dram
            for reader in pull.readers:
                reader.came["dram"] += from_dram
                reader.came["peer"] += len(entries) - from_dram
        else:
            pool.quarantine([page for page in claim.pages if page in in_doubt])
            claim.pages = [page for page in claim.pages if page not in in_doubt]
            pool.cancel(claim)
        self._counters["pulls_failed"] += failed
        self._end(pull, now_ms)

    def _end(self, pull: Pull, now_ms: int) -> None:
        """Answer its readers before its pins go: what was copied stays long enough for them."""
        del self.pulls[pull.number]
        for _, entry in pull.sources:
            if self._arriving.get((pull.pool.number, entry.block_hash)) is pull:
                del self._arriving[pull.pool.number, entry.block_hash]
        for reader in pull.readers:
            if pull.is_push and self.want(pull.pool, reader, now_ms):
                continue  # it wants more than what came
            self._answer(pull.pool, reader, now_ms)
        pull.pool.index.unpin(pull.own)
        for source, entry in pull.sources:
            source.index.unpin([entry])
        if pull.is_push:
            self.push_back.ended(pull.sources[0][0], pull.pool)
        for dram in {source for source, _ in pull.sources if source.is_dram}:
            came = [e for s, e in pull.sources if s is dram and e.block_hash in pull.pool.index]
            dram.index.age(came)  # the first to go: it leaves its new place without a copy

    def forget(self, connection: int) -> None:
        """The connection closed: nobody wants these answers. What is on its way still comes."""
        for pull in self.pulls.values():
            pull.readers = [reader for reader in pull.readers if reader.connection != connection]

    def next_deadline_ms(self) -> int | None:
        """When advance() has something to do without an event."""
        return min((min(p.until_ms, p.ask_ms) for p in self.pulls.values() if not p.copying), default=None)
