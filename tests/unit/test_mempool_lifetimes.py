"""A space whose engines are gone loses its memory in time, and gets it back with the next one."""

import pytest

from services.mempool import config
from services.mempool.core.actions import RestoreUnits
from services.mempool.core.regains import AGAIN_MS, MAX_PAGES_UNDER_WAY
from services.mempool.core.space import Plan
from shared.errors import SettingsError
from shared.ids import Epoch, InstanceId
from tests.unit.mempool_harness import BOOT, Harness, chain
from tests.unit.mempool_release_rig import GPU_DESCRIPTION, UNIT_BYTES, ReleaseRig

IDLE_MS = 1_000


def deserted(num_slabs: int = 4) -> ReleaseRig:
    rig = ReleaseRig(num_slabs, space_idle_ms=IDLE_MS)
    rig.two_ranks()
    rig.pages_engine(3)
    rig.save(3, chain("a", "b"))
    for connection in (3, 1, 2):
        rig.closed(connection)
    return rig


def bury(rig: ReleaseRig) -> None:
    for process in (1, 2, 3):
        rig.ranks.pop(process, None)
        rig.dead(process)


def test_blocks_of_a_dead_engine_stay_for_a_while_then_the_memory_goes():
    rig = deserted()
    bury(rig)
    assert rig.counts() == {"sealed": 2, "free": 6}
    assert rig.pool.next_deadline_ms() == IDLE_MS
    rig.advance(IDLE_MS - 1)
    assert not rig.pending
    rig.advance(1)
    rig.settle()
    assert rig.counts() == {"released": 8}
    assert rig.memory == set()
    assert rig.pool.next_deadline_ms() is None
    assert rig.pool.counters["spaces_dropped"] == 1


def test_while_a_process_may_live_nothing_goes():
    rig = deserted()
    rig.dead(1)
    rig.dead(3)
    rig.advance(5 * IDLE_MS)
    assert not rig.pending
    assert rig.memory == {0, 1, 2, 3}
    assert len(rig.pool.index) == 2


def test_the_next_engine_gets_the_memory_again():
    rig = deserted()
    bury(rig)
    rig.advance(IDLE_MS)
    rig.settle()
    for number, connection in enumerate((11, 12)):
        rig.rank(connection, number)
        assert rig.ranks[connection].slabs == set()
        rig.ready(connection)
    rig.pages_engine(13)
    rig.settle()
    assert rig.counts() == {"granted": 8}
    assert all(rank.slabs == {0, 1, 2, 3} for rank in rig.ranks.values())


def test_host_memory_goes_and_comes_too():
    rig = ReleaseRig(4)
    rig.pool = Harness(4, kept_share=1.0, space_idle_ms=IDLE_MS).pool
    rig.engine(1, quota=2)
    rig.save(1, chain("a", "b"))
    rig.dead(1)
    rig.advance(IDLE_MS)
    rig.settle()
    assert rig.counts() == {"released": 4}
    rig.engine(2, quota=2)
    rig.settle()
    assert rig.counts() == {"free": 2, "granted": 2}


def successor(old: ReleaseRig, processes: list[int]) -> ReleaseRig:
    """Of a mempool whose processes may live, or are proven dead."""
    new = ReleaseRig(old.num_slabs, boot=Epoch(BOOT + 1_000), space_idle_ms=IDLE_MS)
    new.memory, new.words, new.now_ms, new.is_owed = old.memory, dict(old.words), old.now_ms, old.is_owed
    words = [old.words[page] for page in range(len(old.words))]
    new.run(
        new.pool.adopt(
            GPU_DESCRIPTION, Plan(len(words), 1 << 20, 2, 2), words, b"", memory_id=BOOT, processes=processes,
            engines=[], instances=[InstanceId("e")] * len(processes), mappers=processes, is_owed=old.is_owed,
        )
    )  # fmt: skip
    return new


