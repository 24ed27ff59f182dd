"""What a mempool tells the prompt tree: every full block that is indexed, in reach of whom, and retracted in time."""

import asyncio
import random
from typing import ClassVar

from services.mempool import tree
from shared.ids import InstanceId
from shared.kv.page import PageState
from tests.unit.mempool_harness import Harness, chain
from tests.unit.test_mempool_dram import ABCD, WXYZ, number_of_dram, spaces, two_prompts, unpin
from tests.unit.test_mempool_spaces import DECODE, PREFILL, Spaces, acquire

X = InstanceId(f"i{PREFILL}")


class Watch:
    """Radix Watch that keeps what it was told."""

    def __init__(self, pool):
        self.pool = pool
        self.told = {entry.block_hash for entry in pool.index.entries()}
        self.states = []  # of pages, when their block was retracted
        pool.index.watch = self

    def stored(self, entries):
        for entry in entries:
            assert entry.block_hash not in self.told
            self.told.add(entry.block_hash)

    def removed(self, entries):
        for entry in entries:
            self.told.remove(entry.block_hash)
            self.states.append(self.pool.memory.table.states[entry.page])


def test_all_that_is_indexed_is_told_and_retracted_before_its_page_can_be_free():
    rng = random.Random(3)
    rig = Harness(num_pages=12)
    rig.engine(1, quota=4)
    rig.client(2)
    watch = Watch(rig.pool)
    held = []
    for _ in range(300):
        step = rng.randrange(4)
        if step == 0 and rig.granted[1]:
            hashes = chain(*rng.sample(range(8), rng.randint(1, min(4, len(rig.granted[1])))))
            rig.save(1, hashes)
        elif step == 1:
            rig.need(1, 4)
        elif step == 2:
            got = rig.acquire(2, chain(*rng.sample(range(8), 3)))
            if got is not None and got.lease_id:
                held.append(got.lease_id)
        elif held:
            rig.release(2, held.pop())
        assert watch.told == set(rig.pool.index.hashes)
    rig.pool.delete([])
    assert watch.told == set(rig.pool.index.hashes)
    assert len(watch.states) > 20
    assert set(watch.states) == {PageState.SEALED}


def test_a_block_that_leaves_a_space_is_told_by_the_host_memory_behind_it():
    rig = spaces()
    dram = number_of_dram(rig)
    watches = {number: Watch(pool) for number, pool in rig.core.pools.items()}
    pages = two_prompts(rig)
    assert watches[0].told == {*ABCD, *WXYZ}
    unpin(rig, pages[2:4])
    assert watches[0].told == {*ABCD, *WXYZ}  # until its copy is complete
    rig.copied()
    assert watches[0].told == {*ABCD[:2], *WXYZ}
    assert watches[dram].told == set(ABCD[2:])
    acquire(rig, ABCD)
    rig.give_back(PREFILL, rig.take(PREFILL, 2))
    rig.copied()
    assert watches[0].told == {*ABCD, *WXYZ}


def test_a_space_is_in_reach_of_its_engines_and_says_what_lies_behind_it():
    rig = spaces()
    dram = number_of_dram(rig)
    prefill, decode = InstanceId(f"i{PREFILL}"), InstanceId(f"i{DECODE}")
    first = rig.core.audience.now(rig.now_ms)
    assert (first[0].behind, first[0].is_dram) == (dram, False)
    assert (first[dram].behind, first[dram].is_dram, first[dram].media) == (0, True, {})
    assert set(first[0].media) == {prefill}
    rig.worker(DECODE, "cpu:1")
    second = rig.core.audience.now(rig.now_ms)
    (other,) = set(second) - set(first)
    assert set(second[other].media) == {decode}
    assert second[other].behind == dram
    assert prefill not in second[other].media


