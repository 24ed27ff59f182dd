"""One host's pool of pages: decides; does nothing. Events and `now_ms` in, actions out.

Who may lose a pin. A reader that copies reads a page's word, copies, and reads the word again
(architecture.md section 4, rule 4): taking its pin away early cannot give it wrong bytes. So its pins are kept
only while they are worth something: until their TTL while an engine of the same instance is attached, which may
be copying for the request that the client leased for; with no such engine nobody reads, and they go at once.

An engine that works in the pages reads without looking back. Its pins, and leases that are made
`until_release` for it, end with its own word or with proof that all of its processes are dead (rule 5).
"""

from collections import Counter
from dataclasses import dataclass

from services.mempool.core import parse, space
from services.mempool.core.actions import (
    Action,
    CreateMemory,
    Disconnect,
    PoolLimits,
    PunchPages,
    Send,
    WriteWords,
)
from services.mempool.core.engines import Engine
from services.mempool.core.index import Entry, Index
from services.mempool.core.leases import Leases
from services.mempool.core.page_state import PageEvent
from services.mempool.core.readers import Readers
from services.mempool.core.space import Memory
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, Epoch, InstanceId, PageId
from shared.kv.page import PageState
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire import mempool as wire


@dataclass(slots=True)
class Client:
    """A connection that only calls."""

    connection: int
    instance: InstanceId


