"""Spaces that a copy reads stay mapped until nothing of it runs, whatever was answered: real memory, real threads."""

import asyncio

import pytest

from services.mempool import mover
from tests.integration.test_mempool_mover import LONG_MS, RANKS, rig, until
from tests.support.gate_copier import Gate, overdue

__all__ = ["rig"]


def remove(it, *numbers) -> list[int]:
    """Those that are gone, as they go."""
    gone: list[int] = []
    for number in numbers:
        it.mover.remove_space(number, lambda number=number: gone.append(number))
    return gone


async def test_the_source_of_a_copy_that_timed_out_stays_until_the_copier_is_done_with_it(rig):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    assert (await overdue(it.copy, 1, 2, [3], [(1, [0])])).quarantined == (3,)
    gone = remove(it, 1)
    gate.open(1)  # of two ranks
    await asyncio.sleep(0.1)
    assert gone == []
    assert it.mover.uses.in_doubt(1)
    gate.open(1)
    await until(lambda: gone)
    assert it.settled == [(2, (3,))]
    assert not it.mover.uses.in_doubt(1)


async def test_the_source_of_a_copy_whose_thread_hangs_stays_until_it_comes_back_and_has_settled(
    rig, monkeypatch
):
    monkeypatch.setattr(mover, "GRACE_S", 0.05)
    gate = Gate()
    it = rig(host_copier=gate)
    for number in (1, 2, 3):
        it.add(number)
    await until(lambda: all(it.mover.is_mapped(number) for number in (1, 2, 3)))
    gate.comes_back.clear()
    done = await it.copy(1, 2, [3], [(1, [0])], timeout_ms=LONG_MS)
    assert (done.code, done.quarantined) == ("transfer.timeout", (3,))
    gone = remove(it, 1, 3)
    await until(lambda: gone)
    await asyncio.sleep(0.05)
    assert gone == [3]
    gate.comes_back.set()
    await until(lambda: gate.held)
    gate.open()
    await until(lambda: 1 in gone)
    assert it.settled == [(2, (3,))]


async def test_a_copy_that_failed_with_nothing_left_to_run_holds_nothing(rig):
    gate = Gate(is_open=True)
    gate.refuse = RANKS
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    assert not (await it.copy(1, 2, [3], [(1, [0])])).ok
    assert not it.mover.uses.in_doubt(1)
    gone = remove(it, 1, 2)
    await until(lambda: sorted(gone) == [1, 2])


@pytest.mark.parametrize("closes", [False, True])
async def test_a_source_that_is_removed_while_its_copy_runs_goes_when_that_has_ended_well(rig, closes):
    gate = Gate()
    it = rig(host_copier=gate)
    it.add(1)
    it.add(2)
    running = it.copy(1, 2, [3], [(1, [0])])
    await until(lambda: len(gate.held) == RANKS)
    gone = remove(it, 1)
    gate.open()
    if closes:
        assert it.mover.close()
    assert (await running).ok
    if not closes:
        await until(lambda: gone)
