"""The pool against a small model: engines that err, vanish, linger and die; readers; mempools that restart.

The model keeps the bytes. A process writes whenever it may have reason to believe that a page is its own,
also after its connection is lost, until it says otherwise or is dead. Whatever the pool then promises a
reader must be in the bytes.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.mempool.core.engines import Engines
from shared.ids import BlockHash, Epoch
from shared.kv.page import PageState, sealed_word, unpack_word
from shared.kv.words import u32_list, u64_list
from shared.wire.mempool import Delete, Detach
from tests.support.examples import examples
from tests.unit.mempool_harness import BOOT, Harness, Owned, chain

NUM_PAGES = 5
PROMPTS = [chain("a", "b", "c"), chain("a", "b", "d"), chain("x", "y")]
MAX_TTL_MS = 120_000

slots = st.integers(0, 1)
prompts = st.sampled_from(PROMPTS)
picks = st.lists(st.integers(0, 30), max_size=3)
seldom = st.integers(0, 3).map(lambda n: n == 3)


@dataclass
class Process:
    """An engine's process. `holds`: pages that it may believe to be its own, with their epochs."""

    number: int
    connection: int | None = None
    holds: dict[int, int] = field(default_factory=dict)


@dataclass
class Held:
    """A lease as its reader knows it."""

    lease_id: str
    client: int
    pages: list[Owned]
    expires_at_ms: int


class MempoolModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.next_number = 1
        self.boot = BOOT
        self.processes: dict[int, Process] = {}  # by slot; a slot without one has a dead engine
        self.clients: set[int] = set()
        self.leases: list[Held] = []
        self.bytes: dict[int, object] = {}
        self.epochs_seen: dict[int, int] = {}
        self.epochs_granted: dict[int, int] = {}
        self.history: list[Owned] = []  # every page that any engine ever held
        self.asked: dict[int, list[BlockHash]] = {}  # call id -> hashes
        self.pool = Harness(NUM_PAGES, self.boot)

    def number(self) -> int:
        self.next_number += 1
        return self.next_number

    def engines(self) -> Engines | None:
        return self.pool.pool.memory.engines if self.pool.pool.memory else None

    # -- engines ----------------------------------------------------------------------------------

    @initialize()
    def begin(self):
        for slot in (0, 1):
            self.attach(slot, 4, lets_go=False)
        self.open_client("tool")

    @rule(slot=slots, quota=st.sampled_from([4, 3, 4, 0]), lets_go=st.booleans())
    def attach(self, slot, quota, lets_go):
        """A new process, or one that lost its connection, as the pool will learn, and comes again."""
        process = self.processes.setdefault(slot, Process(self.number()))
        if process.connection is None or lets_go:
            process.connection = self.number()
            if lets_go:
                process.holds.clear()
            instance = f"engine-{slot}"
            self.pool.engine(
                process.connection, quota=quota, process=process.number, instance=instance, lets_go=lets_go
            )
            self.collect()

    def collect(self):
        """Engines read their grants. No page may go to one process while another could still write it."""
        for process in self.processes.values():
            for page, epoch in self.pool.granted.pop(process.connection, ()):
                for other in self.processes.values():
                    assert other is process or page not in other.holds, f"page {page} has two writers"
                assert epoch > self.epochs_granted.get(page, 0), "granted again under the same epoch"
                process.holds[page] = self.epochs_granted[page] = epoch
                self.history.append((page, epoch))

    def attached(self, slot: int) -> Process | None:
        process = self.processes.get(slot)
        return process if process is not None and process.connection is not None else None

    def words(self, chosen: list[int]) -> list[Owned]:
        """A choice among all pages that any engine ever held, the last ones first: mostly stale words."""
        return list(dict.fromkeys(self.history[-1 - i % len(self.history)] for i in chosen if self.history))

    @rule(slot=slots, chosen=picks)
    def write(self, slot, chosen):
        process = self.attached(slot)
        if process is not None:
            pages = self.words(chosen)
            self.pool.write(process.connection, pages)

    @rule(slot=slots, prompt=prompts)
    def save(self, slot, prompt):
        """The usual life: ask for pages, seal a prompt in them, hand it off."""
        self.need(slot, 4)
        self.seal(slot, prompt, 0, [])
        self.handoff_ready(slot, prompt, "h1", 500)

    @rule(slot=slots, prompt=prompts, first=st.sampled_from([0, 0, 1, 2]), chosen=picks)
    def seal(self, slot, prompt, first, chosen):
        """The engine writes blocks into pages that it holds and seals them; some of its words are stale."""
        process = self.attached(slot)
        if process is None:
            return
        pages = [*sorted(process.holds.items())[:3], *self.words(chosen)]
        pages = list(dict.fromkeys(pages))[: len(prompt) - first]
        mine = self.engines().attached[process.connection].held
        for (page, epoch), block_hash in zip(pages, prompt[first:], strict=False):
            if process.holds.get(page) == epoch:
                self.bytes[page] = block_hash
                if page in mine:
                    del process.holds[page]
        self.pool.seal(process.connection, pages, prompt, first)
        self.collect()

    @rule(slot=slots, chosen=picks)
    def give_back(self, slot, chosen):
        process = self.attached(slot)
        if process is not None:
            pages = self.words(chosen)
            for page, epoch in pages:
                if (
                    process.holds.get(page) == epoch
                    and page in self.engines().attached[process.connection].held
                ):
                    del process.holds[page]
            self.pool.give_back(process.connection, pages)
            self.collect()

    @rule(slot=slots, count=st.integers(-1, 5))
    def need(self, slot, count):
        process = self.attached(slot)
        if process is not None:
            self.pool.need(process.connection, count)
            self.collect()

    @rule(slot=slots)
    def lose_connection(self, slot):
        """The process lives on, unseen."""
        process = self.attached(slot)
        if process is not None:
            connection, process.connection = process.connection, None
            self.pool.closed(connection)
            self.collect()

    @rule(slot=slots)
    def linger(self, slot):
        """A process without a connection stays, while another one becomes the same instance."""
        process = self.processes.get(slot)
        if process is not None and process.connection is None:
            self.processes[1_000 + process.number] = self.processes.pop(slot)

    @rule()
    def lingering_process_scribbles_and_dies(self):
        slot = max(self.processes, default=0)
        if slot >= 1_000:
            self.scribble(slot)
            self.die(slot, closed_first=False, really=True)

    @rule(slot=slots)
    def detach(self, slot):
        process = self.attached(slot)
        if process is not None:
            process.holds.clear()
            connection, process.connection = process.connection, None
            self.pool.say(connection, Detach())
            self.collect()

    @rule(slot=slots)
    def scribble(self, slot):
        """A process writes what it believes to be its own pages, whatever the pool thinks."""
        process = self.processes.get(slot)
        for page in process.holds if process else ():
            self.bytes[page] = "scribble"

    @rule(slot=slots, closed_first=st.booleans(), really=seldom)
    def die(self, slot, closed_first, really):
        if slot not in self.processes or not really:
            return
        process = self.processes.pop(slot)
        if closed_first and process.connection is not None:
            self.pool.closed(process.connection)
        self.pool.dead(process.number)
        self.collect()

    # -- readers ----------------------------------------------------------------------------------

    @rule(instance=st.sampled_from(["engine-0", "engine-1", "tool"]))
    @precondition(lambda self: len(self.clients) < 3)
    def open_client(self, instance):
        client = self.number()
        self.clients.add(client)
        self.pool.client(client, instance)

    @rule()
    @precondition(lambda self: self.clients)
    def close_client(self):
        client = min(self.clients)
        self.clients.remove(client)
        self.leases = [held for held in self.leases if held.client != client]
        self.pool.closed(client)
        self.collect()

    @rule(slot=slots, prompt=prompts, name=st.sampled_from(["h1", "h2"]), ttl_ms=st.sampled_from([1, 500]))
    def handoff_ready(self, slot, prompt, name, ttl_ms):
        process = self.attached(slot)
        if process is not None:
            self.pool.ready(process.connection, name, prompt, ttl_ms)
            self.learn()

    @rule(
        prompt=prompts,
        handoff=st.sampled_from(["", "h1", "h2"]),
        wait_ms=st.sampled_from([0, 50]),
        ttl_ms=st.sampled_from([10_000, 10_000, 100, 1]),
    )
    @precondition(lambda self: self.clients)
    def acquire(self, prompt, handoff, wait_ms, ttl_ms):
        self.asked[self.pool.calls + 1] = prompt
        self.pool.acquire(max(self.clients), prompt, handoff=handoff, wait_ms=wait_ms, ttl_ms=ttl_ms)
        self.learn()

    def learn(self):
        """Readers read their answers: every promised page must hold the block that its hash names."""
        for client in self.clients:
            for message in self.pool.sent.pop(client, ()):
                if not getattr(message, "num_blocks", 0) or not getattr(message, "lease_id", ""):
                    continue
                pages = list(zip(u32_list(message.pages), u64_list(message.epochs), strict=True))
                for (page, epoch), block_hash in zip(pages, self.asked[message.call_id], strict=False):
                    assert self.pool.words[page] == sealed_word(Epoch(epoch))
                    assert self.bytes[page] == block_hash, "the page holds another block"
                lease = self.pool.pool.leases.leases[message.lease_id]
                self.leases.append(Held(message.lease_id, client, pages, lease.expires_at_ms))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.leases)
    def release(self, which):
        held = self.leases.pop(which % len(self.leases))
        self.pool.release(held.client, held.lease_id)
        self.collect()

    @rule(prompt=prompts, everything=seldom)
    @precondition(lambda self: self.clients)
    def delete(self, prompt, everything):
        self.pool.say(min(self.clients), Delete(call_id=0, hashes=b"" if everything else b"".join(prompt)))
        self.collect()

    @rule(by_ms=st.sampled_from([1, 40, 600]))
    def time_passes(self, by_ms):
        self.leases = [x for x in self.leases if x.expires_at_ms > self.pool.now_ms + by_ms]
        self.pool.advance(by_ms)
        self.learn()
        self.leases = [x for x in self.leases if x.expires_at_ms > self.pool.now_ms]
        self.collect()

    @rule(really=seldom)
    def mempool_dies(self, really):
        """The next one has its own memory and a larger boot generation; everyone connects anew."""
        if not really:
            return
        self.boot = Epoch(max([self.boot, *self.epochs_seen.values()]) + 1)
        now_ms = self.pool.now_ms
        self.pool = Harness(NUM_PAGES, self.boot)
        self.pool.now_ms = now_ms
        self.clients, self.leases, self.bytes = set(), [], {}
        for process in self.processes.values():
            process.connection = None
            process.holds.clear()

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def counts_sum_to_the_total_and_match_the_words(self):
        if self.engines() is None:
            return
        counts = self.pool.pool.status().pages_by_state
        assert sum(counts.values()) == NUM_PAGES == len(self.pool.words)
        for state in PageState:
            assert counts[state.name.lower()] == sum(self.pool.state(p) is state for p in self.pool.words)

    @invariant()
    def epochs_never_shrink(self):
        for page, word in self.pool.words.items():
            epoch, _ = unpack_word(word)
            assert epoch >= self.boot
            assert epoch >= self.epochs_seen.get(page, 0)
            self.epochs_seen[page] = epoch

    @invariant()
    def no_pinned_page_changes_its_epoch_or_bytes(self):
        for held in self.leases:
            for page, epoch in held.pages:
                assert self.pool.words[page] == sealed_word(Epoch(epoch))
                assert isinstance(self.bytes[page], bytes)

    @invariant()
    def index_names_exactly_the_sealed_pages(self):
        entries = list(self.pool.pool.index.entries())
        sealed = {p for p in self.pool.words if self.pool.state(p) is PageState.SEALED}
        assert {e.page for e in entries} == sealed
        assert len(entries) == len(sealed)
        for entry in entries:
            assert self.bytes[entry.page] == entry.block_hash

    @invariant()
    def pins_are_those_of_leases_and_handoffs(self):
        expected: dict[int, int] = {}
        for entries in self.pool.pool.leases.pins():
            for entry in entries:
                expected[entry.page] = expected.get(entry.page, 0) + 1
        found = {e.page: e.pins for e in self.pool.pool.index.entries() if e.pins}
        assert found == expected
        assert self.pool.pool.index.num_pinned == len(expected)

    @invariant()
    def no_page_is_reused_while_a_process_may_still_write_it(self):
        for process in self.processes.values():
            for page, epoch in process.holds.items():
                found, state = unpack_word(self.pool.words[page])
                assert found == epoch
                assert state in (PageState.GRANTED, PageState.WRITING, PageState.QUARANTINED)

    @invariant()
    def a_page_has_one_holder_named_by_its_state(self):
        engines = self.engines()
        if engines is None:
            return
        held = [page for engine in engines.attached.values() for page in engine.held]
        assert len(held) == len(set(held))
        writable = {
            p for p in self.pool.words if self.pool.state(p) in (PageState.GRANTED, PageState.WRITING)
        }
        assert set(held) == writable
        quarantined = {p for p in self.pool.words if self.pool.state(p) is PageState.QUARANTINED}
        assert {p for lost in engines.lost for p in lost.engine.held} == quarantined

    def teardown(self):
        """Everything returns after all die."""
        for slot in list(self.processes):
            self.die(slot, closed_first=False, really=True)
        for client in list(self.clients):
            self.pool.closed(client)
        self.pool.advance(MAX_TTL_MS)
        self.pool.client(999_999)
        self.pool.say(999_999, Delete(call_id=1))
        assert self.engines() is None or self.pool.counts() == {"free": NUM_PAGES}
        super().teardown()


TestMempoolModel = MempoolModel.TestCase
TestMempoolModel.settings = settings(
    max_examples=examples(300),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
