"""A space whose engines are gone loses its memory in time, and gets it back with the next one."""

import pytest

from services.mempool import config
from shared.errors import SettingsError
from tests.unit.mempool_harness import Harness, chain
from tests.unit.mempool_release_rig import ReleaseRig

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
    assert config.copy_options(found) == (False, 4, 200.0)
    assert config.copy_options(config.load([])) == (True, 2, 0.0)