def come(rig: ReleaseRig, first: int = 11) -> None:
    """A worker of other processes than before."""
    rig.two_ranks(first)
    rig.pages_engine(first + 2)


def test_the_next_engine_gets_it_from_a_successor_too():
    """Nothing but the words said that the memory was gone, and no engine ever had a page of it again."""
    old = deserted()
    bury(old)
    old.advance(IDLE_MS)
    old.settle()
    new = successor(old, [])
    come(new)
    new.settle()
    assert new.counts() == {"granted": 8}


def test_a_successor_finishes_what_was_leaving_and_brings_it_back():
    old = deserted()
    bury(old)
    old.advance(IDLE_MS)
    assert old.pending, "the system has not answered"
    new = successor(old, [])
    come(new)
    new.settle()
    assert new.counts() == {"granted": 8}


def test_a_successor_gives_the_next_engine_as_long_as_its_predecessor_did():
    """The time counted from the machine's start: blocks of engines that had just died went with the mempool."""
    old = deserted()
    bury(old)
    old.now_ms = 100 * IDLE_MS
    new = successor(old, [])
    new.advance(0)
    assert not new.pending
    assert new.pool.next_deadline_ms() == new.now_ms + IDLE_MS
    new.advance(IDLE_MS)
    new.settle()
    assert new.counts() == {"released": 8}


def pressed() -> ReleaseRig:
    """Two of four allocations were given away while a worker was here."""
    rig = ReleaseRig(4, space_idle_ms=IDLE_MS)
    rig.two_ranks()
    rig.press(2 * UNIT_BYTES)
    rig.settle()
    return rig


def test_what_a_process_gave_away_before_it_ended_is_its_followers():
    rig = pressed()
    for process in (1, 2):
        rig.closed(process)
        rig.ranks.pop(process)
        rig.dead(process)
    come(rig)
    rig.settle()
    assert rig.counts() == {"granted": 8}


def test_what_was_pressed_for_stays_away_when_the_same_processes_come_again():
    rig = pressed()
    for process in (1, 2):
        rig.closed(process)
    for number, process in enumerate((1, 2)):
        slabs = set(rig.ranks[process].slabs)
        rig.rank(20 + process, number, process=process)
        rig.ranks[20 + process].slabs = slabs
        del rig.ranks[process]
        rig.ready(20 + process)
    assert not rig.pending
    assert rig.counts() == {"free": 4, "released": 4}


def test_what_was_pressed_for_stays_away_when_they_come_to_a_successor():
    old = pressed()
    new = successor(old, [1, 2])
    for number, process in enumerate((1, 2)):
        new.rank(process, number)
        new.ready(process)
    new.advance(2 * AGAIN_MS)
    assert not new.pending
    assert new.counts() == {"free": 4, "released": 4}


def test_who_comes_while_the_memory_leaves_gets_all_of_it():
    """The release went on taking behind it, and only what was gone at that moment came back."""
    rig = deserted(MAX_PAGES_UNDER_WAY)  # twice as many pages
    bury(rig)
    rig.advance(IDLE_MS)
    assert rig.counts() == {"withdrawn": MAX_PAGES_UNDER_WAY, "free": MAX_PAGES_UNDER_WAY}
    rig.system()
    come(rig)
    rig.settle()
    assert rig.counts() == {"granted": 8, "free": 2 * MAX_PAGES_UNDER_WAY - 8}


def test_what_the_system_lacks_when_an_engine_comes_is_asked_for_again():
    rig = deserted()
    bury(rig)
    rig.advance(IDLE_MS)
    rig.settle()
    come(rig)
    assert rig.system(has=1)
    rig.settle()
    assert rig.counts() == {"granted": 2, "released": 6}
    assert rig.pool.next_deadline_ms() == rig.now_ms + AGAIN_MS
    rig.advance(AGAIN_MS)
    assert rig.system(has=0)
    rig.advance(AGAIN_MS - 1)
    assert not rig.pending
    rig.advance(1)
    rig.settle()
    assert rig.counts() == {"granted": 8}
    assert rig.pool.next_deadline_ms() is None


