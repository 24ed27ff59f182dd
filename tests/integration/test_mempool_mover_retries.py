"""What a driver refuses once is asked for again: mappings of spaces, over fake GPUs that refuse when told to."""

import asyncio
import errno

import pytest

from services.mempool import mover_mapping, mover_self_test, mover_spaces
from shared.kernels.copy_pages.copies import CopyFailed
from shared.transfer.errors import PathUnavailable
from shared.transfer.self_test import SelfTest
from shared.vmm.errors import VmmError
from tests.support.fake_mover_gpus import FakeSlabs
from tests.support.mover_spaces_rig import NUM, PAGE_BYTES, PER_SLAB, movers, until


@pytest.fixture
async def rig(monkeypatch):
    monkeypatch.setattr(mover_mapping, "RETRY_MIN_S", 0.02)
    with movers(monkeypatch) as make:
        yield make


@pytest.fixture
def said(monkeypatch):
    """(event, fields) of what the mover logs as errors, and of the mappings that it made."""
    found = []
    for log, level in (
        (mover_mapping.log, "error"),
        (mover_mapping.log, "info"),
        (mover_spaces.log, "error"),
    ):
        monkeypatch.setattr(log, level, lambda event, **fields: found.append((event, fields)))
    return found


async def mapped_after(it, said, number):
    """What was said of a space until it could be copied."""
    await until(lambda: it.mover.is_mapped(number))
    return [(event, fields) for event, fields in said if fields["space"] == number]


def refusing(times, error, real):
    """`real`, but for the first calls."""
    left = [error] * times

    def call(*args, **how):
        if left:
            raise left.pop()
        return real(*args, **how)

    return call


async def test_a_space_that_could_not_be_mapped_twice_is_mapped_the_third_time_and_the_log_says_so(
    rig, said, monkeypatch
):
    it = rig()
    it.add(1, (0,))
    await until(lambda: it.mover.is_mapped(1))
    full = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(FakeSlabs, "export", refusing(2, full, FakeSlabs.export))
    it.add(2, (1,))
    done = await it.copy(1, 2)
    assert (done.code, done.quarantined) == ("transfer.path_unavailable", ()), "a miss, at once"
    one, two, last = await mapped_after(it, said, 2)
    assert [event for event, _ in (one, two)] == ["space_unmapped"] * 2
    assert [fields["again_s"] for _, fields in (one, two)] == [0.02, 0.04]
    assert "Too many open files" in one[1]["reason"]
    assert last == ("space_mapped", {"space": 2, "failures": 2})
    for source, target in ((1, 2), (2, 1)):
        assert (await it.copy(source, target)).ok
    assert it.mover.failure(2) is None


async def test_a_full_gpu_has_no_memory_for_a_context_only_for_a_moment(rig, said):
    it = rig()
    full = PathUnavailable("cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY")
    it.mover._mapper._open_gpu = refusing(2, full, it.gpus.open)
    it.add(1, (0,))
    it.add(2, 1)
    assert [event for event, _ in await mapped_after(it, said, 1)] == [
        *["space_unmapped"] * 2,
        "space_mapped",
    ]
    assert (await it.copy(1, 2)).ok


async def test_a_copy_engine_that_was_refused_is_asked_for_again_and_nothing_stays_mapped_twice(rig, said):
    it = rig()
    it.mover._paths.add = refusing(1, CopyFailed("cuStreamCreate", "refused"), it.mover._paths.add)
    it.add(1, (0,))
    assert [event for event, _ in await mapped_after(it, said, 1)] == ["space_unmapped", "space_mapped"]
    it.add(2, 1)
    assert (await it.copy(1, 2)).ok
    assert len(next(iter(it.gpus.vmms.values())).mapped) == NUM // PER_SLAB


async def test_a_mapping_that_cannot_even_be_undone_is_tried_again(rig, said):
    it = rig()
    it.mover._paths.add = refusing(1, CopyFailed("cuStreamCreate", "refused"), it.mover._paths.add)
    real = it.mover._mapper.unmap
    unmap = refusing(1, CopyFailed("cuMemHostUnregister", "refused"), lambda space: None)

    def fails_behind_it(space):
        real(space)
        unmap(space)

    it.mover._mapper.unmap = fails_behind_it
    it.add(1, (0,))
    said_of_it = await mapped_after(it, said, 1)
    assert [event for event, _ in said_of_it] == ["not_unmapped", "space_unmapped", "space_mapped"]
    it.add(2, 1)
    assert (await it.copy(1, 2)).ok


async def removed(it, number):
    """The mapped ranks of a space, once it is said to be gone."""
    ranks = it.mover._mapper._spaces[number].ranks
    gone = asyncio.Event()
    it.mover.remove_space(number, gone.set)
    await asyncio.wait_for(gone.wait(), 10)
    assert number not in it.mover.status()["spaces"]
    return ranks


async def test_host_memory_is_given_back_though_the_driver_does_not_let_a_rank_go(rig, said):
    it = rig(pin_host=True)
    it.add(1, (0, 1))
    it.add(2, 3)
    await it.pinned()
    it.gpus.drivers[0].fail_at["unregister_host"] = 2
    ranks = await removed(it, 2)
    assert [fields["region"] for event, fields in said if event == "not_unmapped"] == ["2.1"]
    assert list(it.gpus.drivers[0].registered) == [ranks[1].memory.base], "it alone is page-locked"
    assert [mapped.memory.num_bytes > 0 for mapped in ranks] == [False, True, False], (
        "and keeps its addresses"
    )
    it.add(3, 2)
    await until(lambda: it.mover.is_mapped(3))
    assert (await it.copy(3, 1)).ok


