"""Free pages of a space for whoever wants some: the mempool's own claims, then engines. No I/O.

Blocks that nobody pins leave for them, the coldest first, from the end of their prompts; before that engines give some
claims what they have and do not need. Where every prompt ends in blocks that an engine only caches, engines are asked
to let go of some: else those of another would wait for ever beside pages that nobody uses.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from services.mempool.core.claims import SPARE_PART, Claim
from services.mempool.core.engines import Engine
from services.mempool.core.entry import Entry
from services.mempool.core.page_state import PageEvent
from services.mempool.core.radix import Index
from services.mempool.core.releases import Releases
from services.mempool.core.space import Memory
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire import mempool as wire

PAGES_PER_GRANT = 1 << 20  # 12 MiB of a message, which takes 32
UNPINNED_AT_ONCE = 64  # blocks of an engine: behind each, all of a prompt before it may go
ASK_AGAIN_MS = 100  # what requests used then may be only cached by now, and who had pages may lack some


class Supply(ABC):
    """See Attachments, which has these."""

    memory: Memory | None
    index: Index
    counters: Counter[str]
    releases: Releases | None
    claims: list[Claim]
    outlet: Callable[[int], bool] | None
    _active_at_ms: int
    _ticked_at_ms = 0
    _asked_at_ms: int | None = None  # for cached blocks; None: somebody could be served since, or nobody asks

    @abstractmethod
    def note(self, *entries: Entry) -> None:
        """See Attachments."""

    @abstractmethod
    def _send(self, connection: int, message: wire.FromMempool) -> None: ...

    def _serve(self) -> None:
        """Grant what engines ask for, evicting what nobody pins."""
        memory = self.memory
        if memory is None:
            return
        for known, old in self.index.twins.merge():
            self.index.pin([known])
            self.note(known)
            memory.table.free(old, PageEvent.RETIRE)
            self.counters["twins_merged"] += 1
        if self.releases is not None:
            self.releases.advance()
        for claim in sorted(self.claims, key=lambda claim: claim.is_last):
            self._fill(claim, memory)
        for connection, granted in memory.engines.serve(self._make_room).items():
            self.counters["pages_granted"] += len(granted)
            for first in range(0, len(granted), PAGES_PER_GRANT):
                pages, epochs = zip(*granted[first : first + PAGES_PER_GRANT], strict=True)
                self._send(connection, wire.Granted(pages=u32_bytes(pages), epochs=u64_bytes(epochs)))
        self._ask_for_cached(memory)

    def _ask_for_cached(self, memory: Memory) -> None:
        lacking = 0 if memory.table.num_free else memory.engines.num_lacking()
        if not lacking or self.index.can_evict or not self.index.num_pinned:
            self._asked_at_ms = None
            return
        now_ms = max(self._active_at_ms, self._ticked_at_ms)
        if self._asked_at_ms is None or now_ms >= self._asked_at_ms + ASK_AGAIN_MS:
            self._asked_at_ms = now_ms
            # not who lacks pages itself: it evicts of its own what it caches, when a request needs that
            for engine in memory.engines.beside_starving():
                if count := min(lacking, UNPINNED_AT_ONCE, len(engine.pinned)):
                    self.counters["pages_asked_unpinned"] += count
                    self._send(engine.connection, wire.Shrink(count=count, cached=True))

    def ask_again_at_ms(self) -> int | None:
        """When engines are asked for cached blocks again; None: not before the next event."""
        return self._asked_at_ms + ASK_AGAIN_MS if self._asked_at_ms is not None else None

    # -- the mempool's own -----------------------------------------------------------------------------

    def claim(
        self, count: int, *, ask: bool = True, lends: bool = False, keeps: bool = False, is_last: bool = False
    ) -> Claim:
        """Want pages, ahead of every engine; they come with this and later events. End it by take_in or cancel.

        Args: ask: engines to give pages back, if it takes that. lends: they become leased (lending.py). keeps: blocks
            that nobody pins, too, until ask_again(), where engines have more in stock than they need (decision 0054).
            is_last: nobody waits for it; other claims go first, and engines are asked for no block that they cache.
        """
        evicts = not keeps or self._num_to_spare() < count
        claim = Claim(count, asks=ask, lends=lends, evicts=evicts, is_last=is_last)
        self.claims.append(claim)
        self._serve()
        if ask:
            self._ask_engines(claim)
        return claim

    def ask_again(self, claim: Claim) -> None:
        """Engines gave what they could then; by now they may have more, and who stands still is not waited for."""
        claim.evicts = True
        self._serve()
        self._ask_engines(claim)

    def _ask_engines(self, claim: Claim) -> None:
        """What is free or unused is the claim's already: the rest is with engines, who can give most gives first.

        None is asked for more than claims lack, what it has not answered for included: for all that it is asked for
        until its step is over it gives its stock and then what it caches, also when nobody wants the pages any more.
        """
        assert self.memory is not None
        lacking = sum(each.lacking for each in self.claims if each.asks and not each.is_last)
        left = claim.lacking
        most = {engine: self._most(engine, claim) for engine in self.memory.engines.attached.values()}
        for engine in sorted(most, key=lambda engine: -most[engine]):
            wanted = most[engine] if claim.is_last else min(most[engine], lacking)
            count = min(left, wanted - engine.asked)
            if count > 0:
                left -= count
                self.counters["pages_asked_back"] += count
                self._ask(engine, count)

    def _most(self, engine: Engine, claim: Claim) -> int:
        """Pages that the engine may be asked to give for the claim."""
        assert self.memory is not None
        if not claim.evicts:
            return self.memory.engines.surplus(engine)
        return len(engine.stock) // SPARE_PART if claim.is_last else engine.num_pages

    def _ask(self, engine: Engine, count: int) -> None:
        """For pages, from its stock first."""
        if engine.says_answers:
            engine.asked += count
        self._send(engine.connection, wire.Shrink(count=count))

    def ask_unpin(self, count: int) -> int:
        """Ask engines to unpin cached blocks that no request uses, the one with the most first; of how many pages."""
        engines = self.memory.engines.attached.values() if self.memory is not None else ()
        asked = 0
        for engine in sorted(engines, key=lambda e: -len(e.pinned)):
            part = min(count - asked, len(engine.pinned))
            if part > 0:
                asked += part
                self._send(engine.connection, wire.Shrink(count=part, cached=True))
        self.counters["pages_asked_unpinned"] += asked
        return asked

    # -- parts ------------------------------------------------------------------------------------

    def _num_to_spare(self) -> int:
        """Pages that are free or that engines need not have, and that no claim counts on."""
        assert self.memory is not None
        engines, claimed = self.memory.engines, sum(c.lacking for c in self.claims if not c.evicts)
        return self.memory.table.num_free + sum(map(engines.surplus, engines.attached.values())) - claimed

    def _make_room(self) -> bool:
        if self.outlet is not None and self.memory is not None:
            claimed = sum(claim.lacking for claim in self.claims if claim.evicts)
            return self.outlet(claimed + self.memory.engines.num_lacking())
        entry = self.index.evict()
        if entry is not None:
            self.counters["pages_evicted"] += 1
            self._free_entries([entry])
        return entry is not None

    def _fill(self, claim: Claim, memory: Memory) -> None:
        event = PageEvent.LEND if claim.lends else PageEvent.GRANT
        while claim.lacking:
            claim.pages += memory.table.take_many(claim.lacking, event)
            if claim.lacking and not (claim.evicts and self._make_room()):
                break

    def _free_entries(self, entries: list[Entry]) -> None:
        if entries:
            assert self.memory is not None
            self.memory.table.free_all([entry.page for entry in entries], PageEvent.RETIRE)
