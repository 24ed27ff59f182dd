"""Copies between GPU spaces and host spaces of one mempool, over fake GPUs that move real bytes."""

import asyncio
import os

import numpy as np
import pytest

from services.mempool import mover_spaces
from services.mempool.config import copy_options, load
from services.mempool.mover_bounce import BounceCopier
from services.mempool.mover_engines import CopyEngine, PinnedRanges
from shared.kernels.copy_pages.copies import Copies, CopyFailed, Direction
from shared.transfer.errors import TransferRefused
from shared.transfer.reslice import KvEnd
from shared.transfer.transfer_thread import TransferThread
from tests.support.fake_mover_gpus import PAGE_BYTES, FakeGpus, FakeSlabs
from tests.support.fake_vmm_driver import GRANULARITY_BYTES
from tests.support.gate_copier import overdue
from tests.support.huge import HUGE, needs_huge
from tests.support.mover_spaces_rig import NUM, PER_SLAB, GpuSpace, movers, until


@pytest.fixture
async def rig(monkeypatch):
    with movers(monkeypatch) as make:
        yield make


@pytest.mark.parametrize("pin_host", [False, True])
async def test_pages_go_every_way_between_two_gpus_and_host_memory(rig, pin_host):
    it = rig(pin_host=pin_host)
    it.add(1, (0,))
    it.add(2, 1)
    it.add(3, (1,))
    it.add(4, (0,))
    if pin_host:
        await it.pinned()
    paths = {}
    for source in it.spaces:
        for target in it.spaces:
            if source != target:
                done = await it.copy(source, target)
                assert done.ok, done
                paths.setdefault(done.path, set()).add((source, target))
    with_host = {
        (source, target) for source in it.spaces for target in it.spaces if 2 in (source, target)
    } - {(2, 2)}
    assert paths.get("staged", set()) == (set() if pin_host else with_host)
    assert set(paths) <= {"imported", "staged"}
    assert it.mover.is_pinned(2) is pin_host
    assert not it.mover.is_pinned(1)
    used_slots = any("allocate_host" in driver.names() for driver in it.gpus.drivers.values())
    assert used_slots is not pin_host


async def test_ranks_on_two_gpus_are_copied_rank_by_rank(rig):
    it = rig()
    it.add(1, (0, 1))
    it.add(2, (1, 0))
    it.add(3, 2)
    for source, target in ((1, 2), (2, 1), (1, 3), (3, 2)):
        assert (await it.copy(source, target)).ok


async def test_whole_pages_between_gpus_go_in_batches_on_the_targets_engines(rig):
    it = rig()
    it.add(1, (0,))
    it.add(2, (1,))
    assert (await it.copy(1, 2, [(page, NUM - 1 - page) for page in range(NUM)])).ok
    calls = [args for name, args in it.gpus.drivers[1].calls if name == "copy_batch"]
    assert len(calls[-1][0]) + len(calls[-2][0]) + len(calls[-3][0]) == NUM  # 3 lanes of 8 pages
    before = len([1 for name, _ in it.gpus.drivers[0].calls if name == "copy_batch"])
    assert (await it.copy(1, 2)).ok
    assert len([1 for name, _ in it.gpus.drivers[0].calls if name == "copy_batch"]) == before


async def test_a_copy_between_gpus_wakes_the_movers_thread_alone(rig, monkeypatch):
    it = rig()
    it.add(1, (0,))
    it.add(2, (1,))
    assert (await it.copy(1, 2)).ok
    woken, post = [], TransferThread.post
    monkeypatch.setattr(
        TransferThread, "post", lambda self, *args, **how: woken.append(args) or post(self, *args, **how)
    )
    for _ in range(3):
        assert (await it.copy(1, 2)).ok
    assert not woken