async def test_what_was_not_let_go_when_it_began_to_rest_is_asked_for_again_when_its_space_goes(rig, said):
    it = rig(pin_host=True)
    it.add(1, (0,))
    it.add(2, 2)
    await it.pinned()
    it.gpus.drivers[0].fail_at["unregister_host"] = 1
    it.mover.pinning.rest(2)
    await until(lambda: [event for event, _ in said].count("not_unlocked"))
    assert len(it.gpus.drivers[0].registered) == 1, "the other rank is page-locked no more"
    ranks = await removed(it, 2)
    assert (it.gpus.drivers[0].registered, [mapped.memory.num_bytes for mapped in ranks]) == ({}, [0, 0])


async def test_one_piece_that_was_not_let_go_keeps_no_other_from_being_page_locked_again(
    rig, said, monkeypatch
):
    monkeypatch.setattr(mover_spaces, "PIN_CHUNK_BYTES", 3 * PAGE_BYTES)
    it = rig(pin_host=True)
    it.add(1, (0,))
    it.add(2, 1)
    await it.pinned()
    driver = it.gpus.drivers[0]
    registered, register = driver.registered, driver.register_host

    def register_once(address, num_bytes):
        if address in registered:
            raise CopyFailed("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        register(address, num_bytes)

    monkeypatch.setattr(driver, "register_host", register_once)
    num_pieces = len(registered)
    assert num_pieces > 2
    driver.fail_at["unregister_host"] = 1
    it.mover.pinning.rest(2)
    await until(lambda: [event for event, _ in said].count("not_unlocked"))
    assert len(registered) == 1
    it.mover.pinning.wake(2)
    await until(lambda: len(registered) == num_pieces)
    await removed(it, 2)
    assert registered == {}


@pytest.mark.parametrize("call", ["unmap", "free_reservation"])
async def test_a_gpus_space_is_given_back_though_its_driver_does_not_let_a_rank_go(
    rig, said, monkeypatch, call
):
    it = rig()
    it.add(1, (0, 1))
    await until(lambda: it.mover.is_mapped(1))
    first, other = it.gpus.vmms.values()
    monkeypatch.setattr(first, call, refusing(1, VmmError("refused"), getattr(first, call)))
    await removed(it, 1)
    assert [fields["region"] for event, fields in said if event == "not_unmapped"] == ["1.0"]
    assert (len(first.reservations), other.mapped, other.reservations) == (1, {}, {})


async def test_a_space_is_given_back_whatever_goes_wrong_when_it_is_unmapped(rig, said):
    it = rig()
    it.add(1, (0,))
    await until(lambda: it.mover.is_mapped(1))
    it.mover._mapper.unmap = refusing(1, RuntimeError("a fault of ours"), it.mover._mapper.unmap)
    await removed(it, 1)
    assert said[-1] == ("not_unmapped", {"space": 1, "reason": "RuntimeError('a fault of ours')"})


def pairs_measured(monkeypatch, *rates):
    """The next measurements of pairs say these rates, the last one from then on."""
    left = list(rates)

    def measure(*_):
        rate = left.pop(0) if len(left) > 1 else left[0]
        return SelfTest("imported", rate, 1.0, 1 << 26)

    monkeypatch.setattr(mover_self_test, "measure_pair", measure)


async def test_a_pair_far_slower_than_the_others_is_said_once(rig, said, monkeypatch):
    slow = []
    monkeypatch.setattr(
        mover_self_test.log, "warning", lambda event, **fields: slow.append((event, fields["gb_per_s"]))
    )
    pairs_measured(monkeypatch, 300.0, 74.0, 75.0, 300.0)
    it = rig()
    for number, device in enumerate((0, 1, 0), 1):
        it.add(number, (device,))
        await mapped_after(it, said, number)
    assert slow == [("pair_slow", 74.0)]


async def test_one_slow_measurement_of_a_pair_makes_no_space_unusable(rig, said, monkeypatch):
    pairs_measured(monkeypatch, 3.0, 300.0)
    it = rig(floor_gb_per_s=200.0)
    it.add(1, (0,))
    it.add(2, (1,))
    assert [event for event, _ in await mapped_after(it, said, 2)] == ["space_mapped"]
    assert set(it.mover.pair_rates().values()) == {300.0}, "as they were measured last, for budgets"
    assert (await it.copy(1, 2)).ok


async def test_a_pair_under_the_floor_is_said_at_each_attempt_and_usable_once_it_reaches_it(
    rig, said, monkeypatch
):
    pairs_measured(monkeypatch, *[3.0] * 2 * mover_self_test.MEASUREMENTS, 300.0)
    it = rig(floor_gb_per_s=200.0)
    it.add(1, (0,))
    it.add(2, (1,))
    assert (await it.copy(1, 2)).code == "transfer.link_too_slow"
    found = await mapped_after(it, said, 2)
    assert [fields.get("code") for _, fields in found] == [*["transfer.link_too_slow"] * 2, None]
    assert (await it.copy(1, 2)).ok


async def test_a_space_that_goes_is_tried_no_more(rig, said, monkeypatch):
    monkeypatch.setattr(FakeSlabs, "export", refusing(1000, OSError("no"), FakeSlabs.export))
    it = rig()
    it.add(1, (0,))
    await until(lambda: it.mover.failure(1) is not None)
    gone = asyncio.Event()
    it.mover.remove_space(1, gone.set)
    await asyncio.wait_for(gone.wait(), 30)
    before = len(said)
    await asyncio.sleep(0.1)
    assert len(said) == before
    assert it.mover.status()["spaces"] == {}
