"""Free pages of a space for whoever wants some: the mempool's own claims, then engines. No I/O.

Blocks that nobody pins leave for them, the coldest first, from the end of their prompts; before that engines give some
claims what they have and do not need. Where every prompt ends in blocks that an engine only caches, engines are asked
to let go of some: else those of another would wait for ever beside pages that nobody uses.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from services.mempool.core.claims import Claim
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
        for claim in self.claims:
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
