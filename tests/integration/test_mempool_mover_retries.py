"""What a driver refuses once is asked for again: mappings of spaces, over fake GPUs that refuse when told to."""

import asyncio
import errno

import pytest

from services.mempool import mover_mapping, mover_self_test
from shared.kernels.copy_pages.copies import CopyFailed
from shared.transfer.errors import PathUnavailable
from shared.transfer.self_test import SelfTest
from tests.support.fake_mover_gpus import FakeSlabs
from tests.support.mover_spaces_rig import NUM, PER_SLAB, movers, until


@pytest.fixture
async def rig(monkeypatch):
    monkeypatch.setattr(mover_mapping, "RETRY_MIN_S", 0.02)
    with movers(monkeypatch) as make:
        yield make


@pytest.fixture
def said(monkeypatch):
    """(event, fields) of what the mover logs as errors and of the mappings that it made."""
    found = []
    for level in ("error", "info"):
        monkeypatch.setattr(mover_mapping.log, level, lambda event, **fields: found.append((event, fields)))
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
