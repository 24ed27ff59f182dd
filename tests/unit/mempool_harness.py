"""A pool without sockets: events go in, and what its actions would do is kept where tests can look."""

import hashlib
from collections import defaultdict

from services.mempool.core.actions import (
    Action,
    CreateMemory,
    Disconnect,
    PoolLimits,
    PunchPages,
    Send,
    WriteWords,
)
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId
from shared.kv.layout import EngineDescription
from shared.kv.page import PageState, unpack_word
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.wire import mempool as wire

BLOCK_TOKENS = 4
PAGE_BYTES = 4096
BOOT = Epoch(1_000_000)
SEED = BlockHash(b"\0" * 32)

DESCRIPTION = EngineDescription(
    model="m", fingerprint="f", dtype="float32", layout="layers-blocks", backend="none",
    block_tokens=BLOCK_TOKENS, block_bytes=1000,
)  # fmt: skip

Owned = tuple[int, int]


def chain(*names: object) -> list[BlockHash]:
    """Hashes of a chain; equal leading names give equal leading hashes."""
    out, link = [], SEED
    for name in names:
        link = BlockHash(hashlib.sha256(link + str(name).encode()).digest())
        out.append(link)
    return out


def page_lists(pages: list[Owned]) -> dict[str, bytes]:
    return {"pages": u32_bytes(p for p, _ in pages), "epochs": u64_bytes(e for _, e in pages)}


def check_stock(pool: Pool) -> None:
    """What an engine's stock is said to be are the pages that are granted to it, and what it has reported as such."""
    if pool.memory is not None:
        states = pool.memory.table.states
        for engine in pool.memory.engines.attached.values():
            granted = {page for page in engine.held if states[page] == PageState.GRANTED}
            is_adopted = pool.memory_id != pool.boot_generation + pool.number
            assert engine.stock == granted or (is_adopted and granted <= engine.stock <= engine.held)


class Harness:
    """One pool, its page words as a reader would see them, and what it sent."""

    def __init__(self, num_pages: int = 8, boot: Epoch = BOOT, **limits: object) -> None:
        options = {"granted_share": 1.0, "idle_punch_ms": 0} | limits
        self.pool = Pool(PoolLimits(capacity_bytes=num_pages * PAGE_BYTES, **options), boot)
        self.words: dict[int, int] = {}
        self.sent: defaultdict[int, list[wire.FromMempool]] = defaultdict(list)
        self.granted: defaultdict[int, list[Owned]] = defaultdict(list)
        self.disconnected: dict[int, str] = {}
        self.punched: list[int] = []
        self.created: CreateMemory | None = None
        self.now_ms = 0
        self.calls = 0

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case WriteWords():
                    self.words.update(action.words)
                case Send():
                    self._sent(action)
                case Disconnect():
                    self.disconnected[action.connection] = action.reason
                case PunchPages():
                    assert all(self.state(p) is PageState.FREE for p in action.pages)
                    self.punched += action.pages
                case CreateMemory():
                    self.created = action

    def _sent(self, action: Send) -> None:
        message = action.message
        if isinstance(message, wire.Granted):
            pages = list(zip(u32_list(message.pages), u64_list(message.epochs), strict=True))
            for page, epoch in pages:  # the word was published before the message
                assert unpack_word(self.words[page]) == (epoch, PageState.GRANTED)
            self.granted[action.connection] += pages
        self.sent[action.connection].append(message)

    # -- peers ------------------------------------------------------------------------------------

    def engine(self, connection: int, *, quota: int = 2, process: int = 0, **fields: object) -> None:
        options = {"instance": InstanceId(f"i{connection}"), "description": DESCRIPTION, "says_answers": True}
        options |= fields
        message = wire.Attach(kind="engine", quota_pages=quota, **options)
        self.run(self.pool.on_attach(connection, process or connection, message, self.now_ms))

    def client(self, connection: int, instance: str = "front") -> None:
        message = wire.Attach(kind="client", instance=InstanceId(instance))
        self.run(self.pool.on_attach(connection, 0, message, self.now_ms))

    def say(self, connection: int, message: wire.ToMempool) -> None:
        self.run(self.pool.on_message(connection, message, self.now_ms))

    def closed(self, connection: int) -> None:
        self.run(self.pool.on_closed(connection, self.now_ms))

    def dead(self, process: int) -> None:
        self.run(self.pool.on_process_dead(process, self.now_ms))

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.run(self.pool.tick(self.now_ms))

    # -- messages ---------------------------------------------------------------------------------

    def take(self, connection: int, count: int) -> list[Owned]:
        taken, self.granted[connection] = (
            self.granted[connection][:count],
            self.granted[connection][count:],
        )
        assert len(taken) == count, f"{count} pages wanted, {len(taken)} granted"
        return taken

    def write(self, connection: int, pages: list[Owned]) -> None:
        self.say(connection, wire.Writing(**page_lists(pages)))

    def seal(self, connection: int, pages: list[Owned], hashes: list[BlockHash], first: int = 0) -> None:
        """Seal pages as blocks first, first + 1, ... of a chain."""
        names = hashes[first : first + len(pages)]
        parents = [SEED, *hashes][first : first + len(pages)]
        self.say(
            connection,
            wire.Sealed(
                **page_lists(pages),
                hashes=b"".join(names),
                parents=b"".join(parents),
                valid_tokens=u32_bytes([BLOCK_TOKENS] * len(pages)),
            ),
        )

    def save(self, connection: int, hashes: list[BlockHash]) -> list[Owned]:
        """What an engine does with blocks: take, write, seal."""
        pages = self.take(connection, len(hashes))
        self.write(connection, pages)
        self.seal(connection, pages, hashes)
        return pages

    def need(self, connection: int, count: int) -> None:
        self.say(connection, wire.NeedPages(count=count))

    def give_back(self, connection: int, pages: list[Owned], answers: int | None = None) -> None:
        """`answers`: to be asked for so many pages; None: for these."""
        count = len(pages) if answers is None else answers
        self.say(connection, wire.GiveBack(**page_lists(pages), answers=count))

    def ready(self, connection: int, handoff_id: str, hashes: list[BlockHash], ttl_ms: int = 1000) -> None:
        self.say(
            connection,
            wire.HandoffReady(handoff_id=HandoffId(handoff_id), hashes=b"".join(hashes), ttl_ms=ttl_ms),
        )

    def acquire(
        self,
        connection: int,
        hashes: list[BlockHash],
        *,
        handoff: str = "",
        wait_ms: int = 0,
        ttl_ms: int = 1000,
    ) -> wire.Acquired | None:
        """The answer, or None when there is none yet."""
        self.calls += 1
        self.say(
            connection,
            wire.Acquire(
                call_id=self.calls, hashes=b"".join(hashes), handoff_id=HandoffId(handoff), wait_ms=wait_ms,
                ttl_ms=ttl_ms,
            ),
        )  # fmt: skip
        return self.answer(connection)

    def answer(self, connection: int) -> wire.Acquired | None:
        """The last message to a connection, if it is an Acquired for the last call."""
        last = self.sent[connection][-1] if self.sent[connection] else None
        return last if isinstance(last, wire.Acquired) and last.call_id == self.calls else None

    def release(self, connection: int, lease_id: LeaseId) -> None:
        self.say(connection, wire.Release(lease_id=lease_id))

    # -- looking ----------------------------------------------------------------------------------

    def state(self, page: int) -> PageState:
        return unpack_word(self.words[page])[1]

    def counts(self) -> dict[str, int]:
        """Non-zero counts by state."""
        check_stock(self.pool)
        return {name: count for name, count in self.pool.status().pages_by_state.items() if count}