class Pool:
    """Methods return the actions to perform, in order. After a PeerProtocolError, end the connection."""

    def __init__(self, limits: PoolLimits, boot_generation: Epoch) -> None:
        self.limits = limits
        self.boot_generation = boot_generation
        self.index = Index()
        self.leases = Leases(self.index, boot_generation)
        self.memory: Memory | None = None
        self.clients: dict[int, Client] = {}
        self.counters: Counter[str] = Counter()
        self.readers = Readers(limits, self.index, self.leases, self.counters)
        self._active_at_ms = 0
        self._sends: list[Action] = []

    # -- connections ------------------------------------------------------------------------------

    def on_attach(self, connection: int, process: int, message: wire.Attach, now_ms: int) -> list[Action]:
        """First message of a connection. `process` is equal for connections of one living process only.

        Raises: PeerProtocolError on a second Attach or an impossible description.
        """
        if self._instance_of(connection) is not None:
            raise PeerProtocolError("attached already")
        if message.kind == "client":
            self.clients[connection] = Client(connection, message.instance)
            self._send(connection, wire.Attached(boot_generation=self.boot_generation, attachment=connection))
            return self._done()
        self._active_at_ms = now_ms
        if message.kind == "rank":
            created = self._attach_rank(connection, process, message)
        else:
            created = self._attach_engine(connection, process, message)
        return created + self._done()

    def _attach_rank(self, connection: int, process: int, message: wire.Attach) -> list[Action]:
        created, memory = self._memory_for(connection, message)
        if memory is not None:
            memory.engines.attach_rank(connection, process, message.instance, message.rank)
            created += space.slabs_of(memory, connection, message)
            self._welcome(connection, memory)
        return created

    def _attach_engine(self, connection: int, process: int, message: wire.Attach) -> list[Action]:
        created, memory = self._memory_for(connection, message)
        if memory is None:
            return created
        epoch = message.instance_epoch
        rivals = [e for e in memory.engines.of_instance(message.instance) if epoch and e.instance_epoch]
        if any(rival.instance_epoch > epoch for rival in rivals):
            return self._refuse(connection, "epoch.stale", f"a later {message.instance} is attached")
        for rival in rivals:
            if rival.instance_epoch < epoch:
                self._replace(rival, "epoch.stale")
        if message.lets_go:
            # the end of its earlier connection may be read after this message
            for earlier in memory.engines.of_instance(message.instance):
                if earlier.process == process:
                    self._replace(earlier, "replaced")
            self._let_go(process, message.instance)
        quota = max(0, min(message.quota_pages, memory.table.num_pages))
        engine = Engine(connection, process, message.instance, epoch, quota, demand=quota)
        engine.works_in_pages = message.works_in_pages
        memory.engines.attach(engine)
        self._welcome(connection, memory)
        for over, count in memory.engines.excess().items():
            self._send(over, wire.Shrink(count=count))
        self._serve()
        return created

    def _memory_for(self, connection: int, message: wire.Attach) -> tuple[list[Action], Memory | None]:
        """The pool's memory, made now if this is the first that describes itself; None: it was refused."""
        description = space.described(message)
        created: list[Action] = []
        if self.memory is None:
            planned = space.plan(description, message, self.limits)
            if planned.num_pages == 0:
                return self._refuse(connection, "pages.exhausted", planned.shortage), None
            self.memory = space.make(
                description,
                planned,
                self.limits,
                self.boot_generation,
                lambda entry: self.index.unpin([entry]),
            )
            self.readers.epochs = self.memory.table.epochs
            created.append(
                CreateMemory(planned.num_pages, planned.page_bytes, planned.num_ranks, planned.pages_per_slab)
            )
        memory = self.memory
        if description.content_key != memory.content_key:
            reason = f"this pool holds blocks of {memory.content_key}, not of {description.content_key}"
            return self._refuse(connection, "layout.mismatch", reason), None
        return created, memory

    def _welcome(self, connection: int, memory: Memory) -> None:
        attached = wire.Attached(
            boot_generation=self.boot_generation,
            attachment=connection,
            num_pages=memory.table.num_pages,
            page_bytes=memory.page_bytes,
            pages_per_slab=memory.pages_per_slab,
        )
        self._send(connection, attached, with_memory=True)

    def _replace(self, engine: Engine, reason: str) -> None:
        self._lose_engine(engine.connection)
        self._sends.append(Disconnect(engine.connection, reason))

    def _let_go(self, process: int, instance: InstanceId) -> None:
        assert self.memory is not None
        self.counters["pages_acknowledged"] += self.memory.engines.let_go(process, instance)
        if not self.memory.engines.lives_on(instance):
            self.leases.release_kept(instance)

    def _refuse(self, connection: int, code: str, reason: str) -> list[Action]:
        self.counters["attaches_refused"] += 1
        self._send(connection, wire.AttachRefused(code=code, reason=reason))
        self._sends.append(Disconnect(connection, code))
        return []

    def on_closed(self, connection: int, now_ms: int) -> list[Action]:
        """A connection ended, by either side. Unknown ones (refused, or ended by us) are ignored."""
        self._active_at_ms = now_ms
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

    def _lose_engine(self, connection: int) -> None:
        assert self.memory is not None
        engine = self.memory.engines.lose(connection)
        if engine is None:
            return
        self.counters["engines_lost"] += 1
        self.leases.forget_waiters(connection)
        self.leases.release_of(connection, engine.instance, engine_lives=True)
        if not self._attached(engine.instance):
            self.leases.release_of(None, engine.instance, engine_lives=True)

    def on_process_dead(self, process: int, now_ms: int) -> list[Action]:
        """Proof of death (its pidfd became readable): everything that it could still write is free again.

        Its connections end too, even if a forked child keeps a socket open.
        """
        if self.memory is None:
            return []
        self._active_at_ms = now_ms
        for engine in [e for e in self.memory.engines.attached.values() if e.process == process]:
            self._replace(engine, "process.dead")
        instances = {lost.engine.instance for lost in self.memory.engines.lost}
        self.counters["pages_recovered"] += self.memory.engines.bury(process)
        for instance in sorted(instances):
            if not self.memory.engines.lives_on(instance):
                self.leases.release_kept(instance)  # nobody works in the pages that were leased for it
        self._serve()
        return self._done()

    # -- messages ---------------------------------------------------------------------------------

    def on_message(self, connection: int, message: wire.ToMempool, now_ms: int) -> list[Action]:
        """Any message after Attach.

        Raises: PeerProtocolError on what no correct peer sends; nothing has changed then.
        """
        instance = self._instance_of(connection)
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
                self._sends += space.send_slabs(self.memory, connection, message)
            case wire.Attach():
                raise PeerProtocolError("attached already")
            case _:
                self._on_engine_message(connection, message, now_ms)
        self._serve()
        return self._done()

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
            case wire.HandoffReady():
                self._sends += self.readers.on_handoff_ready(message, now_ms)

    def _on_pages(
        self, memory: Memory, engine: Engine, message: wire.Writing | wire.GiveBack | wire.Unpin
    ) -> None:
        for page, epoch in self._pages(message):
            if isinstance(message, wire.Writing):
                if self._own(engine, page, epoch, PageState.GRANTED):
                    memory.table.apply(page, PageEvent.WRITE)
            elif isinstance(message, wire.GiveBack):
                if self._own(engine, page, epoch):
                    memory.engines.give_back(engine, page)
            elif page in engine.pinned and memory.table.epochs[page] == epoch:
                memory.engines.unpin(engine, page)
            else:
                self.counters["messages_stale"] += 1

    def _on_sealed(self, memory: Memory, engine: Engine, message: wire.Sealed) -> None:
        for block in parse.sealed(message, memory.block_tokens, self.limits.max_blocks_per_call):
            if not self._own(engine, block.page, block.epoch):
                continue
            page = block.page
            if memory.table.states[page] == PageState.GRANTED:  # sealed without Writing: it wrote nonetheless
                memory.table.apply(page, PageEvent.WRITE)
            entry = Entry(block.block_hash, block.parent, page, block.valid_tokens, block.checksum)
            is_new = self.index.insert(entry)
            self.counters["pages_sealed" if is_new else "seals_duplicate"] += 1
            if engine.works_in_pages:
                memory.table.apply(page, PageEvent.SEAL)
                if is_new:
                    self.index.pin([entry])
                memory.engines.seal(engine, page, entry if is_new else None)
                continue
            engine.held.remove(page)
            if is_new:
                memory.table.apply(page, PageEvent.SEAL)
            else:
                memory.table.free(page, PageEvent.DISCARD)

    def _on_delete(self, connection: int, call: wire.Delete) -> None:
        hashes = self._hashes(call.hashes)
        removed = self.index.delete(hashes) if hashes else self.index.delete_unpinned()
        self._free_entries(removed)
        self._send(connection, wire.Deleted(call_id=call.call_id, num_blocks=len(removed)))

    # -- time -------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Action]:
        """End what is due; give memory of free pages back once the pool has been quiet."""
        self._sends += self.readers.expire(now_ms)
        punched: list[Action] = []
        quiet_ms = now_ms - self._active_at_ms
        memory = self.memory
        if memory is not None and not memory.pages_per_slab and 0 < self.limits.idle_punch_ms <= quiet_ms:
            pages = memory.table.take_warm()
            if pages:
                self.counters["pages_punched"] += len(pages)
                punched.append(PunchPages(pages))
        self._serve()
        return punched + self._done()

    def next_deadline_ms(self) -> int | None:
        """When tick() has something to do, or earlier; None: not before the next event."""
        due = [self.leases.next_deadline_ms()]
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

    # -- parts ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Grant what engines ask for, evicting what nobody pins."""
        memory = self.memory
        if memory is None:
            return

        def make_room() -> bool:
            entry = self.index.evict()
            if entry is not None:
                self.counters["pages_evicted"] += 1
                self._free_entries([entry])
            return entry is not None

        for connection, granted in memory.engines.serve(make_room).items():
            self.counters["pages_granted"] += len(granted)
            pages, epochs = zip(*granted, strict=True)
            self._send(connection, wire.Granted(pages=u32_bytes(pages), epochs=u64_bytes(epochs)))

    def _free_entries(self, entries: list[Entry]) -> None:
        for entry in entries:
            assert self.memory is not None
            self.memory.table.free(entry.page, PageEvent.RETIRE)

    def _own(self, engine: Engine, page: PageId, epoch: int, state: PageState | None = None) -> bool:
        """Whether the engine may speak of this page now; a stale word is counted and dropped."""
        assert self.memory is not None
        mine = self.memory.engines.holds(engine, page, epoch)
        if mine and (state is None or self.memory.table.states[page] == state):
            return True
        self.counters["messages_stale"] += 1
        return False

    def _instance_of(self, connection: int) -> InstanceId | None:
        client = self.clients.get(connection)
        if client is not None:
            return client.instance
        return self.memory.engines.instance_of(connection) if self.memory is not None else None

    def _attached(self, instance: InstanceId) -> bool:
        return self.memory is not None and bool(self.memory.engines.of_instance(instance))

    def _hashes(self, raw: bytes) -> list[BlockHash]:
        return parse.hashes(raw, self.limits.max_blocks_per_call)

    def _pages(self, message: wire.Writing | wire.GiveBack | wire.Unpin) -> list[tuple[PageId, int]]:
        return parse.pages(message.pages, message.epochs, self.limits.max_blocks_per_call)

    def _send(self, connection: int, message: wire.FromMempool, *, with_memory: bool = False) -> None:
        self._sends.append(Send(connection, message, with_memory))

    def _done(self) -> list[Action]:
        sends, self._sends = self._sends, []
        words = self.memory.table.take_words() if self.memory else []
        return [WriteWords(words), *sends] if words else sends
