"""Memory on its way to the system and back, against a model: two engines of two ranks each, which die and hang.

The model keeps what every living process maps and what the system has given. Whatever comes in which order: nothing
is taken that a living process maps, no engine is granted a page that one of its ranks does not map, and pages in all
states sum to the total (invariant 4).
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.mempool.core.space import Plan
from shared.ids import Epoch, InstanceId
from shared.kv.page import PageState, unpack_word
from shared.wire import mempool as wire
from tests.support.examples import examples
from tests.unit.mempool_harness import BOOT, chain, page_lists
from tests.unit.mempool_release_rig import GPU_DESCRIPTION, PAGES_PER_SLAB, UNIT_BYTES, ReleaseRig

NUM_SLABS = 4
engines = st.integers(0, 1)
units = st.integers(1, 5)
USABLE = (PageState.GRANTED, PageState.WRITING, PageState.SEALED)


class ReleaseModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.rig = ReleaseRig(NUM_SLABS)
        self.next_number = 10
        self.ranks: dict[int, list[int]] = {0: [], 1: []}  # engine -> connections of its ranks
        self.engine: dict[int, int] = {}  # engine -> its connection
        self.round = 0

    def number(self) -> int:
        self.next_number += 1
        return self.next_number

    @initialize()
    def begin(self):
        for which in (0, 1):
            self.start(which)
            self.all_ready(which)

    @rule(which=engines)
    def start(self, which):
        if self.ranks[which]:
            return
        for number in (0, 1):
            connection = self.number()
            self.ranks[which].append(connection)
            self.rig.rank(connection, number, f"e{which}")

    @rule(which=engines)
    def all_ready(self, which):
        """Its ranks have mapped everything; then its core attaches."""
        if not self.ranks[which] or which in self.engine:
            return
        for connection in self.ranks[which]:
            if not self.rig.ranks[connection].ready:
                self.rig.ready(connection)
        self.engine[which] = self.number()
        self.rig.pages_engine(self.engine[which], quota=8, instance=f"e{which}", process=self.engine[which])

    @rule(which=engines, count=st.integers(1, 3))
    def save(self, which, count):
        connection = self.engine.get(which)
        if connection is None:
            return
        count = min(count, len(self.rig.granted[connection]))
        self.round += 1
        if count:
            self.rig.save(connection, chain(*(f"{self.round}-{i}" for i in range(count))))

    @rule(which=engines, share=st.integers(1, 3))
    def unpin(self, which, share):
        connection = self.engine.get(which)
        if connection is None:
            return
        table = self.rig.pool.memory.table
        pinned = sorted(self.rig.pool.memory.engines.attached[connection].pinned)[::share]
        self.rig.say(connection, wire.Unpin(**page_lists([(p, table.epochs[p]) for p in pinned])))

    @rule(count=units, wait_ms=st.sampled_from([0, 50]))
    def press(self, count, wait_ms):
        self.rig.press(count * UNIT_BYTES, wait_ms=wait_ms)

    @rule(count=st.integers(0, 3), wait_ms=st.sampled_from([0, 50]))
    def regain(self, count, wait_ms):
        self.rig.regain(count * UNIT_BYTES, wait_ms=wait_ms)

    @rule(keep=st.frozensets(st.integers(0, NUM_SLABS * PAGES_PER_SLAB - 1), max_size=2))
    @precondition(lambda self: self.rig.vacates)
    def vacate(self, keep):
        self.rig.vacate(keep)

    @rule(which=engines, rank=st.integers(0, 1))
    def hear(self, which, rank):
        if len(self.ranks[which]) > rank:
            self.rig.hear(self.ranks[which][rank])

    @rule(fails=st.booleans(), has=st.integers(0, 3))
    @precondition(lambda self: self.rig.pending)
    def system(self, fails, has):
        self.rig.system(has=has)

    @rule(by_ms=st.sampled_from([10, 60]))
    def time(self, by_ms):
        self.rig.advance(by_ms)

    @rule(which=engines)
    def die(self, which):
        """Connections end, and the proof of death comes for one process after the other."""
        connections = [*self.ranks[which], *([self.engine.pop(which)] if which in self.engine else [])]
        self.ranks[which] = []
        for connection in connections:
            self.rig.closed(connection)
        for connection in connections:
            self.rig.ranks.pop(connection, None)
            self.rig.dead(connection)

    @rule()
    def restart_mempool(self):
        """A successor goes on with the words; everybody attaches again, with nothing in hand."""
        old = self.rig
        memory = old.pool.memory
        words = [old.words[page] for page in range(memory.table.num_pages)]
        new = ReleaseRig(NUM_SLABS, boot=Epoch(max(word >> 8 for word in words) + 1))
        new.memory, new.now_ms = set(old.memory), old.now_ms
        for unit in range(NUM_SLABS):  # memory that was made and of which nobody was told is dropped
            if all(unpack_word(words[p])[1] is PageState.RELEASED for p in old.pages_of(unit)):
                new.memory.discard(unit)
        processes = sorted(old.ranks)
        planned = Plan(len(words), memory.page_bytes, 2, memory.pages_per_slab)
        new.words = dict(enumerate(words))
        new.ranks = dict(old.ranks)
        for rank in new.ranks.values():
            rank.ready = False
            rank.inbox.clear()
        new.run(
            new.pool.adopt(
                GPU_DESCRIPTION, planned, words, b"", memory_id=BOOT, processes=processes, engines=[],
                instances=[InstanceId("x")] * len(processes), mappers=processes,
            )
        )  # fmt: skip
        self.rig, self.engine = new, {}
        for which, connections in self.ranks.items():
            mapped = [set(new.ranks[connection].slabs) for connection in connections]
            again = []
            for number, slabs in enumerate(mapped):
                connection = connections[number]
                new.rank(connection, number, f"e{which}", process=connection)
                new.ranks[connection].slabs = slabs  # it maps what it mapped
                again.append(connection)
            self.ranks[which] = again

    @invariant()
    def pages_sum_to_the_total(self):
        memory = self.rig.pool.memory
        if memory is not None:
            assert sum(memory.table.by_state().values()) == NUM_SLABS * PAGES_PER_SLAB

    @invariant()
    def what_is_in_use_has_memory_and_every_rank_that_said_so_maps_it(self):
        rig = self.rig
        for page, word in rig.words.items():
            if unpack_word(word)[1] in (*USABLE, PageState.FREE):
                unit = page // PAGES_PER_SLAB
                assert unit in rig.memory, f"page {page} has no memory"
                for rank in rig.ranks.values():
                    assert unit in rank.slabs or not rank.ready, f"page {page} is not mapped everywhere"

    @invariant()
    def released_memory_is_the_systems(self):
        rig = self.rig
        coming = {unit for action in rig.pending for unit in action.units}
        for page, word in rig.words.items():
            if unpack_word(word)[1] is PageState.RELEASED and page // PAGES_PER_SLAB not in coming:
                assert page // PAGES_PER_SLAB not in rig.memory

    def teardown(self):
        """Left alone, everything ends: every call is answered, nothing is on its way."""
        rig = self.rig
        if rig.pool.memory is None:
            return
        for which in (0, 1):
            self.all_ready(which)
        rig.settle()
        rig.advance(100_000)
        rig.settle()
        releases = rig.pool.releases
        assert not any((releases.calls, releases.vacating, releases.leaving, releases.coming))


TestReleaseModel = ReleaseModel.TestCase
TestReleaseModel.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
