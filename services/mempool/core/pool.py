"""One host's pool of pages: decides; does nothing. Events and `now_ms` in, actions out.

Who may lose a pin. A reader that copies reads a page's word, copies, and reads the word again
(ARCHITECTURE.md, rule 4): taking its pin away early cannot give it wrong bytes. So its pins are kept
only while they are worth something: until their TTL while an engine of the same instance is attached, which may
be copying for the request that the client leased for; with no such engine nobody reads, and they go at once.

An engine that works in the pages reads without looking back. Its pins, and leases that are made
`until_release` for it, end with its own word or with proof that all of its processes are dead (rule 5).
"""

from collections.abc import Mapping
from types import MappingProxyType

from services.mempool.core import parse, space
from services.mempool.core.actions import Action, Disconnect, PunchPages
from services.mempool.core.claims import Claim
from services.mempool.core.engines import Engine
from services.mempool.core.entry import Entry
from services.mempool.core.lifetimes import Lifetimes
from services.mempool.core.page_state import PageEvent
from services.mempool.core.space import Memory
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, InstanceId, PageId
from shared.wire import mempool as wire


class Pool(Lifetimes):
    """Methods return the actions to perform, in order. After a PeerProtocolError, end the connection."""

    # -- connections ------------------------------------------------------------------------------

    def on_closed(self, connection: int, now_ms: int) -> list[Action]:
        """A connection ended, by either side. Unknown ones (refused, or ended by us) are ignored."""
        self._active_at_ms = now_ms
        if self.releases is not None:
            self.releases.forget(connection)
        client = self.clients.pop(connection, None)
        if client is not None:
            self.leases.forget_waiters(connection)
            if not self._attached(client.instance):
                lives = self.memory is not None and self.memory.engines.lives_on(client.instance)
                self.leases.release_of(connection, client.instance, engine_lives=lives)
            self.leases.orphan(connection)
        elif self.memory is not None:
            self._lose_engine(connection)
        self._serve()
        return self._done()

    def on_process_dead(self, process: int, now_ms: int) -> list[Action]:
        """Proof of death (its pidfd became readable): everything that it could still write is free again.

        Its connections end too, even if a forked child keeps a socket open.
        """
        if self.memory is None:
            return []
        self._active_at_ms = now_ms
        for engine in [e for e in self.memory.engines.attached.values() if e.process == process]:
            self._replace(engine, "process.dead")
        self.report(process)
        self.report(-process)
        gone = self.memory.engines.bury(process)
        self.counters["pages_recovered"] += sum(engine.num_pages for engine in gone)
        if self.releases is not None:
            self.releases.buried(process)
        self._release_kept(gone)
        self._serve()
        return self._done()

    # -- messages ---------------------------------------------------------------------------------

    def on_message(self, connection: int, message: wire.ToMempool, now_ms: int) -> list[Action]:
        """Any message after Attach.

        Raises: PeerProtocolError on what no correct peer sends; nothing has changed then.
        """
        instance = self.instance_of(connection)
        if instance is None:
            raise PeerProtocolError(f"{type(message).__name__} before Attach")
        self._active_at_ms = now_ms
        match message:
            case wire.Acquire():
                self._sends += self.readers.on_acquire(connection, instance, message, now_ms)
            case wire.Release():
                if not self.leases.release(message.lease_id, instance):
                    self.counters["releases_unknown"] += 1
            case wire.Match():
                found = len(self.index.prefix(self._hashes(message.hashes)))
                self._send(connection, wire.Matched(call_id=message.call_id, num_blocks=found))
            case wire.Delete():
                self._on_delete(connection, message)
            case wire.StatusCall():
                self._send(connection, self.status(message.call_id))
            case wire.SlabsCall():
                self._sends += space.send_slabs(self.memory, self.number, connection, message)
            case wire.Unmapped() | wire.Mapped():
                self._on_rank_message(connection, message)
            case wire.LayerWordsCall():
                self._sends += space.send_layer_words(self.memory, self.number, connection, message)
            case wire.Attach():
                raise PeerProtocolError("attached already")
            case _:
                self._on_engine_message(connection, message, now_ms)
        self._serve()
        return self._done()

    def _on_rank_message(self, connection: int, message: wire.Unmapped | wire.Mapped) -> None:
        rank = self.memory.engines.ranks.get(connection) if self.memory is not None else None
        if rank is None or self.releases is None or len(message.slabs) % 4:
            raise PeerProtocolError(f"{type(message).__name__} from no rank, or cut off")
        if isinstance(message, wire.Unmapped):
            self.releases.on_unmapped(connection, message)
        else:
            self.releases.on_mapped(connection, rank.process, message)

    def _on_engine_message(self, connection: int, message: wire.ToMempool, now_ms: int) -> None:
        memory = self.memory
        engine = memory.engines.attached.get(connection) if memory else None
        if memory is None or engine is None:
            raise PeerProtocolError(f"{type(message).__name__} from a client")
        match message:
            case wire.NeedPages():
                memory.engines.ask(engine, max(0, message.count))
            case wire.Writing() | wire.GiveBack() | wire.Unpin():
                self._on_pages(memory, engine, message)
            case wire.Detach():
                self._lose_engine(connection)
                self._let_go(engine.process, engine.instance)
                self._sends.append(Disconnect(connection, "detached"))
            case wire.Sealed():
                self._on_sealed(memory, engine, message)
            case wire.Vacated() if self.releases is not None:
                self.releases.on_vacated(connection, message.number)
            case wire.HandoffReady():
                self._sends += self.readers.on_handoff_ready(message, now_ms)

    def _on_pages(
        self, memory: Memory, engine: Engine, message: wire.Writing | wire.GiveBack | wire.Unpin
    ) -> None:
        """Of a page that is named twice the second word is stale, as of one that is not the engine's."""
        named = self._pages(message)
        epochs = memory.table.epochs
        mine = engine.pinned if isinstance(message, wire.Unpin) else engine.held
        pages = list(dict.fromkeys(page for page, epoch in named if page in mine and epochs[page] == epoch))
        if isinstance(message, wire.Unpin):
            memory.engines.unpin_all(engine, pages)
        elif isinstance(message, wire.GiveBack):
            memory.engines.give_back_all(engine, pages)
            memory.engines.answers(engine, message.answers)
        else:
            pages = memory.engines.writes(engine, pages)
        self.counters["messages_stale"] += len(named) - len(pages)

    def _on_sealed(self, memory: Memory, engine: Engine, message: wire.Sealed) -> None:
        for block in parse.sealed(message, memory.block_tokens, self.limits.max_blocks_per_call):
            page = block.page
            if not memory.engines.holds(engine, page, block.epoch):
                self.counters["messages_stale"] += 1
                continue
            memory.engines.completes(engine, page)
            entry = Entry(block.block_hash, block.parent, page, block.valid_tokens)
            self.condemn_late(engine, entry)
            is_new = self.index.insert(entry)
            self.counters["pages_sealed" if is_new else "seals_duplicate"] += 1
            if is_new:
                self.note(entry)
            if engine.works_in_pages:
                memory.table.apply(page, PageEvent.SEAL)
                memory.engines.keep(engine, entry)
                continue
            if is_new:
                memory.table.apply(page, PageEvent.SEAL)
            else:
                memory.table.free(page, PageEvent.DISCARD)

    def _on_delete(self, connection: int, call: wire.Delete) -> None:
        count = self.delete(self._hashes(call.hashes))
        self._send(connection, wire.Deleted(call_id=call.call_id, num_blocks=count))

    def evict(self) -> bool:
        """Forget the coldest block that nobody pins. Whether there was one."""
        entry = self.index.evict()
        if entry is not None:
            self._free_entries([entry])
        return entry is not None

    # -- for the spaces together ----------------------------------------------------------------------

    def delete(self, hashes: list[BlockHash]) -> int:
        """Drop these blocks, or with none all, that nobody pins. How many."""
        removed = self.index.delete(hashes) if hashes else self.index.delete_unpinned()
        self._free_entries(removed)
        return len(removed)

    def tell(self, connection: int, message: wire.FromMempool) -> list[Action]:
        """Answer a call for which this pool alone does not know the answer."""
        self._send(connection, message)
        return self.flush()

    def say(self, connection: int, message: wire.FromMempool) -> None:
        """With the next actions."""
        self._send(connection, message)

    def answer(
        self,
        connection: int,
        instance: InstanceId,
        call: wire.Acquire,
        now_ms: int,
        came: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Lease what is here now. `came`: blocks that were brought for this call, by tier."""
        self._sends.append(self.readers.answer(connection, instance, call, now_ms, came))

    # -- pages that the mempool itself writes --------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages that are free now. There must be memory."""
        assert self.memory is not None
        return self.memory.table.num_free

    @property
    def num_at_hand(self) -> int:
        """Pages that a claim gets without asking anybody, but for blocks that must leave for other memory first."""
        return self.num_free + len(self.index) - self.index.num_pinned

    @property
    def num_spare(self) -> int:
        """The same, and what engines have in stock."""
        assert self.memory is not None
        return self.num_at_hand + sum(len(engine.stock) for engine in self.memory.engines.attached.values())

    def begin_writing(self, claim: Claim) -> None:
        """A copy writes the claimed pages from now on."""
        self.claims.remove(claim)
        assert self.memory is not None
        self.memory.table.apply_all(claim.pages, PageEvent.WRITE)

    def begin_some(self, claim: Claim, count: int) -> list[PageId]:
        """As begin_writing(), of its first pages, which are the claim's no more; it waits for the others."""
        assert self.memory is not None
        pages = claim.split(count)
        self.memory.table.apply_all(pages, PageEvent.WRITE)
        return pages

    def claim_now(self, count: int) -> list[PageId]:
        """Up to `count` pages, to be written from now on: what is free or unused, and nothing that engines have."""
        claim = self.claim(count, ask=False)
        claim.wanted = len(claim.pages)
        self.begin_writing(claim)
        return claim.pages

    def take_in(self, entries: list[Entry]) -> list[Entry]:
        """Claimed pages are complete: index them. A page whose block came otherwise meanwhile is free again.

        Returns: what is indexed now of these blocks, by whichever page.
        """
        assert self.memory is not None
        table, out = self.memory.table, self.index.insert_all(entries)
        new = [entry for entry, known in zip(entries, out, strict=True) if known is entry]
        if len(new) < len(entries):
            others = [entry.page for entry, known in zip(entries, out, strict=True) if known is not entry]
            table.free_all(others, PageEvent.DISCARD)
        self.note(*new)
        table.apply_all([entry.page for entry in new], PageEvent.SEAL)
        return out

    def cancel(self, claim: Claim) -> None:
        """Nothing was written, or nothing writes any more: the pages are free."""
        if claim in self.claims:
            self.claims.remove(claim)
        assert self.memory is not None
        self.memory.table.free_all(claim.pages, PageEvent.GIVE_BACK)
        claim.pages = []

    def trim(self, claim: Claim, count: int) -> None:
        """It wants no more than `count` pages; none of them is written yet."""
        assert self.memory is not None
        while len(claim.pages) > count:
            self.memory.table.free(claim.pages.pop(), PageEvent.GIVE_BACK)

    def quarantine(self, pages: list[PageId]) -> None:
        """A copy failed that may still write these."""
        assert self.memory is not None
        for page in pages:
            self.memory.table.apply(page, PageEvent.HOLDER_LOST)

    def settled(self, pages: list[PageId]) -> None:
        """Nothing can write these quarantined pages any more."""
        assert self.memory is not None
        for page in pages:
            self.memory.table.free(page, PageEvent.ACKNOWLEDGED)

    def flush(self) -> list[Action]:
        """Actions of what was called since the last event."""
        self._serve()
        return self._done()

    # -- time -------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Action]:
        """End what is due; give memory of free pages back once the pool has been quiet."""
        self._ticked_at_ms = now_ms
        self._sends += self.readers.expire(now_ms)
        if self.releases is not None:
            self.releases.tick(now_ms)
        punched: list[Action] = []
        quiet_ms = now_ms - self._active_at_ms
        memory = self.memory
        if memory is not None and not memory.pages_per_slab and 0 < self.limits.idle_punch_ms <= quiet_ms:
            pages = memory.table.take_warm()
            if pages:
                self.counters["pages_punched"] += len(pages)
                punched.append(PunchPages(pages, self.number))
        self.drop_if_deserted(now_ms)
        self._serve()
        return punched + self._done()

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do, or earlier; None: not before the next event."""
        due = [self.leases.next_deadline_ms(), self.ask_again_at_ms(), self.dropped_at_ms()]
        if self.releases is not None:
            due.append(self.releases.next_deadline_ms())
        memory = self.memory
        if memory is not None and memory.table.has_warm and self.limits.idle_punch_ms:
            due.append(self._active_at_ms + self.limits.idle_punch_ms)
        return min((when for when in due if when is not None), default=None)

    def status(self, call_id: int = 0) -> wire.PoolStatus:
        """The pool now."""
        clients = [f"client {client.instance}" for client in self.clients.values()]
        return wire.PoolStatus(
            call_id=call_id,
            boot_generation=self.boot_generation,
            num_indexed=len(self.index),
            num_pinned=self.index.num_pinned,
            num_leases=len(self.leases.leases),
            num_handoffs=len(self.leases.handoffs),
            counters=dict(self.counters),
            **space.status(self.memory, clients),
        )

    def space_status(self) -> wire.SpaceStatus | None:
        """This space by itself; None before it has memory."""
        return space.of_space(self.number, self.memory, len(self.index), self.index.num_pinned)

    # -- parts ------------------------------------------------------------------------------------

    def _hashes(self, raw: bytes) -> list[BlockHash]:
        return parse.hashes(raw, self.limits.max_blocks_per_call)

    def _pages(self, message: wire.Writing | wire.GiveBack | wire.Unpin) -> list[tuple[PageId, int]]:
        return parse.pages(message.pages, message.epochs, self.limits.max_blocks_per_call)
