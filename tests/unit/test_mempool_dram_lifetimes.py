"""Host memory behind spaces that nobody uses any more goes, and comes back; and who counts as a space."""

import pytest

from services.mempool.core.actions import PoolLimits, ReleaseUnits, RestoreUnits
from services.mempool.core.pool import Pool
from services.mempool.core.regains import AGAIN_MS
from services.mempool.core.space import DRAM_LABEL, Plan
from shared.ids import Epoch
from shared.kv.page import PageState, pack_word
from shared.wire import mempool as wire
from tests.unit.mempool_harness import BOOT, PAGE_BYTES, page_lists
from tests.unit.mempool_release_rig import GPU_DESCRIPTION
from tests.unit.test_mempool_dram import ABCD, WXYZ, spaces, two_prompts, unpin
from tests.unit.test_mempool_spaces import DECODE, PREFILL, Spaces

IDLE_MS = 1_000
NEXT = 30  # a worker that comes later


def idle() -> Spaces:
    """Blocks of a worker that is dead lie in its space and in host memory."""
    rig = spaces(space_idle_ms=IDLE_MS)
    pages = two_prompts(rig)
    unpin(rig, pages[2:4])
    rig.copied()
    assert rig.core.pools[1].is_dram
    assert len(rig.core.pools[1].index) == 2
    die(rig, PREFILL)
    return rig


def die(rig: Spaces, worker: int) -> None:
    for connection in (100 + worker, worker):
        rig.closed(connection)
    rig.dead(worker)


def system(rig: Spaces) -> set[tuple[int, bool]]:
    """It does what it was asked. Spaces of which it took pages, and whether they need not stay page-locked."""
    taken = set()
    while rig.memory:
        asked = rig.memory.popleft()
        if isinstance(asked, ReleaseUnits):
            taken.add((asked.space, asked.unlocks))
            rig.run(rig.core.on_released(asked.space, asked.units, rig.now_ms))
        else:
            rig.run(rig.core.on_restored(asked.space, asked.units, len(asked.units), rig.now_ms))
    return taken


def released(rig: Spaces) -> dict[int, int]:
    """Pages without memory, by space."""
    found = {number: pool.memory for number, pool in rig.core.pools.items()}
    return {n: memory.table.counts[PageState.RELEASED] for n, memory in found.items() if memory is not None}


def drop(rig: Spaces) -> set[tuple[int, bool]]:
    rig.advance(IDLE_MS)
    taken = system(rig)
    rig.advance(0)
    return taken | system(rig)


def test_host_memory_goes_when_every_space_before_it_is_deserted_and_comes_with_the_next_engine():
    """It stayed, page-locked, as long as the mempool lived, whatever became of its content."""
    rig = idle()
    assert drop(rig) == {(0, False), (1, True)}
    assert released(rig) == {0: 8, 1: 8}
    assert not rig.core.pools[1].index.hashes
    assert rig.core.next_deadline_ms() is None
    rig.worker(NEXT, "cpu:0", quota=8)
    system(rig)
    assert released(rig) == {0: 0, 1: 0}
    pages = rig.fill(NEXT, 0, ABCD, "abcd") + rig.fill(NEXT, 0, WXYZ, "wxyz")
    rig.say(NEXT, wire.Unpin(**page_lists(pages[2:4])))
    rig.copied()
    assert len(rig.core.pools[1].index) == 2, "blocks leave for it as ever"


def test_host_memory_that_went_is_not_asked_for_again_before_somebody_comes():
    rig = idle()
    drop(rig)
    rig.worker(NEXT, "cpu:0", quota=8)
    system(rig)
    die(rig, NEXT)
    drop(rig)
    rig.advance(2 * AGAIN_MS)
    assert not rig.memory
    assert released(rig) == {0: 8, 1: 8}


