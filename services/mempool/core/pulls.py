"""Blocks that a reader wants and that another space of this mempool has: copied before the reader is answered. No I/O.

    Acquire -> own prefix pinned, the rest found elsewhere and pinned there -> pages claimed in the reader's space
            -> CopyPages -> sealed and indexed -> the lease is granted over all of it

A space is one GPU's pages, or a part of host memory (ARCHITECTURE.md, rule 8; MemServe 4.3 `transfer`).
Sources are sealed and pinned until the copy has ended, so no byte of theirs can change; targets are nobody's else.
A reader never waits longer for pages than it asked to, whoever's pull it joined: it is answered with what is there, and
computes the rest. Where pages are short, the first blocks come: when three quarters of the time of whoever began it are
over, those for which there are pages. A copy that runs is waited for.

A large copy goes in *portions*, each a CopyPages of its own: one begins once there are `portion_bytes` of pages for it,
while engines still give back the others, and is indexed, and pinned for the readers, while later ones are on their way.
So copy engines do not wait for words about a thousand pages, nor readers for them behind the last byte.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import attrgetter

from services.mempool.core.actions import Action, CopyPages, PoolLimits
from services.mempool.core.claims import Claim
from services.mempool.core.entry import Entry
from services.mempool.core.pd_caching import PdCaching, PushBack
from services.mempool.core.pool import Pool
from services.mempool.core.pull import ASK_AGAIN_MS, Layered, Pull, Reader, by_pool, cut_of, room_for_returns
from services.mempool.core.readers import TIMED, TIMED_US
from shared.ids import BlockHash, HandoffId
from shared.kv.transfer_mode import TransferMode

_HASH = attrgetter("block_hash")


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
        self._arriving: dict[int, dict[BlockHash, Pull]] = {}  # by space
        room = partial(room_for_returns, pulls=self.pulls.values())
        self.push_back = PushBack(PdCaching(limits.pd_caching), pools, self.push, room, counters)
        self.layers: Layered | None = None  # they set it
        self.distance: Callable[[Pool], int] = lambda _: 0  # of equals the nearest is read

    def reachable(
        self, pool: Pool, hashes: Sequence[BlockHash], *, for_handoff: bool = False
    ) -> list[tuple[Pool, Entry]]:
        """The longest prefix of `hashes` that spaces of this content have, each block with the space to read.

        `pool` itself where it has the block: perhaps behind some that left it, as blocks leave one by one.
        Cost: two look-ups per block and stretch.
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
        while rest := hashes[len(found) :]:
            part = [(pool, entry) for entry in pool.index.prefix(rest)]
            if not part and others:
                best, entries = max(((p, p.index.prefix(rest)) for p in others), key=lambda x: len(x[1]))
                if not pool.index.hashes.isdisjoint(map(_HASH, entries)):
                    entries = list(takewhile(lambda e: e.block_hash not in pool.index, entries))
                part = [(best, entry) for entry in entries]
            if not part:
                break
            found += part
        return found

    def want(self, pool: Pool, reader: Reader, now_ms: int) -> bool:
        """Begin to bring what the reader misses. False: nothing is to come, answer it now."""
        own = pool.index.prefix(reader.hashes)
        missing = reader.hashes[len(own) :]
        if pool.memory is None or not missing or now_ms >= reader.until_ms or self._is_full():
            return False
        arriving = self._arriving.get(pool.number, {}).get(missing[0])
        if arriving is not None and (arriving.copying or not arriving.is_push or arriving.is_ahead):
            arriving.readers.append(reader)
            return True
        found = self.reachable(pool, reader.hashes, for_handoff=bool(reader.call.handoff_id))
        own = [entry for source, entry in found if source is pool]
        sources = [item for item in found if item[0] is not pool]
        sources = sources[: max(0, pool.memory.table.num_present - len(own))]
        if not sources:
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
        is_last: bool = False,
    ) -> Pull:
        for source, entries in by_pool(sources):
            source.index.pin(entries)
        # not before the pins: to make room, it may have blocks leave for the host memory that has the sources
        claim = pool.claim(len(sources), ask=ask, keeps=ask, is_last=is_last)
        number = next(self.numbers)
        pull = self.pulls[number] = Pull(number, pool, own, sources, claim, until_ms)
        self._expect(pull, [entry.block_hash for _, entry in sources])
        return pull

    def _expect(self, pull: Pull, hashes: Sequence[BlockHash]) -> None:
        pull.hashes = list(hashes)
        self._arriving.setdefault(pull.pool.number, {}).update(dict.fromkeys(pull.hashes, pull))

    def _expected_no_more(self, pull: Pull, hashes: Sequence[BlockHash]) -> None:
        """By the names under which they were: a block that was condemned meanwhile has another one."""
        there = self._arriving.get(pull.pool.number, {})
        for block_hash in hashes:  # one may be named twice
            if there.get(block_hash) is pull:
                del there[block_hash]
        if not there:
            self._arriving.pop(pull.pool.number, None)

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
        pull = self._begin(target, [], found, until_ms, ask=within_ms is not None, is_last=handoff_id is None)
        pull.is_ahead = handoff_id is not None and within_ms is not None
        pull.short_ms = until_ms if handoff_id is None or pull.is_ahead else None
        pull.is_push, pull.is_counted, pull.handoff_id = True, handoff_id is None, handoff_id
        pull.traces = traces or {}
        self.counters["push_backs"] += pull.is_counted
        return len(pull.sources)

    def is_new(self, target: Pool, block_hash: BlockHash) -> bool:
        """Whether the block is neither there nor on its way there."""
        return block_hash not in target.index and block_hash not in self._arriving.get(target.number, ())

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

    def _is_full(self) -> bool:
        return sum(len(pull.readers) for pull in self.pulls.values()) >= self.limits.max_waiting

    def advance(self, now_ms: int) -> list[Action]:
        """After every event: start what has its pages, give up what waited too long for them."""
        out: list[Action] = []
        if self.layers is not None:
            self.layers.advance(now_ms)
            out += self.layers.take_actions()
        for pull in [p for p in self.pulls.values() if not p.copying]:
            if pull.number not in self.pulls:
                continue  # it made way for a reader of another one
            for reader in pull.take_late(now_ms):
                reader.came.update(pull.came)
                self._answer(pull.pool, reader, now_ms)
            if pull.short_ms is not None and now_ms >= pull.short_ms and (pull.claim.pages or pull.begun):
                self._shorten(pull, now_ms)
            while count := 0 if self._by_layers else pull.num_ready(self.limits.portion_bytes):
                out.append(self._start_portion(pull, count, now_ms))
            if pull.copying:
                continue
            if not pull.claim.lacking:
                pull.copying = True
                pull.pool.begin_writing(pull.claim)
                out.append(self._start(pull, now_ms))
            elif now_ms >= pull.until_ms:
                self.counters["pulls_without_pages"] += 1
                self._give_up(pull, now_ms)
            elif pull.ask_ms is not None and now_ms >= pull.ask_ms:
                pull.ask_ms = now_ms + ASK_AGAIN_MS
                pull.pool.ask_again(pull.claim)
        return out

    def _start_portion(self, pull: Pull, count: int, now_ms: int) -> CopyPages:
        pages = pull.pool.begin_some(pull.claim, count)
        sources, pull.sources = pull.sources[:count], pull.sources[count:]
        number = next(self.numbers)
        part = Pull(number, pull.pool, [], sources, Claim(count, pages), pull.until_ms, copying=True, of=pull)
        self.pulls[number] = part
        pull.num_portions += 1
        self.counters["pull_portions"] += 1
        return self._start(part, now_ms)

    def _start(self, pull: Pull, now_ms: int) -> CopyPages:
        if self.layers is not None and self.layers.has(pull):
            return self.layers.start(pull, now_ms)
        sources = [(source.number, entry.page) for source, entry in pull.sources]
        cut = None
        if self._by_layers:
            pools = [source for source, _ in by_pool(pull.sources)]
            cut = cut_of(pull.pool, pools) if not any(source.is_behind for source in pools) else None
        whole, spaces = pull.of or pull, {number for number, _ in sources}
        follows = whole.begun if spaces <= whole.begun_from else 0
        if not whole.begun:
            whole.begun, whole.begun_from = pull.number, spaces
        return CopyPages(
            pull.number, pull.pool.number, list(pull.claim.pages), sources, self.limits.copy_timeout_ms, cut,
            returns=Counter(filter(None, map(pull.traces.get, pull.hashes))) if pull.traces else Counter(),
            readers=tuple(r.call.traceparent for r in whole.readers if r.call.traceparent), follows=follows,
        )  # fmt: skip

    def _shorten(self, pull: Pull, now_ms: int) -> None:
        """To its first blocks, for which there are pages; portions on their way may be all of it."""
        if pull.claim.pages:
            self._cut(pull, len(pull.claim.pages))
        else:
            self._give_up(pull, now_ms)

    def _give_up(self, pull: Pull, now_ms: int) -> None:
        """What of it has not begun."""
        pull.pool.cancel(pull.claim)
        self._over(pull, now_ms)

    def _over(self, pull: Pull, now_ms: int) -> None:
        """Its own copy has ended, or will never begin: it ends with the last of its portions."""
        pull.copying = pull.is_over = True
        if not pull.num_portions:
            self.end(pull, now_ms)

    def _portion_over(self, part: Pull, whole: Pull, now_ms: int, *, failed: bool) -> None:
        """Blocks behind one that did not come are of no use to the readers: what has not begun does not begin."""
        del self.pulls[part.number]
        self._let_go(part)
        whole.num_portions -= 1
        if failed and not whole.copying:
            self._give_up(whole, now_ms)
        elif whole.is_over and not whole.num_portions:
            self.end(whole, now_ms)

    def _cut(self, pull: Pull, count: int) -> None:
        """To its first `count` blocks."""
        left, pull.sources = pull.sources[count:], pull.sources[:count]
        pull.claim.wanted = count
        self.counters["pulls_shortened"] += bool(left)
        kept = len(pull.hashes) - len(left)
        self._expected_no_more(pull, pull.hashes[kept:])
        del pull.hashes[kept:]
        for source, entries in by_pool(left):
            source.index.unpin(entries)

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
                self._give_up(pull, now_ms)
                continue
            pull.pool.trim(pull.claim, at)
            self._cut(pull, at)
        return changed

    def on_copied(
        self, copy_id: int, *, failed: bool, in_doubt: Collection[int], now_ms: int, took_us: int = 0
    ) -> None:
        """The copy has ended. A failed one may still write the pages `in_doubt`, until settled."""
        pull = self.pulls[copy_id]
        pool, claim, whole = pull.pool, pull.claim, pull.of or pull
        if not failed and self.layers is not None and self.layers.has(pull):
            self.layers.on_copied(pull, now_ms)
            return
        if not failed:
            entries = [entry.at(page) for (_, entry), page in zip(pull.sources, claim.pages, strict=True)]
            here = pool.take_in(entries)
            if whole is not pull or whole.num_portions:  # until the readers have it
                pool.index.pin(here)
                whole.own += here
            if pull.handoff_id is not None and self.layers is not None:
                self.layers.hold(pull.handoff_id, pool, here, now_ms, came_for=pull.readers)
            name = "blocks_pushed_back" if pull.goes_back else "blocks_pulled"
            self.counters[name] += len(entries)
            parts = [(source, len(part)) for source, part in by_pool(pull.sources)]
            from_dram = sum(count for source, count in parts if source.is_dram)
            self.counters["blocks_pulled_from_dram"] += from_dram
            behind = sum(count for source, count in parts if source.is_behind)
            self.counters["blocks_pulled_from_peer"] += behind - from_dram
            whole.came.update(dram=from_dram, peer=len(entries) - from_dram)
            if took_us > 0 and len(entries) > whole.came[TIMED]:
                whole.came[TIMED], whole.came[TIMED_US] = len(entries), took_us
        else:
            pool.quarantine([page for page in claim.pages if page in in_doubt])
            claim.pages = [page for page in claim.pages if page not in in_doubt]
            pool.cancel(claim)
        self.counters["pulls_failed"] += failed
        if whole is pull:
            self._over(pull, now_ms)
        else:
            self._portion_over(pull, whole, now_ms, failed=failed)

    def end(self, pull: Pull, now_ms: int) -> None:
        """Answer its readers before its pins go: what was copied stays long enough for them."""
        del self.pulls[pull.number]
        self._expected_no_more(pull, pull.hashes)
        if self.layers is not None:
            self.layers.ended(pull)
        for reader in pull.readers:
            reader.came.update(pull.came)
            has_more_time = pull.is_push or reader.until_ms > pull.until_ms
            if not (has_more_time and self.want(pull.pool, reader, now_ms)):  # more than what came
                self._answer(pull.pool, reader, now_ms)
        pull.pool.index.unpin(pull.own)
        self._let_go(pull)
        if pull.goes_back:
            self.push_back.ended(pull.sources[0][0], pull.pool)

    def _let_go(self, pull: Pull) -> None:
        """Of its sources; what came leaves the memory behind first."""
        parts = by_pool(pull.sources)
        for source, entries in parts:
            source.index.unpin(entries)
        for source, entries in parts:
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
        due = [pull.due_ms() for pull in self.pulls.values() if not pull.copying]
        if self.layers is not None and (later := self.layers.next_deadline_ms()) is not None:
            due.append(later)
        return min(due, default=None)