def come_to_a_successor(old: ReleaseRig) -> ReleaseRig:
    """The same two ranks, which map what they mapped."""
    new = successor(old, [11, 12])
    for number, process in enumerate((11, 12)):
        slabs = set(old.ranks[process].slabs)
        new.rank(process, number)
        new.ranks[process].slabs = slabs
        new.ready(process)
    return new


def test_a_successor_asks_again_for_what_the_system_lacked_when_an_engine_came():
    """The words say of a page only that its memory is gone: it was taken for pressed for, and never came."""
    old = deserted()
    bury(old)
    old.advance(IDLE_MS)
    old.settle()
    old.two_ranks(11)
    assert old.system(has=1)
    old.settle()
    new = come_to_a_successor(old)
    assert new.counts() == {"free": 2, "released": 6}
    new.advance(0)
    assert new.system(has=1)
    new.settle()
    assert new.counts() == {"free": 4, "released": 4}
    new.advance(AGAIN_MS)
    new.settle()
    assert new.counts() == {"free": 8}
    assert all(rank.slabs == {0, 1, 2, 3} for rank in new.ranks.values())


def test_a_successor_does_not_ask_again_once_somebody_pressed_for_memory():
    old = deserted()
    bury(old)
    old.advance(IDLE_MS)
    old.settle()
    old.two_ranks(11)
    assert old.system(has=2)
    old.settle()
    old.press(UNIT_BYTES)
    old.settle()
    new = come_to_a_successor(old)
    new.advance(2 * AGAIN_MS)
    assert not new.pending
    assert new.counts() == {"free": 2, "released": 6}


def test_it_is_not_asked_for_again_once_somebody_pressed_for_memory():
    rig = deserted()
    bury(rig)
    rig.advance(IDLE_MS)
    rig.settle()
    come(rig)
    assert rig.system(has=2)
    rig.settle()
    rig.press(UNIT_BYTES)
    rig.settle()
    there = rig.counts()
    rig.advance(2 * AGAIN_MS)
    assert not any(isinstance(action, RestoreUnits) for action in rig.pending)
    assert rig.counts() == there


def test_it_is_not_asked_for_again_when_nobody_is_left():
    rig = deserted()
    bury(rig)
    rig.advance(IDLE_MS)
    rig.settle()
    come(rig)
    assert rig.system(has=0)
    for process in (11, 12, 13):
        rig.closed(process)
        rig.ranks.pop(process, None)
        rig.dead(process)
    rig.advance(2 * AGAIN_MS)
    assert not rig.pending


def test_zero_means_never():
    rig = ReleaseRig(4, space_idle_ms=0)
    rig.two_ranks()
    for process in (1, 2):
        rig.closed(process)
        rig.dead(process)
    assert rig.pool.next_deadline_ms() is None
    rig.advance(10_000_000)
    assert rig.counts() == {"free": 8}


@pytest.mark.parametrize(
    "words",
    [
        ["--mover-threads", "0"],
        ["--mover-threads", "65"],
        ["--mover-floor-gb-per-s", "-1"],
        ["--mover-floor-gb-per-s", "nan"],
        ["--mover-floor-gb-per-s", "100000"],
        ["--space-idle-ms", "-1"],
    ],
)
def test_nonsense_is_refused_with_the_settings_name(words):
    with pytest.raises(SettingsError, match=words[0][2:].replace("-", "_")):
        config.load(words)


def test_the_movers_settings_reach_it():
    found = config.load(["--mover-threads", "4", "--mover-floor-gb-per-s", "200", "--pin-host", "false"])
    assert config.copy_options(found) == (False, 4, 200.0, True)
    assert config.copy_options(config.load([])) == (True, 2, 0.0, True)
    assert not config.copy_options(config.load(["--huge-pages", "false"])).huge_pages
