"""A mempool, its pages' bytes and everything that is on its way to and from it: what engines of a model test share.

The pool is the real core; nothing listens. Messages wait in order, a connection at a time, until pump(). A page's
slots hold what a step wrote there: for every token the whole text up to it, so that one comparison shows a
wrong, overwritten or never written token.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from services.mempool.core.actions import (
    Action,
    Disconnect,
    PunchPages,
    ReleaseUnits,
    RestoreUnits,
    WriteEntries,
)
from services.mempool.core.space import Plan
from shared.errors import PeerGone
from shared.ids import BlockHash, Epoch, InstanceId
from shared.kv.block_hash import hash_blocks, hash_tail, pack_tokens
from shared.kv.page import PageState, unpack_word
from shared.kv.page_table import ENTRY
from shared.wire import mempool as wire
from shared.wire.mempool_swap import SwapCall
from tests.support.page_swap_space import SwapSpace
from tests.unit.mempool_harness import BLOCK_TOKENS, BOOT, DESCRIPTION, PAGE_BYTES, SEED, Harness

Slots = list[bytes | None]
_IN_USE = (PageState.GRANTED, PageState.WRITING, PageState.SEALED, PageState.QUARANTINED)
WORLDS: dict[str, "World"] = {}  # by the name that stands for the mempool's socket


class _Boot(Harness):
    """One mempool process: a pool, and what it has sent and not delivered."""

    def __init__(self, world: "World", boot: Epoch) -> None:
        super().__init__(world.num_pages, boot, kept_share=world.kept_share)
        self.world = world
        self.to_pool: defaultdict[int, deque[wire.ToMempool]] = defaultdict(deque)
        self.to_peer: defaultdict[int, deque[wire.FromMempool]] = defaultdict(deque)
        self.system: deque[ReleaseUnits | RestoreUnits] = deque()  # asked of the operating system
        self.swap = SwapSpace(self.pool, boot, world.swap_pages, world.slots)

    def say(self, connection: int, message: wire.ToMempool) -> None:
        if isinstance(message, SwapCall):
            self.swap.say(connection, message)
            self.go_on()
        else:
            super().say(connection, message)
            self.go_on()

    def go_on(self) -> None:
        """What swaps can do now."""
        self.swap.advance()
        self.run(self.pool.flush())

    def closed(self, connection: int) -> None:
        self.swap.swaps.forget(connection)
        super().closed(connection)
        self.go_on()

    def dead(self, process: int) -> None:
        super().dead(process)
        self.swap.swaps.prune()
        self.go_on()

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, WriteEntries):
                for page, packed in action.entries:
                    self.world.entries[page * ENTRY.size : (page + 1) * ENTRY.size] = packed
            elif isinstance(action, PunchPages):
                self.world.lose_bytes(action.pages)
            elif isinstance(action, ReleaseUnits | RestoreUnits):
                self.system.append(action)
            elif isinstance(action, Disconnect) and action.reason != "memory.replaced":
                raise AssertionError(f"the pool ends connection {action.connection}: {action.reason}")
        super().run(actions)

    def _sent(self, action) -> None:
        super()._sent(action)
        self.to_peer[action.connection].append(action.message)


class World:
    """`watch`: called after every event of the pool, e.g. to look for pages that were freed too early."""

    def __init__(self, name: str, num_pages: int, kept_share: float = 0.99, swap_pages: int = 0) -> None:
        self.num_pages, self.swap_pages = num_pages, swap_pages
        self.holds_copies = False  # they end by end_copy() only
        self.kept_share = kept_share
        self.description = DESCRIPTION  # of the engines that come from now on
        self.slots: list[Slots] = [[None] * BLOCK_TOKENS for _ in range(num_pages)]
        self.entries = bytearray(num_pages * ENTRY.size)
        self.watch: list[Callable[[], None]] = []
        self.links: dict[int, SimLink] = {}  # by connection, of engines
        self.processes: set[int] = set()  # that live
        self._last_number = 0
        self._boot = BOOT
        self.mempool: _Boot | None = _Boot(self, self._boot)
        WORLDS[name] = self

    def number(self) -> int:
        """A new connection, process or call."""
        self._last_number += 1
        return self._last_number

    @property
    def now_ms(self) -> int:
        return self.mempool.now_ms if self.mempool else 0

    # -- messages -------------------------------------------------------------------------------------

    def pump(self, connection: int | None = None, count: int = 1_000) -> None:
        """Deliver what waits: of one connection at most `count` messages, or everything there is."""
        if self.mempool is None:
            return
        for one in [connection] if connection is not None else [*self.mempool.to_pool, *self.links]:
            self._pump_one(one, count)
        if connection is None and not self.holds_copies and self.mempool.swap.copies:
            while self.end_copy():
                continue
            self.pump()

    def end_copy(self, pick: int = 0, *, failed: bool = False) -> bool:
        """Of swapped blocks. False: there is none."""
        mempool = self.mempool
        if mempool is None or not mempool.swap.end_copy(pick, failed=failed):
            return False
        mempool.go_on()
        self.look()
        return True

    def settle(self) -> None:
        """Failed copies write no more."""
        if self.mempool is not None:
            self.mempool.swap.settle()
            self.mempool.go_on()
            self.look()

    def _pump_one(self, connection: int, count: int) -> None:
        mempool = self.mempool
        inbox, outbox = mempool.to_pool[connection], mempool.to_peer[connection]
        for _ in range(count):
            if inbox:
                mempool.say(connection, inbox.popleft())
                self.look()
        link = self.links.get(connection)
        if link is None or not link.started:
            return
        for _ in range(min(count, len(outbox))):
            link.deliver(outbox.popleft())

    def lose_bytes(self, pages: Iterable[int]) -> None:
        """Their memory is the system's."""
        for page in pages:
            self.slots[page] = [None] * BLOCK_TOKENS

    def change_memory(self, num_pages: int, *, regain: bool = False, wait_ms: int = 1_000) -> None:
        """Somebody presses for memory, or says that there is some again."""
        mempool, kind = self.mempool, wire.RegainMemory if regain else wire.ReleaseMemory
        if mempool is None or mempool.pool.releases is None:
            return
        call = kind(call_id=self.number(), num_bytes=num_pages * PAGE_BYTES, wait_ms=wait_ms)
        mempool.pool.releases.on_call(0, call, mempool.now_ms, wait_ms)
        mempool.run(mempool.pool.flush())
        self.look()

    def answer_system(self) -> bool:
        """It has done what it was asked first."""
        mempool = self.mempool
        if mempool is None or not mempool.system:
            return False
        action = mempool.system.popleft()
        if isinstance(action, ReleaseUnits):
            self.lose_bytes(action.units)
            mempool.pool.releases.on_released(action.units, failed=False)
        else:
            mempool.pool.releases.on_restored(action.units, len(action.units))
        mempool.run(mempool.pool.flush())
        self.look()
        return True

    def look(self) -> None:
        """What must hold after every event."""
        pool = self.mempool.pool if self.mempool is not None else None
        if pool is not None and pool.memory is not None:
            for block_hash, pages in pool.index.twins.pages.items():
                known = pool.index.get(block_hash)
                assert known is None or known.pins, (
                    f"page {known.page} waits, and {list(pages)} hold the same"
                )
        for watch in self.watch:
            watch()

    def client(self, instance: str) -> int:
        """A front's connection."""
        connection = self.number()
        self.mempool.client(connection, instance)
        self.mempool.to_peer.pop(connection)
        return connection

    def call(self, connection: int, message: wire.ToMempool) -> wire.FromMempool | None:
        """The answer, if it comes at once. What an engine sent before has not necessarily arrived."""
        self.mempool.say(connection, message)
        self.look()
        answers = self.mempool.to_peer.pop(connection, deque())
        return answers[-1] if answers else None

    def acquired(self, connection: int, hashes: list[bytes], handoff_id: str = "") -> dict[str, Any]:
        """A lease of a front until it is released: what the front says of it to its engine. Empty: there is nothing."""
        call = wire.Acquire(
            call_id=self.number(), hashes=b"".join(hashes), handoff_id=handoff_id, until_release=True
        )
        got = self.call(connection, call)
        if not isinstance(got, wire.Acquired) or not got.num_blocks:
            return {}
        known = b"".join(hashes[: got.num_blocks])
        return {"pages": got.pages, "epochs": got.epochs, "hashes": known, "lease_id": got.lease_id}

    def advance(self, by_ms: int) -> None:
        """Time for the pool."""
        if self.mempool is not None:
            self.mempool.advance(by_ms)
            self.look()

    # -- ends -------------------------------------------------------------------------------------------

    def end_process(self, process: int, connection: int) -> None:
        """Its connection is seen to be closed; death_seen() is the proof that it is dead."""
        self.links.pop(connection, None)
        if self.mempool is not None:
            self.mempool.to_pool.pop(connection, None)
            self.mempool.closed(connection)
            self.look()

    def death_seen(self, process: int) -> None:
        """The proof."""
        self.processes.discard(process)
        if self.mempool is not None:
            self.mempool.dead(process)
            self.look()

    def lose_mempool(self) -> None:
        """It is gone, with everything on its way to it; what it had sent still arrives."""
        mempool, self.mempool = self.mempool, None
        self._last_words, self._memory_id = dict(mempool.words), mempool.pool.memory_id
        self._last_swap = mempool.swap
        for connection, link in list(self.links.items()):
            for message in mempool.to_peer[connection]:
                link.deliver(message)
            link.down()
        self.links.clear()

    def start_successor(self, keep_memory: bool = True, *, keep_swapped: bool = False) -> None:
        """With the pages as they are, or with others (the keeper was lost too); host memory as it was, or empty."""
        self._boot = Epoch(self._boot + 1_000_000)
        self.mempool = _Boot(self, self._boot)
        if keep_swapped:
            self.mempool.swap.inherit(self._last_swap)
        if not keep_memory or not self._last_words:
            return
        words = [self._last_words.get(page, 0) for page in range(self.num_pages)]
        self.mempool.words = dict(enumerate(words))
        processes = sorted(self.processes)
        self.mempool.run(
            self.mempool.pool.adopt(
                self.description, Plan(self.num_pages, PAGE_BYTES, 1), words, bytes(self.entries),
                memory_id=self._memory_id, processes=processes, engines=processes,
            )
        )  # fmt: skip
        self.look()

    # -- looking ----------------------------------------------------------------------------------------

    def state(self, page: int) -> PageState:
        """As the page table says."""
        return unpack_word(self.mempool.words[page])[1]

    def assert_unchanged(self, page: int, epoch: int, why: str) -> None:
        """The page is still what it was under this epoch."""
        if self.mempool is None or self.mempool.pool.memory is None:
            return
        now, state = unpack_word(self.mempool.words[page])
        assert now == epoch, f"page {page} was freed under epoch {epoch} ({now} now): {why}"
        assert state in _IN_USE, f"page {page} is {state.name}: {why}"

    def assert_known(self, connection: int, num_asked: int, unwritten: set[int]) -> None:
        """The pool knows how much of what it asked an engine for that has not answered, and which pages it has begun to
        write: what the engine knows, and what is on its way."""
        memory = self.mempool.pool.memory if self.mempool is not None else None
        engine = memory.engines.attached.get(connection) if memory is not None else None
        if engine is not None:
            asks, answers = self.mempool.to_peer[connection], self.mempool.to_pool[connection]
            num_asked += sum(m.count for m in asks if isinstance(m, wire.Shrink) and not m.cached)
            num_asked += sum(m.answers for m in answers if isinstance(m, wire.GiveBack))
            assert engine.asked == num_asked, (engine.asked, num_asked)
            assert asks or answers or engine.stock == unwritten, (engine.stock, unwritten)

    def counts(self) -> dict[str, int]:
        """Pages by state, zeros left out; they add up."""
        counts = self.mempool.counts()
        assert sum(counts.values()) == self.num_pages
        return counts

    def describe(self) -> str:
        """What the pool knows, for a failure's message."""
        pool = self.mempool.pool
        status = pool.status()
        asking = {str(e): e.demand for e in pool.memory.engines.attached.values()} if pool.memory else {}
        return (
            f"{self.counts()}, {status.num_pinned} pinned by {status.num_leases} leases, {status.num_handoffs} "
            f"handoffs and engines; asking {asking}; claims {pool.claims}"
        )


