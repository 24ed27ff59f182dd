"""Copies of pages between spaces of one mempool: real memory, real threads, host memory only."""

import asyncio
import os
import threading

import numpy as np
import pytest

from services.mempool import mover
from services.mempool.memory import PoolMemory
from services.mempool.mover import Mover, MoverBusy, MoverClosed
from services.mempool.mover_regions import HostRegion
from shared.ids import Epoch
from shared.transfer.errors import TransferRefused
from shared.transfer.reslice import KvEnd
from tests.support.gate_copier import Gate, overdue

LONG_MS = 2_500  # in which a copy is under way, also on a machine that stands still for a while
PAGE, NUM, RANKS = 12_345, 48, 2  # the second rank's pages begin inside a page of the kernel's


class Rig:
    """A mover, spaces that hold numbers of their own everywhere, and what it said."""

    def __init__(self, **how):
        self.settled = []
        self.memories = {}
        self.mover = Mover(lambda space, pages: self.settled.append((space, pages)), **how)

    def make(self, number, *, num_ranks=RANKS, page_bytes=PAGE):
        memory = PoolMemory(NUM, page_bytes, Epoch(1), num_ranks)
        content = np.random.default_rng(number).integers(0, 256, num_ranks * NUM * page_bytes, np.uint8)
        os.pwrite(memory.page_fd, content.tobytes(), 0)
        self.memories[number] = memory
        return [
            HostRegion(memory.page_fd, rank * NUM * page_bytes, page_bytes, NUM) for rank in range(num_ranks)
        ]

    def add(self, number, end=None, **how):
        self.mover.add_space(number, self.make(number, **how), end)

    def pages(self, number):
        """uint8 [ranks, pages, page_bytes], as it is now."""
        memory = self.memories[number]
        shape = (memory.num_ranks, NUM, memory.page_bytes)
        return np.frombuffer(os.pread(memory.page_fd, int(np.prod(shape)), 0), np.uint8).reshape(shape)

    def copy(self, copy_id, target, targets, parts, timeout_ms=60_000, **how):
        """A future of the copy's CopyDone; a second on_done of one copy fails the test."""
        done = asyncio.get_running_loop().create_future()
        self.mover.copy(copy_id, target, targets, parts, timeout_ms, done.set_result, **how)
        return done

    def close(self, timeout_s=30.0):
        idle = self.mover.close(timeout_s)
        for memory in self.memories.values():
            memory.close()
        return idle


@pytest.fixture
async def rig():
    made = []

    def make(**how):
        made.append(Rig(**how))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_pages_of_two_spaces_arrive_on_every_rank_and_nothing_else_changes(rig):
    it = rig()
    for number in (1, 2, 3):
        it.add(number)
    before = {number: it.pages(number).copy() for number in (1, 2, 3)}
    done = await it.copy(7, 3, [40, 1, 2, 9], [(1, [5, 47]), (2, [0, 9])])
    assert done.ok, done
    assert (done.copy_id, done.num_bytes, done.path) == (7, 4 * RANKS * PAGE, "shm")
    want = before[3]
    want[:, [40, 1]], want[:, [2, 9]] = before[1][:, [5, 47]], before[2][:, [0, 9]]
    assert np.array_equal(it.pages(3), want)
    for number in (1, 2):
        assert np.array_equal(it.pages(number), before[number])
    assert it.mover.status()["paths"]["shm"]["copies"] == 1


