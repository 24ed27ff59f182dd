"""Who is connected to a pool and what memory they get: the part of the pool that begins connections. No I/O."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from services.mempool.core import space
from services.mempool.core.actions import (
    Action,
    CreateMemory,
    Disconnect,
    PoolLimits,
    Send,
    WriteEntries,
    WriteWords,
)
from services.mempool.core.claims import Claim, Client
from services.mempool.core.engines import Engine
from services.mempool.core.entry import Entry
from services.mempool.core.inheritance import Inheritance, NotInherited, pack_entry
from services.mempool.core.leases import Fence, Leases
from services.mempool.core.radix import Index
from services.mempool.core.readers import Readers
from services.mempool.core.releases import Releases
from services.mempool.core.space import Memory
from services.mempool.core.supply import Supply
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription, num_blocks
from shared.kv.words import u32_bytes
from shared.wire import mempool as wire

MAX_FAR_PLACES = 65_536  # of one rank


class Attachments(Supply):
    """State of a pool, and its connections. Pool adds what they say.

    Args:
        number: of this space in its mempool.
        fence: of all spaces of the mempool.
    """

    def __init__(
        self, limits: PoolLimits, boot_generation: Epoch, number: int = 0, fence: Fence | None = None
    ) -> None:
        self.limits = limits
        self.boot_generation = boot_generation
        self.number = number
        self.index = Index()
        self.leases = Leases(self.index, fence or Fence(boot_generation), self._engine_of)
        self.memory: Memory | None = None
        self.clients: dict[int, Client] = {}
        self.counters: Counter[str] = Counter()
        self.readers = Readers(limits, self.index, self.leases, self.counters, number)
        self.peer_address = ""  # for clients: where mempools of other hosts reach this one
        self.load_interval_ms = 0  # for clients: how often they report the load of their engine; 0: never
        self.memory_id = Epoch(0)  # the generation in which the memory was made, plus its number
        self.inheritance: Inheritance | None = None
        self.inherited_from: dict[int, InstanceId] = {}  # whose those that were awaited are
        self._active_at_ms = 0
        self._sends: list[Action] = []
        self._notes: list[tuple[int, bytes]] = []  # of pages sealed since the last actions
        self.releases: Releases | None = None  # with the memory
        self.claims: list[Claim] = []  # for pages that the mempool itself is about to write
        # frees a page, or has blocks leave for as many as are lacking (dram.py); whether one is free now
        self.outlet: Callable[[int], bool] | None = None

    def adopt(
        self,
        description: EngineDescription,
        planned: space.Plan,
        words: Sequence[int],
        entries: bytes,
        *,
        memory_id: Epoch,
        processes: Sequence[int],
        engines: Sequence[int],
        devices: Sequence[str] = (),
        label: str = "",
        instances: Sequence[InstanceId] = (),
        mappers: Sequence[int] = (),
        is_owed: bool = False,
        bereft: Collection[InstanceId] = (),
    ) -> list[Action]:
        """Go on with an earlier mempool's pages, before anybody attaches. The shell has the memory already.

        Args:
            processes: numbers of those that may still touch pages.
            engines: of these, the ones that report what they hold; the others only attach.
            instances: of each process; bereft: those whose engine is dead, perhaps unlike its ranks.
            mappers: of the processes, those that map allocations; is_owed: see Releases.adopt.
        """
        assert self.memory is None
        self.memory = space.adopt(description, planned, self.limits, words, self.index)
        self.memory.label = label
        self.memory.devices = {rank: device for rank, device in enumerate(devices) if device}
        self.memory_id = memory_id
        self._active_at_ms = -1  # until the first tick: when it was is not known
        self.inherited_from = dict(zip(processes, instances, strict=False))
        self.readers.epochs = self.memory.table.epochs
        self.inheritance = Inheritance(
            self.memory.table, self.memory.engines, self.index, self.leases, entries, processes,
            {process: self.inherited_from.get(process, InstanceId("")) for process in engines}, bereft,
        )  # fmt: skip
        self.counters["pages_inherited"] += self.inheritance.num_sealed
        self.report(0)
        self.releases = self._make_releases(self.memory)
        self.releases.adopt(mappers, is_owed=is_owed)
        return self._done()

    def _make_releases(self, memory: Memory) -> Releases:
        return Releases(
            self.number, memory, self.index, self.counters, self._send, lambda act: self._sends.append(act)
        )

    def awaited(self) -> set[int]:
        """Processes that have not said yet what they hold of an earlier mempool's pages."""
        return set(self.inheritance.awaiting) if self.inheritance is not None else set()

    def report(self, process: int) -> None:
        """It holds no inherited page any more that it has not claimed."""
        if self.inheritance is not None and self.inheritance.reported(process):
            self.inheritance = None

    def on_attach(self, connection: int, process: int, message: wire.Attach, now_ms: int) -> list[Action]:
        """First message of a connection. `process` is equal for connections of one living process only.

        Raises: PeerProtocolError on a second Attach or an impossible description.
        """
        if self.instance_of(connection) is not None:
            raise PeerProtocolError("attached already")
        if message.kind == "client":
            self.clients[connection] = Client(connection, message.instance)
            attached = wire.Attached(
                boot_generation=self.boot_generation, attachment=connection, memory_id=self.memory_id,
                peer_address=self.peer_address, load_interval_ms=self.load_interval_ms,
            )  # fmt: skip
            self._send(connection, attached)
            return self._done()
        self._active_at_ms = now_ms
        if message.kind == "rank":
            created = self._attach_rank(connection, process, message)
        else:
            created = self._attach_engine(connection, process, message)
        return created + self._done()

    def _attach_rank(self, connection: int, process: int, message: wire.Attach) -> list[Action]:
        created, memory = self._memory_for(connection, message)
        if memory is not None and (reason := space.other_device(memory, message)):
            return self._refuse(connection, "device.mismatch", reason)
        if memory is not None:
            places = min(max(0, message.far_places), MAX_FAR_PLACES)
            memory.engines.attach_rank(connection, process, message.instance, message.rank, places)
            assert self.releases is not None
            self.releases.attached(process)
            created += space.slabs_of(memory, self.number, connection, message)
            asked = space.plan(space.described(message), message, self.limits)
            self._welcome(connection, memory, asked.num_pages)
            self._report_ranks(message.instance, [process])
        return created

    def _report_ranks(self, instance: InstanceId, processes: Iterable[int]) -> None:
        for process in processes:
            if self.inheritance is not None and self.inheritance.may_report(process, instance):
                self.report(process)

    def _attach_engine(self, connection: int, process: int, message: wire.Attach) -> list[Action]:
        created, memory = self._memory_for(connection, message)
        if memory is None:
            return created
        epoch = message.instance_epoch
        if memory.engines.has_later(message.instance, epoch):
            return self._refuse(connection, "epoch.stale", f"a later {message.instance} is attached")
        for rival in memory.engines.of_instance(message.instance):
            if 0 < rival.instance_epoch < epoch:
                self._replace(rival, "epoch.stale")
        if message.lets_go:
            # the end of its earlier connection may be read after this message
            for earlier in memory.engines.of_instance(message.instance):
                if earlier.process == process:
                    self._replace(earlier, "replaced")
            self._let_go(process, message.instance)
        quota = max(0, min(message.quota_pages, memory.table.num_pages))
        engine = Engine(connection, process, message.instance, epoch, quota, demand=quota)
        engine.works_in_pages, engine.says_answers = message.works_in_pages, message.says_answers
        if message.works_in_pages and message.description is not None and not memory.only_lends:
            engine.least = num_blocks(message.description.max_model_len, memory.block_tokens) + 1
        try:
            self._claim(engine, message, memory)
        except NotInherited as error:
            return self._refuse(connection, error.code, error.message)
        memory.engines.attach(engine)
        self._welcome(connection, memory)
        if self.inheritance is not None:
            self.inheritance.said(process)
        self.report(process)
        back = [rank.process for rank in memory.engines.ranks.values() if rank.instance == message.instance]
        self._report_ranks(message.instance, back)
        for over, count in memory.engines.excess():
            self._ask(over, count)
        self._serve()
        return created

    def _claim(self, engine: Engine, message: wire.Attach, memory: Memory) -> None:
        if message.holding is None:
            return
        if self.inheritance is None:
            raise NotInherited("this pool has not lost you: what you hold is another's by now")
        holding = message.holding
        for entry in self.inheritance.claim(engine, holding, memory.block_tokens, memory.table.num_pages):
            self.note(entry)
        # its ranks may write these pages, also before they attach again
        engine.ranks |= {p for p in self.awaited() if self.inherited_from.get(p) == engine.instance}
        engine.demand = max(0, engine.quota - engine.num_pages)

    def _memory_for(self, connection: int, message: wire.Attach) -> tuple[list[Action], Memory | None]:
        """The pool's memory, made now if this is the first that describes itself; None: it was refused."""
        description = space.described(message)
        created: list[Action] = []
        if message.memory_id not in (0, self.memory_id):
            return self._refuse(connection, "memory.replaced", "the pool's memory is another by now"), None
        if self.memory is None:
            if message.holding is not None:
                return self._refuse(connection, NotInherited.code, "this pool has no memory yet"), None
            planned = space.plan(description, message, self.limits)
            if planned.num_pages == 0:
                return self._refuse(connection, "pages.exhausted", planned.shortage), None
            created.append(self.make_memory(description, planned, space.label_of(message.device)))
        memory = self.memory
        assert memory is not None
        if description.content_key != memory.content_key:
            reason = f"this pool holds blocks of {memory.content_key}, not of {description.content_key}"
            return self._refuse(connection, "layout.mismatch", reason), None
        return created, memory

    def make_memory(
        self, description: EngineDescription, planned: space.Plan, label: str = ""
    ) -> CreateMemory:
        """Plan the pages of this space, all of them free. Once."""
        made = space.make(description, planned, self.limits, self.boot_generation, self.index)
        self.memory = made
        made.label = label
        self.releases = self._make_releases(made)
        self.memory_id = Epoch(self.boot_generation + self.number)
        self.readers.epochs = made.table.epochs
        return CreateMemory(
            description, planned.num_pages, planned.page_bytes, planned.num_ranks, planned.pages_per_slab,
            self.number, self.memory_id, label,
        )  # fmt: skip

    def _welcome(self, connection: int, memory: Memory, asked_pages: int = 0) -> None:
        attached = wire.Attached(
            boot_generation=self.boot_generation,
            attachment=connection,
            num_pages=memory.table.num_pages,
            page_bytes=memory.page_bytes,
            pages_per_slab=memory.pages_per_slab,
            memory_id=self.memory_id,
            absent_slabs=u32_bytes(self.releases.absent) if memory.pages_per_slab and self.releases else b"",
            asked_pages=asked_pages,
        )
        self._send(connection, attached, with_memory=True)

    def _replace(self, engine: Engine, reason: str) -> None:
        self._lose_engine(engine.connection)
        self._sends.append(Disconnect(engine.connection, reason))

    def _let_go(self, process: int, instance: InstanceId) -> None:
        assert self.memory is not None
        gone = self.memory.engines.let_go(process, instance)
        self.counters["pages_acknowledged"] += sum(engine.num_pages for engine in gone)
        self._release_kept(gone)
        if not self.memory.engines.lives_on(instance):
            self.leases.release_kept(instance)

    def _release_kept(self, gone: list[Engine]) -> None:
        """These engines work no more in the pages that were leased for them. Others of their instances may."""
        assert self.memory is not None
        for engine in gone:
            if not self.memory.engines.lives_on(engine.instance):
                self.leases.release_kept(engine.instance)
            elif not self.memory.engines.lives_on(engine.instance, engine.process):
                self.leases.release_kept(engine.instance, engine.process)

    def _refuse(self, connection: int, code: str, reason: str) -> list[Action]:
        self.counters["attaches_refused"] += 1
        self._send(connection, wire.AttachRefused(code=code, reason=reason))
        self._sends.append(Disconnect(connection, code))
        return []

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

    # -- beside other pools -------------------------------------------------------------------------

    @property
    def is_dram(self) -> bool:
        """Whether it is memory behind other spaces."""
        return self.memory is not None and self.memory.is_dram

    @property
    def is_loan(self) -> bool:
        """Whether its pages are another space's, on loan."""
        return self.memory is not None and self.memory.is_loan

    @property
    def is_behind(self) -> bool:
        """Whether no engine works here: host memory behind other spaces, or pages on loan."""
        return self.memory is not None and self.memory.is_behind

    def has_member(self, connection: int) -> bool:
        """Whether it is a client, engine or rank of this pool."""
        return self.instance_of(connection) is not None

    def shares_content(self, other: "Attachments") -> bool:
        """Whether blocks of the two pools hold the same, perhaps cut over other ranks."""
        mine, theirs = self.memory, other.memory
        return mine is not None and theirs is not None and mine.shares_content(theirs)

    # -- parts ------------------------------------------------------------------------------------

    def note(self, *entries: Entry) -> None:
        """For a successor: what the page holds under its epoch of now. In the same event it may get another."""
        assert self.memory is not None
        epochs = self.memory.table.epochs
        self._notes += [(entry.page, pack_entry(entry, epochs[entry.page])) for entry in entries]

    def instance_of(self, connection: int) -> InstanceId | None:
        """Of a client, engine or rank of this pool."""
        client = self.clients.get(connection)
        if client is not None:
            return client.instance
        return self.memory.engines.instance_of(connection) if self.memory is not None else None

    def _engine_of(self, instance: InstanceId) -> int:
        return self.memory.engines.process_of(instance) if self.memory is not None else 0

    def _attached(self, instance: InstanceId) -> bool:
        return self.memory is not None and bool(self.memory.engines.of_instance(instance))

    def _send(self, connection: int, message: wire.FromMempool, *, with_memory: bool = False) -> None:
        self._sends.append(Send(connection, message, with_memory, self.number))

    def _done(self) -> list[Action]:
        sends, self._sends = self._sends, []
        if self.memory is None:
            return sends
        words = self.memory.table.take_words()
        out: list[Action] = []
        if self._notes:
            notes, self._notes = self._notes, []
            out.append(WriteEntries(notes, self.number))
        if words:
            out.append(WriteWords(words, self.number))
        return out + sends