class SimLink:
    """In place of BlockingUnixLink in shared.mempool.page_quota: an engine's end of its connection."""

    def __init__(self, path: Path, *, on_message, on_down) -> None:
        self.world = WORLDS[str(path)]
        self.connection = self.world.number()
        self.started = False
        self._on_message, self._on_down = on_message, on_down

    def connect(self) -> None:
        if self.world.mempool is None:
            raise PeerGone("nobody serves the socket")

    def call(self, message: wire.Attach, timeout_ms: int) -> tuple[wire.FromMempool, list[bytes], list[int]]:
        world = self.world
        process = int(message.instance.rpartition("-")[2])  # instances of these tests end in their process
        world.processes.add(process)
        mempool = world.mempool
        mempool.run(mempool.pool.on_attach(self.connection, process, message, mempool.now_ms))
        world.look()
        reply = mempool.to_peer[self.connection].popleft()
        if isinstance(reply, wire.Attached):
            world.links[self.connection] = self
        return reply, [], []

    def start(self) -> None:
        self.started = True

    def send(self, message: wire.ToMempool) -> None:
        if self.connection not in self.world.links:
            raise PeerGone("the mempool is gone")
        self.world.mempool.to_pool[self.connection].append(message)

    def deliver(self, message: wire.FromMempool) -> None:
        self._on_message(0, message, [], [])

    def down(self) -> None:
        self._on_down(None)

    def close(self) -> None:
        self.started = False


def instance(name: str, process: int) -> InstanceId:
    """A name from which SimLink tells the process."""
    return InstanceId(f"{name}-{process}")


def hashes_of(prompt: bytes) -> list[BlockHash]:
    """Of all blocks, the partial last one included."""
    whole = hash_blocks(SEED, pack_tokens(list(prompt)), BLOCK_TOKENS)
    rest = prompt[len(whole) * BLOCK_TOKENS :]
    return [*whole, hash_tail(whole[-1] if whole else SEED, pack_tokens(list(rest)))] if rest else whole