@pytest.mark.parametrize("is_owed", [True, False])
def test_a_successor_brings_host_memory_back_that_was_on_its_way_to_a_newcomer(is_owed):
    """No engine attaches there, so nothing asked for it until the next newcomer."""
    actions = []
    pool = Pool(PoolLimits(capacity_bytes=1 << 30), BOOT, 1)
    words = [pack_word(Epoch(1), PageState.RELEASED)] * 4
    actions += pool.adopt(
        GPU_DESCRIPTION, Plan(4, PAGE_BYTES, 1), words, b"", memory_id=BOOT, processes=[], engines=[],
        label=DRAM_LABEL, is_owed=is_owed,
    )  # fmt: skip
    actions += pool.tick(1_000)
    restored = [action.units for action in actions if isinstance(action, RestoreUnits)]
    assert restored == ([[0, 1, 2, 3]] if is_owed else [])


def test_host_memory_comes_back_with_a_space_of_its_content_on_another_device():
    rig = idle()
    drop(rig)
    rig.worker(NEXT, "cpu:1", quota=8)
    system(rig)
    assert released(rig) == {0: 8, 1: 0, 2: 0}


def test_host_memory_stays_as_long_as_one_space_before_it_is_used():
    rig = idle()
    rig.worker(NEXT, "cpu:1", quota=8)
    assert drop(rig) == {(0, False)}
    assert released(rig) == {0: 8, 1: 0, 2: 0}
    die(rig, NEXT)
    assert drop(rig) == {(1, True), (2, False)}
    assert released(rig) == {0: 8, 1: 8, 2: 8}


def refuse(rig: Spaces) -> None:
    """The system takes nothing."""
    while rig.memory and isinstance(rig.memory[0], ReleaseUnits):
        asked = rig.memory.popleft()
        rig.run(rig.core.on_released(asked.space, asked.units, rig.now_ms, failed=True))


@pytest.mark.parametrize("comes", ["while the system is asked", "behind its refusal"])
def test_host_memory_that_the_system_did_not_take_is_page_locked_again_with_the_next_engine(comes):
    """Where no hole can be punched: nothing had gone, so nothing came back, nor did its page-lock."""
    rig = idle()
    rig.advance(IDLE_MS)
    refuse(rig)
    rig.advance(0)
    assert [(asked.space, asked.unlocks) for asked in rig.memory] == [(1, True)]
    if comes == "behind its refusal":
        refuse(rig)
    rig.worker(NEXT, "cpu:0", quota=8)
    refuse(rig)
    assert [(asked.space, asked.units) for asked in rig.memory] == [(1, [])]
    system(rig)
    assert released(rig) == {0: 0, 1: 0}


def test_host_memory_stays_while_a_copy_may_still_write_it():
    rig = spaces(space_idle_ms=IDLE_MS)
    pages = two_prompts(rig)
    unpin(rig, pages[2:4])
    (copy,) = rig.copies.values()
    die(rig, PREFILL)
    rig.copied(failed=True, in_doubt=copy.targets)
    drop(rig)
    assert released(rig)[1] == 0
    rig.run(rig.core.on_settled(1, copy.targets, rig.now_ms))
    drop(rig)
    assert released(rig)[1] == 8


def test_host_memory_that_is_pressed_for_stays_away_while_a_worker_is_there():
    rig = spaces(space_idle_ms=IDLE_MS)
    rig.say(PREFILL, wire.ReleaseMemory(call_id=7, num_bytes=4 * PAGE_BYTES, wait_ms=1_000, space=1))
    assert system(rig) == {(1, False)}
    rig.worker(NEXT, "cpu:1", quota=8)
    assert not rig.memory
    assert released(rig) == {0: 0, 1: 4, 2: 0}


def test_lent_pages_take_no_engines_place():
    """A space of the lender's pages counted as one for good, though it has no memory."""
    rig = spaces(max_spaces=4)
    rig.worker(DECODE, "cpu:1")
    rig.core.lending._make_shelf(2, 0)
    rig.core.lending._make_shelf(0, 2)
    assert [pool.is_loan for pool in rig.core.pools.values()] == [False, False, False, True, True]
    rig.worker(NEXT, "cpu:2")
    assert [s.label for s in rig.spaces.values()] == ["0", "dram", "1", "2"]
