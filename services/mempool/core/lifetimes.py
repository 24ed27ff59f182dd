"""A space whose engines are gone does not keep its memory for ever: the part of the pool that lets go of it. No I/O.

An engine that comes back soon finds its blocks. When none came for `space_idle_ms`, and no process is left that maps
the space, its blocks are forgotten and its memory goes to the system. The space itself, a table of a few bytes a page,
stays until its place is another's (endings.py): the next engine of its kind gets the memory again, as soon as there is
some. What a process only lent
(shared/aqua/lender.py) is no cache: it goes as soon as the process is dead and nothing is on loan. The host memory
behind spaces goes as soon as nobody has been in any of them for so long, and comes back with the first who comes.
"""

from collections.abc import Sequence

from services.mempool.core.actions import Action
from services.mempool.core.attachments import Attachments
from services.mempool.core.engines import CALLER, Engine
from services.mempool.core.entry import Entry
from shared.ids import BlockHash
from shared.kv.page import PageState
from shared.wire import mempool as wire

LENDER_IDLE_MS = 1_000  # one that is started again at once has its memory
EMPTY = (PageState.FREE, PageState.WITHDRAWN, PageState.RELEASED)
ON_THEIR_WAY = (PageState.GRANTED, PageState.WRITING, PageState.QUARANTINED, PageState.LEASED)


class Lifetimes(Attachments):
    """See the module."""

    fronts: "Sequence[Lifetimes]" = ()  # of host memory: what it is behind (dram.py)
    _dropped_at_ms = 0  # the last time

    @property
    def is_deserted(self) -> bool:
        """Whether no engine or rank of this space is left that lives, and nothing of it is on its way."""
        return self._is_left and not (self.releases is not None and self.releases.calls)

    @property
    def _is_left(self) -> bool:
        memory = self.memory
        if memory is None or memory.is_loan or self.claims or self.inheritance is not None:
            return False
        if memory.only_lends and memory.table.counts[PageState.LEASED]:
            return False
        if memory.is_dram and (self.index.num_pinned or any(memory.table.counts[s] for s in ON_THEIR_WAY)):
            return False
        if not all(front.is_deserted for front in self.fronts):
            return False
        engines = memory.engines
        mapped = self.releases is not None and bool(self.releases.mappers)
        return not (engines.attached or engines.lost or engines.ranks or mapped)

    @property
    def is_bare(self) -> bool:
        """Whether nothing is lost with this space: nobody is left, and nothing is in it, on its way or asked for.
        Memory may be on its way to the system: it goes there in any case."""
        memory, leases = self.memory, self.leases
        if memory is None or self.releases is None or not self._is_left or self.releases.is_awaited:
            return False
        if self.clients or len(self.index) or leases.leases or leases.handoffs or leases.waiters:
            return False
        counts = memory.table.counts
        num_empty = sum(counts[state] for state in EMPTY)
        return num_empty == memory.table.num_pages and not memory.read_early

    @property
    def has_present(self) -> bool:
        """Whether any of its pages have memory."""
        return self.memory is not None and self.memory.table.num_present > 0

    @property
    def seen_ms(self) -> int:
        """When somebody was last here, or in a space that this is behind."""
        return max([self._active_at_ms, *(front._active_at_ms for front in self.fronts)])

    def outlives(self, front: "Lifetimes") -> None:
        """A space that this is behind ends."""
        self._active_at_ms = max(self._active_at_ms, front._active_at_ms)

    def dropped_at_ms(self) -> int | None:
        """When it is, unless somebody comes; None: it is in use, or has no memory."""
        memory, idle_ms = self.memory, self.limits.space_idle_ms
        if memory is not None and memory.only_lends:
            idle_ms = min(idle_ms or LENDER_IDLE_MS, LENDER_IDLE_MS)
        if memory is None or not idle_ms or not memory.table.num_present or not self.is_deserted:
            return None
        return max(self.seen_ms, self._dropped_at_ms) + idle_ms

    def drop_if_deserted(self, now_ms: int) -> None:
        """Its engines are gone, and their last pages came back: blocks are forgotten, memory goes to the system."""
        if self._active_at_ms < 0:
            self._active_at_ms = now_ms
        due_ms = self.dropped_at_ms()
        if due_ms is None or now_ms < due_ms or self.releases is None:
            return
        self._dropped_at_ms = now_ms  # what is pinned now is tried again
        self.counters["spaces_dropped"] += 1
        self._free_entries(self.index.delete_unpinned())
        self.releases.release_all(now_ms)

    def on_attach(self, connection: int, process: int, message: wire.Attach, now_ms: int) -> list[Action]:
        """As ever; the first who comes, after all others have gone, gets the memory again that went meanwhile."""
        is_first = self.memory is not None and message.kind != "client" and self.is_first(process)
        actions = super().on_attach(connection, process, message, now_ms)
        if is_first and self.releases is not None and self.has_member(connection):
            self.releases.regain_all(now_ms)
            self._serve()
            actions += self._done()
        return actions

    @property
    def has_workers(self) -> bool:
        """Whether an engine or a rank of one is attached."""
        engines = self.memory.engines if self.memory is not None else None
        ranks = engines.ranks.values() if engines is not None else ()
        return engines is not None and (bool(engines.attached) or any(r.instance != CALLER for r in ranks))

    def owing(self) -> set[int]:
        """Of those that are awaited: who must say what it holds soon.

        A process that uses shared/aqua never does: its pages wait for its death, or until it attaches anew. A caller
        (negative) says so itself, whatever it maps.
        """
        owes = self.memory is not None and self.memory.has_engine
        return {process for process in self.awaited() if owes or process < 0}

    def is_first(self, process: int) -> bool:
        """Whether nobody works here, and this process never did: one that comes again was there when memory went."""
        if self.memory is None or self.releases is None:
            return True
        lost = (each.alive for each in self.memory.engines.lost)
        return not self.has_workers and process not in self.releases.mappers.union(self.awaited(), *lost)

    def condemn(self, block_hash: BlockHash) -> int:
        """The bytes of this block are wrong: nobody finds it any more, nor what is behind it. Of how many blocks.

        Nor does a successor of the mempool. Engines are asked for all that they keep without a request.
        """
        removed, pinned = self.index.condemn(block_hash)
        self._free_entries(removed)
        for entry in pinned:
            self.note(entry)
        if pinned:
            self.ask_unpin(self.index.num_pinned)
        return len(removed) + len(pinned)

    def condemn_late(self, engine: Engine, entry: Entry) -> None:
        """A block that the engine seals: if it still has the condemned block which this one continues, it computed this
        one from that. When it has let go of it, it has computed that block anew, too."""
        for known in self.index.condemned.get(entry.parent, ()):
            if engine.pinned.get(known.page) is known or self.leases.has(engine.instance, known):
                self.index.condemn_late(entry, known)
                self.counters["blocks_condemned"] += 1
                return