async def test_no_copy_crosses_a_slab(rig):
    it = rig(pin_host=True)
    it.add(1, (0,))
    it.add(2, 1)
    await it.pinned()
    for source, target in ((1, 2), (2, 1)):
        assert (await it.copy(source, target, [(page, page) for page in range(NUM)])).ok
    sizes = [size for name, args in it.gpus.drivers[0].calls if name == "copy_batch" for size in args[2]]
    assert sizes == [PER_SLAB * PAGE_BYTES] * (2 * NUM // PER_SLAB)


async def test_a_mempool_that_was_told_nothing_swaps_through_page_locked_memory(rig, tmp_path):
    it = rig(**copy_options(load(["--socket", str(tmp_path / "mempool.sock")]))._asdict())
    it.add(1, (0,))
    it.add(2, 1)
    await it.pinned()
    assert (await it.copy(1, 2)).path == "imported"
    assert it.mover.is_pinned(2)


@pytest.mark.parametrize("pin_host", [False, True])
async def test_pages_of_several_slabs_and_of_unequal_padding_hold_the_same_block(rig, pin_host):
    """Three slabs a page on two GPUs; host pages that are shorter, longer and as long."""
    it = rig(pin_host=pin_host)
    it.add(1, (0,), 3)
    it.add(2, (1,), 3)
    it.add(3, 1, 2 * GRANULARITY_BYTES + 4096)
    it.add(4, 1, 3 * GRANULARITY_BYTES)
    it.add(5, 1, 4 * GRANULARITY_BYTES - 4096)
    for source in it.spaces:
        for target in it.spaces:
            if source != target:
                done = await it.copy(source, target)
                assert done.ok, (source, target, done)


async def test_ranks_of_unequal_tensor_parallelism_are_cut_anew_between_gpus(rig):
    it = rig()
    ends = {1: KvEnd(2, 4, 16, 128), 2: KvEnd(2, 4, 16, 128, tp_size=2)}
    spaces = {1: GpuSpace(1, (0,)), 2: GpuSpace(2, (0, 1)), 3: GpuSpace(3, (1,))}
    it.spaces = spaces
    for number, space in spaces.items():
        it.mover.add_space(number, space.regions, ends[len(space.slabs)])
    future = asyncio.get_running_loop().create_future()
    it.mover.copy(1, 2, [9, 8], [(1, [3, 4])], 60_000, future.set_result)
    assert (await future).ok
    size = ends[2].block_bytes(0)
    whole = spaces[1].pages()[0, [3, 4], : 2 * size].reshape(2, 2, 2, -1)  # page, layer, rank, its heads
    assert np.array_equal(
        spaces[2].pages()[:, [9, 8], :size].reshape(2, 2, 2, -1), whole.transpose(2, 0, 1, 3)
    )
    future = asyncio.get_running_loop().create_future()
    it.mover.copy(2, 3, [20, 21], [(2, [9, 8])], 60_000, future.set_result)
    assert (await future).ok
    assert np.array_equal(
        spaces[3].pages()[0, [20, 21], : 2 * size], spaces[1].pages()[0, [3, 4], : 2 * size]
    )


async def test_host_memory_is_page_locked_in_chunks_while_copies_run(rig, monkeypatch):
    monkeypatch.setattr(mover_spaces, "PIN_CHUNK_BYTES", 5 * PAGE_BYTES)
    it = rig(pin_host=True)
    it.add(1, 2)
    assert not it.mover.is_pinned(1), "without a GPU nobody needs it"
    it.add(2, (0, 1))
    assert it.mover.is_pinned(1)
    paths = set()
    for _ in range(3):
        paths |= set((await it.copy(1, 2)).path.split("+"))
    await it.pinned()
    assert paths <= {"imported", "staged"}
    sizes = [num_bytes for driver in it.gpus.drivers.values() for num_bytes in driver.registered.values()]
    assert sorted(sizes) == sorted(2 * [*[5 * PAGE_BYTES] * 4, 4 * PAGE_BYTES])
    every_page = [(page, page) for page in range(NUM)]
    for source, target in ((1, 2), (2, 1)):
        assert (await it.copy(source, target, every_page)).path == "imported"
    calls = [
        args for driver in it.gpus.drivers.values() for name, args in driver.calls if name == "copy_batch"
    ]
    assert max(size for args in calls for size in args[2]) <= PER_SLAB * PAGE_BYTES


async def test_host_memory_that_rests_is_not_page_locked_and_is_again_when_it_wakes(rig):
    it = rig(pin_host=True)
    it.add(1, (0,))
    it.add(2, 2)
    await it.pinned()
    it.mover.pinning.rest(2)
    it.mover.pinning.begin()  # as another space's mapping does
    assert not it.mover.is_pinned(2)
    await until(lambda: not any(driver.registered for driver in it.gpus.drivers.values()))
    assert it.mover.status()["pinned_bytes"] == 0
    it.mover.pinning.wake(2)
    assert it.mover.is_pinned(2)
    await it.pinned()


@needs_huge
async def test_memory_that_is_page_locked_is_made_of_huge_pages_first_and_keeps_its_bytes(rig):
    it = rig(pin_host=True, huge_pages=True)
    it.add(1, (0,))
    it.add(2, 2, HUGE // 2)  # each rank: 12 huge pages
    before = it.spaces[2].pages().copy()
    await it.pinned()
    assert it.mover.status()["huge_bytes"] == 2 * NUM * HUGE // 2
    assert np.array_equal(it.spaces[2].pages(), before)
    it.mover.pinning.rest(2)
    await until(lambda: it.mover.status()["pinned_bytes"] == 0)
    assert it.mover.status()["huge_bytes"] == 0


async def test_memory_that_cannot_be_page_locked_goes_through_slots_and_the_log_says_what_that_costs(
    rig, monkeypatch
):
    said = []
    monkeypatch.setattr(mover_spaces.log, "warning", lambda event, **fields: said.append((event, fields)))
    it = rig(pin_host=True)
    it.add(1, (0,))
    await until(lambda: it.mover.is_mapped(1))
    it.gpus.drivers[0].fail_at["register_host"] = 1
    it.add(2, 1)
    await until(lambda: it.mover.is_mapped(2))
    for source, target in ((1, 2), (2, 1)):
        done = await it.copy(source, target)
        assert (done.ok, done.path) == (True, "staged"), done
    assert (it.mover.status()["pinned_bytes"], it.mover.status()["huge_bytes"]) == (0, 0)
    ((event, fields),) = said
    assert (event, fields["locked_bytes"]) == ("not_page_locked", 0)
    assert "register_host" in fields["reason"]
    assert "a fifth" in fields["so"]
    assert "pin_host" in fields["so"]


async def test_memory_that_could_not_be_page_locked_for_a_moment_is_locked_later(rig, monkeypatch):
    monkeypatch.setattr(mover_spaces, "REST_MIN_S", 0.05)
    it = rig(pin_host=True)
    it.add(1, (0,))
    await until(lambda: it.mover.is_mapped(1))
    it.gpus.drivers[0].fail_at["register_host"] = 1
    it.add(2, 1)
    await until(lambda: it.mover.is_mapped(2))
    await until(lambda: it.mover.status()["pinned_bytes"] > 0)
    done = await it.copy(1, 2)
    assert (done.ok, done.path) == (True, "imported"), done


async def test_gpus_that_cannot_reach_each_other_copy_through_host_memory(rig):
    it = rig(FakeGpus(3, apart=[(0, 1)]))
    for number, device in ((1, 0), (2, 1), (3, 2)):
        it.add(number, (device,))
    for source, target, path in ((1, 2, "staged"), (2, 1, "staged"), (1, 3, "imported"), (3, 2, "imported")):
        done = await it.copy(source, target)
        assert (done.ok, done.path) == (True, path), done
    status = it.mover.status()
    assert "cannot reach" in status["reasons"]["staged"]
    assert len(status["pairs"]) == 4, "pairs that are apart have nothing to measure"


def test_bounced_sets_larger_than_all_slots_arrive_and_failures_wait_for_what_runs():
    gpus = FakeGpus()
    engines = [CopyEngine(gpus.open(FakeGpus.device(n)), PinnedRanges()) for n in (0, 1)]
    copier = BounceCopier(*engines, slot_bytes=1000)
    source = np.random.default_rng(1).integers(0, 256, (32, 700), np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(2).permutation(32).astype(np.uint64) * np.uint64(700)

    def copies():
        return Copies.of(order + np.uint64(source.ctypes.data), order + np.uint64(target.ctypes.data), 700)

    first = copier.submit(copies(), Direction.PEER)
    first.wait(30)
    assert np.array_equal(target, source)
    target[:] = 0
    gpus.drivers[1].fail_at["copy"] = 3
    with pytest.raises(CopyFailed):
        copier.submit(copies(), Direction.PEER).wait(30)
    copier.submit(copies(), Direction.PEER).wait(30)
    assert np.array_equal(target, source)
    copier.close()
    for engine in engines:
        engine.close()
    assert gpus.drivers[0].memory == {}


@pytest.mark.parametrize("way", [(1, 2), (1, 3), (3, 1)])
async def test_a_copy_engine_that_stands_still_leaves_pages_quarantined_until_it_goes_on(rig, way):
    it = rig(FakeGpus(eager=True), pin_host=True)
    it.add(1, (0,))
    it.add(2, (1,))
    it.add(3, 1)
    await it.pinned()
    assert (await it.copy(*way)).ok
    for driver in it.gpus.drivers.values():
        driver.eager = False
    done = await overdue(it.copy, *way)
    assert (done.code, done.quarantined) == ("transfer.timeout", (0, 2, 20, 21))
    it.gpus.run()
    await until(lambda: it.settled)
    assert it.settled == [(way[1], (0, 2, 20, 21))]
    for driver in it.gpus.drivers.values():
        driver.eager = True
    assert (await it.copy(*way)).ok


@pytest.mark.parametrize("pin_host", [False, True])
async def test_a_page_is_in_one_transfer_at_a_time_whatever_its_path(rig, pin_host):
    it = rig(pin_host=pin_host)
    it.add(1, (0,))
    it.add(2, 1)
    it.add(3, 1)
    if pin_host:
        await it.pinned()
    assert (await it.copy(1, 2)).ok
    it.gpus.drivers[0].eager = False
    assert (await overdue(it.copy, 1, 2)).quarantined == (0, 2, 20, 21)
    with pytest.raises(TransferRefused):
        await it.copy(3, 2)
    it.mover._targets.settle(2, 0, [0, 2, 20, 21])  # the library's own book, beneath the mover's
    assert (await it.copy(3, 2)).code == "transfer.refused"
    it.gpus.drivers[0].eager = True
    it.gpus.run()
    await until(lambda: not it.mover._paths.quarantine.held())
    assert (await it.copy(3, 2)).ok


async def test_a_refused_driver_call_fails_one_copy_only(rig):
    it = rig()
    it.add(1, (0,))
    it.add(2, (1,))
    assert (await it.copy(1, 2)).ok
    it.gpus.drivers[1].fail_at["copy_batch"] = 1
    done = await it.copy(1, 2)
    assert (done.code, done.quarantined) == ("transfer.failed", ())
    assert "copy_batch" in done.reason
    assert (await it.copy(1, 2)).ok


async def test_a_pair_of_gpus_under_the_floor_makes_the_space_unusable_loudly(rig):
    it = rig(floor_gb_per_s=1e9)
    it.add(1, (0,))
    it.add(2, (1,))
    it.add(3, 1)
    done = await it.copy(1, 2)
    assert done.code == "transfer.link_too_slow"
    assert it.mover.failure(2) is not None
    assert (await it.copy(1, 3)).ok
    assert len(it.mover.status()["pairs"]) == 1, "the first failing pair ends the test"


async def test_a_gpu_that_is_not_there_fails_its_space_alone(rig):
    it = rig()
    it.add(1, (7,))
    it.add(2, (0,))
    it.add(3, 1)
    assert (await it.copy(2, 1)).code == "transfer.path_unavailable"
    assert (await it.copy(2, 3)).ok


async def test_spaces_that_go_leave_no_mapping_no_descriptor_and_no_page_lock(rig):
    it = rig(pin_host=True)
    before = len(os.listdir("/proc/self/fd"))
    it.add(1, (0, 1))
    it.add(2, 2)
    await it.pinned()
    assert (await it.copy(1, 2)).ok
    gone = []
    it.mover.remove_space(1, lambda: gone.append(1))
    it.mover.remove_space(2, lambda: gone.append(2))
    await until(lambda: len(gone) == 2)
    assert not any(vmm.mapped or vmm.reservations for vmm in it.gpus.vmms.values())
    assert not any(driver.registered for driver in it.gpus.drivers.values())
    for space in it.spaces.values():
        space.close()
    it.spaces = {}
    assert it.mover.close() is True
    assert all(
        driver.closed and not driver.streams and not driver.memory for driver in it.gpus.drivers.values()
    )
    assert not any(driver.events for driver in it.gpus.drivers.values())
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_large_space_is_given_up_when_the_mempool_ends(rig, monkeypatch):
    it = rig()
    export, exported = FakeSlabs.export, []

    def last(slabs, slab):
        exported.append(slab)
        it.mover._mapper.stop()
        return export(slabs, slab)

    monkeypatch.setattr(FakeSlabs, "export", last)
    it.add(1, (0,))
    await until(lambda: it.mover.failure(1) is not None)
    assert exported == [0]
    assert not it.gpus.vmms[FakeGpus.device(0)].reservations