async def until(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the condition is another thread's state
            await asyncio.sleep(0.002)


async def test_a_copy_that_never_ends_leaves_its_pages_quarantined_until_it_has_settled(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    done = await overdue(it.copy, 1, 2, [3, 4], [(1, [0, 1])])
    assert (done.code, done.quarantined) == ("transfer.timeout", (3, 4))
    with pytest.raises(TransferRefused, match="quarantined"):
        it.copy(2, 2, [4, 5], [(1, [0, 1])])
    assert it.mover.status()["quarantined_pages"] == 2
    assert it.settled == []
    gate.open()
    await until(lambda: it.settled)
    assert sorted(page for space, pages in it.settled for page in pages if space == 2) == [3, 4]
    assert (await it.copy(3, 2, [3, 4, 5], [(1, [7, 8, 9])])).ok
    assert np.array_equal(it.pages(2)[:, [3, 4, 5]], it.pages(1)[:, [7, 8, 9]])


async def test_a_page_comes_back_only_when_no_rank_can_be_written(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    assert (await overdue(it.copy, 1, 2, [3], [(1, [0])])).quarantined == (3,)
    gate.open(1)
    await asyncio.sleep(0.1)
    assert it.settled == []
    gate.open(1)
    await until(lambda: it.settled)
    assert it.settled == [(2, (3,))]


async def test_a_copy_is_answered_even_when_a_thread_hangs_in_a_call(rig, monkeypatch):
    monkeypatch.setattr(mover, "GRACE_S", 0.05)
    gate = Gate(is_open=True)
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    gate.comes_back.clear()
    first, second = (
        it.copy(1, 2, [3], [(1, [0])], timeout_ms=LONG_MS),
        it.copy(2, 2, [4], [(1, [0])], timeout_ms=LONG_MS + 200),
    )
    assert [(done.code, done.quarantined) for done in (await first, await second)] == [
        ("transfer.timeout", (3,)),
        ("transfer.timeout", (4,)),
    ]
    with pytest.raises(TransferRefused, match="quarantined"):
        it.copy(3, 2, [3], [(1, [0])])
    assert it.settled == []
    assert not it.mover._is_idle(), "closing now would have to leave everything mapped"
    gate.comes_back.set()
    await until(lambda: len(it.settled) == 2)
    assert sorted(it.settled) == [(2, (3,)), (2, (4,))]
    assert (await it.copy(3, 2, [3, 4], [(1, [0, 1])])).ok


async def test_a_copier_that_refuses_fails_the_copy_and_frees_its_pages(rig):
    gate = Gate(is_open=True)
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    gate.refuse = RANKS
    done = await it.copy(1, 2, [3], [(1, [0])])
    assert (done.ok, done.code, done.quarantined) == (False, "transfer.failed", ())
    assert "refused by the test" in done.reason
    assert (await it.copy(2, 2, [3], [(1, [0])])).ok
    assert it.mover.status()["failures"] == {"transfer.failed": 1}


async def test_one_rank_that_fails_fails_the_copy_after_the_others_have_ended(rig):
    gate = Gate(is_open=True)
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    gate.refuse = 1
    done = await it.copy(1, 2, [3], [(1, [0])])
    assert (done.code, done.quarantined) == ("transfer.failed", ())
    gate.is_open, gate.refuse = False, 1
    done = await overdue(it.copy, 2, 2, [3], [(1, [0])])
    assert (done.code, done.quarantined) == ("transfer.failed", (3,))
    gate.open()
    await until(lambda: it.settled)


async def test_two_copies_never_write_one_page_at_a_time(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    first = it.copy(1, 2, [3, 4], [(1, [0, 1])])
    for _ in range(2):  # before it has begun, and while it runs
        with pytest.raises(TransferRefused, match="in a copy"):
            it.copy(2, 2, [4], [(1, [2])])
        await until(lambda: len(gate.held) == RANKS)
    gate.open(1)
    await asyncio.sleep(0.05)
    with pytest.raises(
        TransferRefused, match="in a copy"
    ):  # one rank has ended: the page is still the first's
        it.copy(2, 2, [4], [(1, [2])])
    gate.open()
    assert (await first).ok
    assert np.array_equal(it.pages(2)[:, [3, 4]], it.pages(1)[:, [0, 1]])


async def test_spaces_come_while_others_are_copied_and_a_copy_waits_for_its_own(rig, monkeypatch):
    gate = Gate()
    it = rig(host_copier=gate)
    mapping = threading.Event()
    real = it.mover._mapper.map

    def slow(number, regions, end):
        if number == 3:
            mapping.wait(60)
        return real(number, regions, end)

    monkeypatch.setattr(it.mover._mapper, "map", slow)
    it.add(1)
    it.add(2)
    running = it.copy(1, 2, [0], [(1, [0])])
    await until(lambda: len(gate.held) == RANKS)
    it.add(3)
    waits, is_late = it.copy(2, 3, [0], [(1, [1])]), it.copy(3, 3, [1], [(1, [1])], timeout_ms=50)
    behind = it.copy(4, 2, [1], [(1, [2])])
    gate.open()
    assert (await running).ok
    assert (await behind).ok, "a copy between mapped spaces does not wait for one that is being mapped"
    late = await is_late
    assert (late.code, late.quarantined) == ("transfer.timeout", ())
    assert it.mover.status()["waiting"] == 1
    assert not it.mover.is_mapped(3)
    assert not waits.done()
    mapping.set()
    assert (await waits).ok
    assert np.array_equal(it.pages(3)[:, 0], it.pages(1)[:, 1])
    assert not np.array_equal(it.pages(3)[:, 1], it.pages(1)[:, 1])


async def test_a_space_that_cannot_be_mapped_fails_its_copies_alone(rig):
    it = rig()
    it.add(1)
    it.add(2)
    short = [HostRegion(each.fd, each.offset_bytes + NUM * PAGE, PAGE, NUM) for each in it.make(3)]
    it.mover.add_space(3, short)
    done = await it.copy(1, 3, [0], [(1, [0])])
    assert (done.code, done.quarantined) == ("transfer.path_unavailable", ())
    assert "the pages end at" in done.reason
    assert "failed" in it.mover.status()["spaces"][3]
    assert (await it.copy(2, 2, [0], [(1, [0])])).ok


async def test_what_cannot_be_meant_is_refused_at_once_and_too_much_as_well(rig):
    gate = Gate()
    it = rig(host_copier=gate, max_copies=2)
    it.add(1)
    it.add(2)
    for targets, parts in (
        ([], []),
        ([0], [(1, [0, 1])]),
        ([0, 1], [(1, [0])]),
        ([0], [(9, [0])]),
        ([0], [(1, [0]), (1, [])]),
        (list(range(17)), [(1, [page]) for page in range(17)]),
    ):
        with pytest.raises(TransferRefused):
            it.copy(1, 2, targets, parts)
    with pytest.raises(TransferRefused):
        it.add(1)
    with pytest.raises(TransferRefused):
        it.mover.add_space(4, [])
    first = it.copy(1, 2, [0], [(1, [0])])
    with pytest.raises(TransferRefused, match="already"):
        it.copy(1, 2, [1], [(1, [1])])
    second = it.copy(2, 2, [1], [(1, [NUM])])
    with pytest.raises(MoverBusy):
        it.copy(3, 2, [2], [(1, [2])])
    assert (await second).code == "transfer.refused"
    with pytest.raises(TransferRefused, match="different"):
        it.copy(3, 2, [2, 2], [(1, [2, 3])])
    gate.open()
    assert (await first).ok


async def test_many_copies_at_once_all_end_well_and_in_place(rig):
    it = rig()
    for number in (1, 2, 3):
        it.add(number)
    random = np.random.default_rng(5)
    before = it.pages(1).copy()
    copies, refused = [], 0
    for copy_id in range(400):
        target, place, page = 2 + copy_id % 2, int(random.integers(NUM)), int(random.integers(NUM))
        try:
            copies.append((target, place, page, it.copy(copy_id, target, [place], [(1, [page])])))
        except TransferRefused:
            refused += 1  # two of them into one page at a time
        if copy_id % 50 == 0:
            await asyncio.sleep(0.002)
    last = {}
    for target, place, page, future in copies:
        done = await future
        assert done.ok, done
        last[target, place] = page
    assert refused
    assert len(last) > NUM
    for (target, place), page in last.items():
        assert np.array_equal(it.pages(target)[:, place], before[:, page])
    assert it.mover.status()["copies"] == it.mover.status()["quarantined_pages"] == 0


async def test_a_space_goes_when_its_copies_have_ended_and_settled(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    done = await overdue(it.copy, 1, 2, [3], [(1, [0])])
    assert done.quarantined == (3,)
    gone = []
    it.add(5)
    it.add(6)
    running = it.copy(5, 6, [3], [(5, [0])])
    await until(lambda: len(gate.held) == 2 * RANKS)
    it.mover.remove_space(2, lambda: gone.append(2))
    it.mover.remove_space(5, lambda: gone.append(5))
    with pytest.raises(TransferRefused):
        it.copy(2, 2, [4], [(1, [0])])
    await asyncio.sleep(0.05)
    assert gone == []
    gate.open()
    assert (await running).ok
    await until(lambda: sorted(gone) == [2, 5])
    assert it.settled == [(2, (3,))]
    it.mover.add_space(2, it.make(4))
    assert (await it.copy(3, 2, [3], [(1, [0])])).ok
    assert sorted(it.mover.status()["spaces"]) == [1, 2, 6]


async def test_ranks_of_unequal_tensor_parallelism_are_cut_anew(rig):
    """Heads of 64 B x K and V: HND pages of 2 layers, 4 heads, 3 tokens; as TP 1, 2 and 4."""
    it = rig()
    one = KvEnd(num_layers=2, num_kv_heads=4, block_tokens=3, row_bytes=64)
    ends = {tp: KvEnd(2, 4, 3, 64, tp_size=tp) for tp in (1, 2, 4)}
    page_bytes = {tp: one.block_bytes(0) // tp for tp in ends}
    for tp, number in [(tp, tp + n) for tp in ends for n in (0, 10)]:
        it.add(number, ends[tp], num_ranks=tp, page_bytes=page_bytes[tp])
    for tp in (2, 4):
        there = await it.copy(tp, tp, [7, 8], [(1, [3, 4])])
        assert there.ok, there
        heads = it.pages(1)[0, [3, 4]].reshape(2, 2, tp, -1)  # page, layer, rank, its heads
        assert np.array_equal(it.pages(tp)[:, [7, 8]].reshape(tp, 2, 2, -1), heads.transpose(2, 0, 1, 3))
        back = await it.copy(10 + tp, 11, [tp, 30 + tp], [(tp, [7, 8])])
        assert back.ok, back
        assert np.array_equal(it.pages(11)[0, [tp, 30 + tp]], it.pages(1)[0, [3, 4]])
    assert (await it.copy(99, 14, [0], [(2, [7])])).ok
    assert (await it.copy(100, 11, [0], [(14, [0])])).ok
    assert np.array_equal(it.pages(11)[0, 0], it.pages(1)[0, 3])


async def test_pages_on_loan_to_another_model_are_copied_as_they_are(rig):
    it = rig()
    it.add(1, KvEnd(2, 4, 3, 64), num_ranks=1)
    it.add(2, KvEnd(3, 2, 3, 64), num_ranks=1, page_bytes=PAGE + 7)
    for copy in ((1, 2, [5, 6], [(1, [3, 4])]), (2, 1, [9, 8], [(2, [5, 6])])):
        assert (await it.copy(*copy, raw=True)).ok
    assert np.array_equal(it.pages(1)[0, [9, 8]], it.pages(1)[0, [3, 4]])


async def test_unequal_ranks_without_a_word_how_are_refused(rig):
    it = rig()
    it.add(1, num_ranks=1)
    it.add(2, num_ranks=2)
    assert (await it.copy(1, 2, [0], [(1, [0])])).code == "transfer.refused"


async def test_closing_waits_for_what_runs_and_answers_what_waits(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    runs = it.copy(1, 2, [0], [(1, [0])])
    await until(lambda: len(gate.held) == RANKS)
    it.mover._pumping = True  # as if the loop did not come to start the next one
    waits = it.copy(2, 2, [1], [(1, [1])])
    threading.Timer(0.05, gate.open).start()
    assert it.mover.close() is True
    assert runs.result().ok
    assert (waits.result().code, waits.result().quarantined) == ("mover.closed", ())
    with pytest.raises(MoverClosed):
        it.copy(3, 2, [2], [(1, [2])])
    await asyncio.sleep(0.05)  # what the threads had told the loop meanwhile changes nothing


async def test_closing_reports_what_may_still_be_written(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    runs = it.copy(1, 2, [5, 6], [(1, [0, 1])])
    await until(lambda: len(gate.held) == RANKS)
    assert it.mover.close(timeout_s=0.05) is False
    assert (runs.result().code, runs.result().quarantined) == ("mover.closed", (5, 6))
    gate.open()  # the mappings are still there: this must not crash
    await asyncio.sleep(0.05)
