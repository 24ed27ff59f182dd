"""Far blocks that fell back to host memory: they go back to lent pages, in time, and no reclaim loses any."""

from services.mempool.core.far_pace import BASE_PAUSE_MS, EVERY_MS, LONG_STAY, MAX_PAUSE_MS, Pace
from shared.wire.mempool_far import NO_PLACE, FarMapped
from tests.unit.test_mempool_far import RANK, FarMarket
from tests.unit.test_mempool_lending import ABCD
from tests.unit.test_mempool_spaces import PREFILL


def in_dram(rig: FarMarket, places: list[int]) -> list[bool]:
    return [rig.core.pools[rig.maps[place][0]].is_dram for place in places]


def go_back(rig: FarMarket, wait_ms: int) -> dict[int, int]:
    """After so long: what has moved, old place to new, and is dropped at the old one."""
    rig.sent[PREFILL].clear()
    rig.advance(wait_ms)
    rig.copied()
    moved = dict(rig.moved())
    rig.drop(*moved)
    return moved


def test_blocks_in_host_memory_go_back_to_pages_that_are_lent_and_the_engine_reads_on():
    rig = FarMarket(places=8)
    places = rig.out(1, ABCD, "abcd")
    assert all(in_dram(rig, places))
    rig.lend(4)
    moved: dict[int, int] = {}
    for _ in range(4):  # half of the places that are free, each time
        moved |= go_back(rig, EVERY_MS)
    now = [moved.get(place, place) for place in places]
    assert not any(in_dram(rig, now))
    assert rig.seen(now) == "abcd"
    assert rig.counters()["far_blocks_back"] == 4
    assert rig.num_placed == 4


def test_no_more_go_back_than_pages_are_lent_and_the_others_stay_readable():
    rig = FarMarket(places=8)
    places = rig.out(1, ABCD, "abcd")
    rig.lend(1)
    moved: dict[int, int] = {}
    for _ in range(4):
        moved |= go_back(rig, EVERY_MS)
    assert len(moved) == 1
    assert rig.seen([moved.get(place, place) for place in places]) == "abcd"
    rig.drop(*[moved.get(place, place) for place in places])
    assert rig.num_placed == 0
    assert not rig.maps


def test_a_reclaim_is_followed_by_a_pause_that_doubles_when_blocks_had_just_come_back():
    rig = FarMarket(places=16)
    places = rig.out(1, ABCD, "abcd")
    pauses = []
    for number in range(3):
        name = f"o{number}"
        rig.offer(4, name)
        rig.present(rig.grant(4, offer=name))
        waited_ms, moved = 0, {}
        while not moved:
            moved = go_back(rig, EVERY_MS)
            waited_ms += EVERY_MS
        pauses.append(waited_ms)
        places = [moved.get(place, place) for place in places]
        rig.sent[PREFILL].clear()
        rig.reclaim(0, 60_000, name)
        rig.copied()
        moved = dict(rig.moved())
        rig.drop(*moved)
        places = [moved.get(place, place) for place in places]
        assert rig.leased() == 0
        assert rig.seen(places) == "abcd"
    assert pauses[0] <= EVERY_MS
    assert pauses[1] + EVERY_MS >= 2 * BASE_PAUSE_MS
    assert pauses[2] + EVERY_MS >= 4 * BASE_PAUSE_MS


def test_a_block_that_cannot_be_mapped_there_stays_where_it_is_read():
    rig = FarMarket(places=8)
    places = rig.out(1, ABCD, "abcd")
    rig.obeys = False
    rig.lend(4)
    rig.advance(EVERY_MS)
    rig.copied()
    rig.sent[PREFILL].clear()
    (number, _), rig.asked[:] = rig.asked[0], []
    rig.obeys = True
    rig.say(RANK, FarMapped(number=number, is_ok=False))
    assert not rig.moved()
    assert rig.seen(places) == "abcd"
    rig.drop(*places)
    assert rig.num_placed == 0


def test_blocks_on_their_way_back_that_are_wanted_back_at_once_go_to_host_memory_again():
    rig = FarMarket(places=8)
    places = rig.out(1, ABCD, "abcd")
    rig.lend(4)
    rig.advance(EVERY_MS)
    rig.reclaim(0, 60_000)
    moved: dict[int, int] = {}
    for _ in range(4):
        moved |= go_back(rig, 1)
    while any(place in moved for place in places):
        places = [moved.get(place, place) for place in places]
    assert rig.leased() == 0
    assert all(in_dram(rig, places))
    assert rig.seen(places) == "abcd"


def test_a_reclaim_of_more_than_there_are_places_for_moves_in_turns_and_loses_nothing():
    rig = FarMarket(places=5)
    rig.lend(4)
    places = rig.out(1, ABCD, "abcd")
    rig.reclaim(0, 60_000)
    moved: dict[int, int] = {}
    for _ in range(6):
        moved |= go_back(rig, 1)
    assert NO_PLACE not in moved.values()
    assert rig.leased() == 0
    assert rig.seen([moved[place] for place in places]) == "abcd"


def test_a_long_stay_ends_the_doubling_of_the_pause():
    pace = Pace()
    for _ in range(10):
        pace.returned(0)
        pace.taken(1)
    assert pace.pause_ms == MAX_PAUSE_MS
    pace.returned(0)
    pace.taken(LONG_STAY * MAX_PAUSE_MS)
    assert pace.pause_ms == BASE_PAUSE_MS
    assert pace.calm_at_ms == LONG_STAY * MAX_PAUSE_MS + BASE_PAUSE_MS
