"""Blocks that a reader wants and that another space of this mempool has: copied before the reader is answered. No I/O.

    Acquire -> own prefix pinned, the rest found elsewhere and pinned there -> pages claimed in the reader's space
            -> CopyPages -> sealed and indexed -> the lease is granted over all of it

A space is one GPU's pages, or a part of host memory (ARCHITECTURE.md, rule 8; MemServe 4.3 `transfer`).
Sources are sealed and pinned until the copy has ended, so no byte of theirs can change; targets are nobody's else.
A reader never waits longer than it asked to: it is answered with what is there, and computes the rest. Where pages are
short, the first blocks come: when three quarters of the time are over, those for which there are pages.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from services.mempool.core.actions import Action, CopyPages, LayerCut, PoolLimits
from services.mempool.core.claims import Claim
from services.mempool.core.entry import Entry
from services.mempool.core.pd_caching import PdCaching, PushBack
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, HandoffId, InstanceId
from shared.kv.transfer_mode import TransferMode
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
    is_push: bool = False  # nobody asked for it: what D completed (pd_caching.py), or layers (layered.py)
    is_counted: bool = True  # of pushes: by pd_caching.py
    is_ahead: bool = False  # of pushes: it is for a hand-off, and begins soon or never
    handoff_id: HandoffId | None = None  # of pushes: whose reader will want what they bring
    ask_ms: int = 0  # when engines are asked for pages again
    short_ms: int | None = None  # from then on it is content with the pages that it has; None: all or nothing
    hashes: list[BlockHash] = field(default_factory=list)  # of the blocks that it brings
    traces: Mapping[BlockHash, str] = field(
        default_factory=dict
    )  # of returns: in whose trace each block is seen


class Layered(Protocol):
    """LayerPulls of layered.py, which knows this module."""

    def has(self, pull: Pull) -> bool: ...

    def advance(self, now_ms: int) -> None: ...

    def take_actions(self) -> list[Action]: ...

    def next_deadline_ms(self) -> int | None: ...

    def start(self, pull: Pull, now_ms: int) -> CopyPages: ...

    def on_copied(self, pull: Pull, now_ms: int) -> None: ...

    def ended(self, pull: Pull) -> None: ...

    def forget(self, connection: int, now_ms: int) -> None: ...

    def hold(self, handoff_id: HandoffId, pool: Pool, entries: Sequence[Entry], now_ms: int) -> None: ...

    def let_go(self, handoff_id: HandoffId) -> None: ...

    def make_way(self, pool: Pool, reader: Reader, wanted: int, now_ms: int) -> None: ...


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
        self.limits = limits
        self._pools = pools
        self._answer = answer
        self.counters = counters
        self._by_layers = limits.transfer_mode == TransferMode.BY_REQUEST
        self.numbers = numbers
        self.pulls: dict[int, Pull] = {}
        self._arriving: dict[tuple[int, BlockHash], Pull] = {}
        self.push_back = PushBack(PdCaching(limits.pd_caching), pools, self._push_back, counters)
        self.layers: Layered | None = None  # they set it
        self.distance: Callable[[Pool], int] = lambda _: 0  # of equals the nearest is read

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
        others.sort(key=self.distance)
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
        if arriving is not None and (arriving.copying or not arriving.is_push or arriving.is_ahead):
            arriving.readers.append(reader)
            return True
        sources = self.elsewhere(pool, missing, for_handoff=bool(reader.call.handoff_id))
        sources = sources[: max(0, pool.memory.table.num_present - len(own))]
        if not sources or self._num_readers() >= self.limits.max_waiting:
            return False
        pool.index.pin(own)
        if self.layers is not None and len(sources) > pool.num_at_hand:
            self.layers.make_way(pool, reader, len(sources), now_ms)
        pull = self._begin(pool, own, sources, reader.until_ms)
        pull.short_ms = reader.until_ms - (reader.until_ms - now_ms) // 4
        pull.readers.append(reader)
        pull.ask_ms = now_ms + ASK_AGAIN_MS
        self.counters["pulls"] += 1
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
        for source, entries in _by_pool(sources):
            source.index.pin(entries)
        # not before the pins: to make room, it may have blocks leave for the host memory that has the sources
        claim = pool.claim(len(sources), ask=ask)
        number = next(self.numbers)
        pull = self.pulls[number] = Pull(number, pool, own, sources, claim, until_ms)
        self._expect(pull, [entry.block_hash for _, entry in sources])
        return pull

    def _expect(self, pull: Pull, hashes: Sequence[BlockHash]) -> None:
        pull.hashes = list(hashes)
        self._arriving.update(((pull.pool.number, block_hash), pull) for block_hash in hashes)

    def push(
        self,
        source: Pool,
        target: Pool,
        hashes: Sequence[BlockHash],
        now_ms: int,
        *,
        handoff_id: HandoffId | None = None,
        traces: Mapping[BlockHash, str] | None = None,
        within_ms: int | None = None,
    ) -> int:
        """Nobody waits for it. `within_ms`: engines are asked for pages, and those that came by then are used; None:
        none is asked. Without a handoff_id it is what PushBack counts. How many blocks it brings, if it can."""
        found = [
            (source, entry)
            for h in hashes
            if (entry := source.index.get(h)) is not None and self.is_new(target, h)
        ]
        found = found[: target.memory.table.num_present if target.memory is not None else 0]
        if not found:
            return 0
        until_ms = now_ms + (self.limits.pull_patience_ms if within_ms is None else within_ms)
        pull = self._begin(target, [], found, until_ms, ask=within_ms is not None)
        pull.is_ahead = handoff_id is not None and within_ms is not None
        pull.short_ms = until_ms if handoff_id is None or pull.is_ahead else None
        pull.is_push, pull.is_counted, pull.handoff_id = True, handoff_id is None, handoff_id
        pull.traces = traces or {}
        self.counters["push_backs"] += pull.is_counted
        return len(pull.sources)

    def _push_back(self, source: Pool, target: Pool, blocks: Mapping[BlockHash, str], now_ms: int) -> int:
        """See PushBack: push() of blocks with their traces."""
        return self.push(source, target, list(blocks), now_ms, traces=blocks)

    def is_new(self, target: Pool, block_hash: BlockHash) -> bool:
        """Whether the block is neither there nor on its way there."""
        return block_hash not in target.index and (target.number, block_hash) not in self._arriving

    def add(self, pull: Pull, hashes: Sequence[BlockHash]) -> None:
        """One that `layers` has begun; it brings these."""
        self.pulls[pull.number] = pull
        self._expect(pull, hashes)

    def taken(self, pool: Pool, reader: Reader) -> None:
        """The reader of a handoff has its answer, and what is in it is leased."""
        self.push_back.taken(reader.call.handoff_id, pool, reader.hashes, reader.call.traceparent)
        if self.layers is not None:
            self.layers.let_go(reader.call.handoff_id)

    def has_work(self) -> bool:
        """Whether advance() may have something to do."""
        return bool(self.pulls) or (self.layers is not None and self.layers.next_deadline_ms() is not None)

    def _num_readers(self) -> int:
        return sum(len(pull.readers) for pull in self.pulls.values())

    def advance(self, now_ms: int) -> list[Action]:
        """After every event: start what has its pages, give up what waited too long for them."""
        out: list[Action] = []
        if self.layers is not None:
            self.layers.advance(now_ms)
            out += self.layers.take_actions()
        for pull in [p for p in self.pulls.values() if not p.copying]:
            if pull.number not in self.pulls:
                continue  # it made way for a reader of another one
            if pull.short_ms is not None and now_ms >= pull.short_ms and pull.claim.pages:
                self._shorten(pull)
            if not pull.claim.lacking:
                pull.copying = True
                pull.pool.begin_writing(pull.claim)
                out.append(self._start(pull, now_ms))
            elif now_ms >= pull.until_ms:
                self.counters["pulls_without_pages"] += 1
                pull.pool.cancel(pull.claim)
                self.end(pull, now_ms)
            elif now_ms >= pull.ask_ms and not pull.is_push:
                pull.ask_ms = now_ms + ASK_AGAIN_MS
                pull.pool.ask_again(pull.claim)
        return out

    def _start(self, pull: Pull, now_ms: int) -> CopyPages:
        if self.layers is not None and self.layers.has(pull):
            return self.layers.start(pull, now_ms)
        sources = [(source.number, entry.page) for source, entry in pull.sources]
        cut = None
        if self._by_layers:
            pools = [source for source, _ in _by_pool(pull.sources)]
            cut = cut_of(pull.pool, pools) if not any(source.is_behind for source in pools) else None
        return CopyPages(
            pull.number, pull.pool.number, list(pull.claim.pages), sources, self.limits.copy_timeout_ms, cut,
            returns=Counter(filter(None, map(pull.traces.get, pull.hashes))) if pull.traces else Counter(),
        )  # fmt: skip

    def _shorten(self, pull: Pull) -> None:
        """To its first blocks, for which there are pages."""
        self._cut(pull, len(pull.claim.pages))

    def _cut(self, pull: Pull, count: int) -> None:
        """To its first `count` blocks."""
        left, pull.sources = pull.sources[count:], pull.sources[:count]
        pull.claim.wanted = count
        self.counters["pulls_shortened"] += bool(left)
        for source, entry in left:
            if self._arriving.get((pull.pool.number, entry.block_hash)) is pull:
                del self._arriving[pull.pool.number, entry.block_hash]
            source.index.unpin([entry])
        pull.hashes = [entry.block_hash for _, entry in pull.sources]

    def let_go(self, number: int, now_ms: int) -> list[Pool]:
        """Lent pages of this space are overdue: who still waits for pages to copy them into reads none of them.

        Returns: pools that this changed.
        """
        changed: list[Pool] = []
        for pull in [p for p in self.pulls.values() if not p.copying and p.handoff_id is None]:
            at = next((i for i, (source, _) in enumerate(pull.sources) if source.number == number), None)
            if at is None or pull.number not in self.pulls:
                continue
            changed.append(pull.pool)
            if at == 0:
                pull.pool.cancel(pull.claim)
                self.end(pull, now_ms)
                continue
            pull.pool.trim(pull.claim, at)
            self._cut(pull, at)
        return changed

    def on_copied(self, copy_id: int, *, failed: bool, in_doubt: Collection[int], now_ms: int) -> None:
        """The copy has ended. A failed one may still write the pages `in_doubt`, until settled."""
        pull = self.pulls[copy_id]
        pool, claim = pull.pool, pull.claim
        if not failed and self.layers is not None and self.layers.has(pull):
            self.layers.on_copied(pull, now_ms)
            return
        if not failed:
            entries = [
                Entry(e.block_hash, e.parent, page, e.valid_tokens, e.checksum)
                for (_, e), page in zip(pull.sources, claim.pages, strict=True)
            ]
            here = pool.take_in(entries)
            if pull.handoff_id is not None and self.layers is not None:
                self.layers.hold(pull.handoff_id, pool, here, now_ms)
            name = "blocks_pushed_back" if pull.is_push and pull.is_counted else "blocks_pulled"
            self.counters[name] += len(entries)
            from_dram = sum(len(entries) for source, entries in _by_pool(pull.sources) if source.is_dram)
            self.counters["blocks_pulled_from_dram"] += from_dram
            behind = sum(len(entries) for source, entries in _by_pool(pull.sources) if source.is_behind)
            self.counters["blocks_pulled_from_peer"] += behind - from_dram
            for reader in pull.readers:
                reader.came["dram"] += from_dram
                reader.came["peer"] += len(entries) - from_dram
        else:
            pool.quarantine([page for page in claim.pages if page in in_doubt])
            claim.pages = [page for page in claim.pages if page not in in_doubt]
            pool.cancel(claim)
        self.counters["pulls_failed"] += failed
        self.end(pull, now_ms)

    def end(self, pull: Pull, now_ms: int) -> None:
        """Answer its readers before its pins go: what was copied stays long enough for them."""
        del self.pulls[pull.number]
        for block_hash in pull.hashes:
            if self._arriving.get((pull.pool.number, block_hash)) is pull:
                del self._arriving[pull.pool.number, block_hash]
        if self.layers is not None:
            self.layers.ended(pull)
        for reader in pull.readers:
            if pull.is_push and self.want(pull.pool, reader, now_ms):
                continue  # it wants more than what came
            self._answer(pull.pool, reader, now_ms)
        pull.pool.index.unpin(pull.own)
        for source, entries in _by_pool(pull.sources):
            source.index.unpin(entries)
        if pull.is_push and pull.is_counted:
            self.push_back.ended(pull.sources[0][0], pull.pool)
        for source, entries in _by_pool(pull.sources):
            if source.is_behind:
                came = [entry for entry in entries if entry.block_hash in pull.pool.index]
                source.index.age(came)  # the first to go: it leaves its new place without a copy

    def forget(self, connection: int, now_ms: int) -> None:
        """The connection closed: nobody wants these answers. What is on its way still comes."""
        if self.layers is not None:
            self.layers.forget(connection, now_ms)
        for pull in self.pulls.values():
            pull.readers = [reader for reader in pull.readers if reader.connection != connection]

    def next_deadline_ms(self) -> int | None:
        """When advance() has something to do without an event."""
        waiting = [p for p in self.pulls.values() if not p.copying]
        due = [p.until_ms if p.is_push else min(p.until_ms, p.ask_ms) for p in waiting]
        due += [p.short_ms for p in waiting if p.short_ms is not None and p.claim.pages]
        if self.layers is not None and (later := self.layers.next_deadline_ms()) is not None:
            due.append(later)
        return min(due, default=None)


def _by_pool(sources: Sequence[tuple[Pool, Entry]]) -> list[tuple[Pool, list[Entry]]]:
    """Stretches of one pool each, in order: what is asked of pools is asked a few times and not for each block."""
    return [(pool, [entry for _, entry in part]) for pool, part in groupby(sources, key=itemgetter(0))]


def cut_of(target: Pool, sources: Sequence[Pool]) -> LayerCut | None:
    """How blocks of these spaces go to `target` layer by layer; None where pages are not alike, or no layers apart."""
    memory = target.memory
    if memory is None or not memory.layer_bytes:
        return None
    keys = {source.memory.content_key for source in sources if source.memory is not None}
    return LayerCut(memory.num_layers, memory.layer_bytes) if keys == {memory.content_key} else None