def test_engines_that_work_in_the_pages_have_them_as_their_own_and_copying_ones_behind_a_copy():
    rig = spaces()
    engine = rig.core.pools[0].memory.engines.of_instance(InstanceId(f"i{PREFILL}"))[0]
    engine.works_in_pages = True
    assert rig.core.audience.now(rig.now_ms)[0].media == {engine.instance: "hbm"}
    engine.works_in_pages = False
    assert rig.core.audience.now(rig.now_ms)[0].media == {engine.instance: "dram"}


def test_a_space_outlives_its_engine_and_stays_in_its_instances_reach():
    rig = spaces()
    watch = Watch(rig.core.pools[0])
    two_prompts(rig)
    before = rig.core.audience.now(rig.now_ms)[0]
    leaves(rig)
    assert watch.told == {*ABCD, *WXYZ}
    after = rig.core.audience.now(rig.now_ms)[0]
    assert (after.media, after.behind) == (before.media, before.behind)


def leaves(rig):
    for connection in (PREFILL, 100 + PREFILL):
        rig.run(rig.core.on_closed(connection, rig.now_ms))
    rig.run(rig.core.on_process_dead(PREFILL, rig.now_ms))


def test_an_engine_that_left_is_remembered_until_it_attaches_again():
    rig = spaces()
    assert rig.core.audience.now(rig.now_ms)[0].remembered == set()
    leaves(rig)
    assert rig.core.audience.now(rig.now_ms)[0].media == {X: "hbm"}
    assert rig.core.audience.now(rig.now_ms)[0].remembered == {X}
    rig.worker(PREFILL, "cpu:0")
    assert X in rig.core.audience.now(rig.now_ms)[0].media
    assert rig.core.audience.now(rig.now_ms)[0].remembered == set()


def test_who_left_is_forgotten_when_a_deserted_space_would_be_also_where_others_work_on():
    rig = spaces(space_idle_ms=60_000)
    rig.worker(DECODE, "cpu:0")
    others = InstanceId(f"i{DECODE}")
    assert set(rig.core.audience.now(rig.now_ms)[0].media) == {X, others}
    leaves(rig)
    assert rig.core.audience.now(rig.now_ms)[0].remembered == {X}
    rig.advance(59_999)
    assert rig.core.audience.now(rig.now_ms)[0].remembered == {X}
    rig.advance(1)
    assert set(rig.core.audience.now(rig.now_ms)[0].media) == {others}
    rig.worker(PREFILL, "cpu:0")
    assert set(rig.core.audience.now(rig.now_ms)[0].media) == {X, others}
    leaves(rig)
    assert rig.core.audience.now(rig.now_ms)[0].remembered == {X}, "time begins anew"


async def test_the_entries_of_a_space_that_has_ended_are_withdrawn(monkeypatch):
    change = asyncio.Event()

    class Publisher:
        owners: ClassVar[set[str]] = set()

        def __init__(self, *_, owner, **__):
            self.owner = owner

        def open(self):
            change.set()
            self.owners.add(self.owner.rpartition("/")[2])

        def stored(self, hashes): ...

        def set_row(self, row): ...

        async def close(self):
            change.set()
            self.owners.remove(self.owner.rpartition("/")[2])

    async def told(wanted):
        while Publisher.owners != wanted:
            change.clear()
            await asyncio.wait_for(change.wait(), 30)

    monkeypatch.setattr(tree, "PromptTreePublisher", Publisher)
    monkeypatch.setattr(tree, "REFRESH_S", 0.001)
    rig = Spaces(max_spaces=2)
    for worker in (1, 2):
        rig.worker(worker, f"cpu:{worker}")
    publishers = tree.TreePublishers("redis://", "m", "here:1", rig.core)
    publishers.open()
    await told({"0", "1"})
    rig.give_back(2, rig.granted.pop(2))
    for connection in (2, 102):
        rig.closed(connection)
    rig.dead(2)
    rig.worker(3, "cpu:3")
    await told({"0", "2"})
    await publishers.close()
    assert not Publisher.owners
