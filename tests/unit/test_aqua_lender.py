"""A process that lends: whatever fails of it, and wherever, what it offered and the memory for it come back."""

import dataclasses
import threading
import time

import pytest

from shared.aqua import lender as module
from shared.aqua.lender import Lender, LenderSettings
from shared.errors import ClusterError, InvalidRequest, OutOfPages, Overloaded, PeerGone, PeerTimeout
from shared.ids import Epoch
from shared.lending.rules import DEFAULT_RULES
from tests.support.lender_world import MOST, PAGE, Own, World


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(Own, "world", made, raising=False)
    monkeypatch.setattr(module, "OwnSpace", Own)

    async def connect(_):
        return made, made

    monkeypatch.setattr(Lender, "_connect", connect)
    return made


@pytest.fixture
def lender(world, request):
    timeout_ms = getattr(request, "param", 60_000)
    made = Lender(LenderSettings("s", "p", "cpu:p", MOST, "http://c", page_bytes=PAGE, timeout_ms=timeout_ms))
    yield made
    world.fails.clear()
    world.leased = 0
    made.close()


FAILURES = [
    {"offer": "refused"}, {"offer": "late"}, {"offer": "not stored"}, {"present": "refused"},
]  # fmt: skip


@pytest.mark.parametrize("fails", FAILURES, ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_nothing_stays_out_of_a_lend_that_failed(world, lender, fails, again):
    if again:
        lender.lend(4 * PAGE)
        lender.reclaim(0)
    world.fails = dict(fails)
    with pytest.raises(ClusterError):
        lender.lend(4 * PAGE)
    world.fails.clear()
    lender.reclaim(0)
    assert (world.memory_bytes, world.open, world.told(), lender.offered_bytes) == (0, {}, [], 0)
    assert lender.lend(4 * PAGE) == 4 * PAGE
    assert world.memory_bytes == 4 * PAGE
    assert len(world.told()) == len(world.open) == 1


@pytest.mark.parametrize("fails", [{"offer": "refused"}, {"present": "refused"}], ids=str)
def test_a_lend_that_was_refused_has_taken_everything_back_when_it_raises(world, lender, fails):
    world.fails = dict(fails)
    with pytest.raises(Overloaded):
        lender.lend(4 * PAGE)
    assert (world.memory_bytes, world.open, world.told()) == (0, {}, [])


def test_an_offer_whose_answer_was_lost_is_presented_again(world, lender):
    world.fails = {"present": "once"}
    assert lender.lend(4 * PAGE) == 4 * PAGE
    assert len(world.open) == 1


@pytest.mark.parametrize("lender", [200], indirect=True)
def test_a_mempool_that_did_not_answer_is_told_by_the_next_reclaim(world, lender):
    world.fails = {"present": "never"}
    with pytest.raises(PeerTimeout):
        lender.lend(4 * PAGE)
    world.fails.clear()
    lender._settings = dataclasses.replace(lender._settings, timeout_ms=60_000)
    (offer,) = world.told()
    world.open[offer.offer_id] = offer.length_bytes  # it heard of it by the coordinator
    lender.reclaim(0)
    assert (world.memory_bytes, world.open, world.told()) == (0, {}, [])


def test_an_offer_that_nobody_can_name_is_not_called_home_while_its_pages_are_out(world, lender):
    world.fails = {"offer": "late"}
    with pytest.raises(PeerTimeout):
        lender.lend(4 * PAGE)
    world.fails = {"offer": "lost"}
    world.leased = 4  # the coordinator told the mempool before it was lost
    with pytest.raises(PeerGone):
        lender.reclaim(0)
    world.leased, world.fails = 0, {}
    lender.reclaim(0)
    assert (world.memory_bytes, world.told()) == (0, [])


def test_memory_that_was_taken_again_for_nothing_is_given_back(world, lender):
    lender.lend(4 * PAGE)
    lender.reclaim(0)
    world.fails = {"regain": True}
    with pytest.raises(PeerTimeout):
        lender.lend(4 * PAGE)
    assert world.memory_bytes == 0
    with pytest.raises(InvalidRequest):
        lender.lend(PAGE // 2)


def test_a_mempool_that_began_anew_without_the_space_has_nothing_to_give_back(world, lender):
    lender.lend(4 * PAGE)
    world.space = None
    world.open.clear()
    assert lender.reclaim(0) < 5
    assert lender.offered_bytes == 0
    assert lender.lend(4 * PAGE) == 4 * PAGE, "in a space of its own there"
    assert world.space == 5


def test_who_closes_gives_the_time_that_the_mempools_budget_takes_to_move_what_is_offered(world, lender):
    lender.lend(4 * PAGE)
    assert lender.budget_bytes_per_s() == 0
    world.rate = PAGE
    assert lender.budget_bytes_per_s() == PAGE
    lender.close()
    assert world.deadlines_ms == [4_000 + DEFAULT_RULES.reclaim_deadline_ms]


@pytest.mark.parametrize("is_known", [False, True])
def test_what_a_dead_lender_of_the_same_name_offered_is_taken_back_by_the_next_one(world, lender, is_known):
    dead = Lender(LenderSettings("s", "p", "cpu:p", MOST, "http://c", page_bytes=PAGE))
    dead.lend(3 * PAGE)
    if not is_known:
        world.open.clear()
    assert lender.lend(4 * PAGE) == 4 * PAGE
    assert list(world.open.values()) == [4 * PAGE]
    assert len(world.told()) == 1
    assert world.deadlines_ms[0] >= DEFAULT_RULES.reclaim_deadline_ms, "its consumers have time to leave"
    lender.reclaim(0)
    assert (world.open, world.told()) == ({}, [])
    dead._is_closed = True  # it never ran its close()
    dead._loop.close()


def test_what_others_offer_is_left_alone(world, lender):
    other = Lender(LenderSettings("s", "q", "cpu:q", MOST, "http://c", page_bytes=PAGE))
    other.lend(2 * PAGE)
    lender.lend(4 * PAGE)
    assert sorted(world.open.values()) == [2 * PAGE, 4 * PAGE]
    world.open.clear()
    other.close()


def test_a_part_is_taken_back_and_the_rest_stays_on_offer(world, lender):
    assert lender.reclaim(0, keep_bytes=PAGE) < 5, "nothing is lent"
    lender.lend(4 * PAGE)
    lender.reclaim(0, keep_bytes=8 * PAGE)
    assert lender.offered_bytes == 4 * PAGE, "no more is lent than that"
    lender.reclaim(0, keep_bytes=3 * PAGE - 1)
    assert (lender.offered_bytes, list(world.open.values())) == (2 * PAGE, [2 * PAGE])
    assert world.memory_bytes == 2 * PAGE, "the device has the rest"
    with pytest.raises(InvalidRequest):
        lender.lend(PAGE)
    lender.reclaim(0)
    assert (lender.offered_bytes, world.open, world.told()) == (0, {}, [])


def test_a_part_whose_mempool_does_not_answer_is_not_home(world, lender):
    lender.lend(4 * PAGE)
    world.coming = [None, 3, None, 0]
    lender.reclaim(0, keep_bytes=PAGE)
    assert world.coming == [], "it looks until it has heard so"
    assert world.memory_bytes == PAGE


@pytest.mark.parametrize("failure", [PeerTimeout, OutOfPages])
def test_a_part_that_did_not_come_home_is_taken_back_by_the_next_reclaim(world, lender, failure):
    lender.lend(4 * PAGE)
    if failure is OutOfPages:
        world.fails = {"release": "once"}
    else:
        world.leased = 3
        lender._settings = dataclasses.replace(lender._settings, timeout_ms=100)
    with pytest.raises(failure):
        lender.reclaim(0, keep_bytes=PAGE)
    assert (world.memory_bytes, lender.offered_bytes) == (MOST // 2, PAGE)
    lender._settings = dataclasses.replace(lender._settings, timeout_ms=60_000)
    world.leased = 0
    lender.reclaim(0, keep_bytes=3 * PAGE)
    assert (world.memory_bytes, lender.offered_bytes) == (PAGE, PAGE), "it was asked for"


def test_it_says_what_is_still_on_offer_when_others_took_some_back_or_the_mempool_began_anew(world, lender):
    assert lender.still_offered_bytes() is None
    lender.lend(4 * PAGE)
    assert lender.still_offered_bytes() == 4 * PAGE
    (offer_id,) = world.open
    world.open[offer_id] = PAGE
    assert lender.still_offered_bytes() == PAGE
    for how, left in (("stale", 0), ("never", None)):
        world.fails = {"present": how}
        assert lender.still_offered_bytes() == left
    world.fails = {}
    world.closed.add(offer_id)
    assert lender.still_offered_bytes() == 0


def test_what_was_on_offer_is_over_when_another_mempool_has_the_pages(world, lender, monkeypatch):
    lender.lend(4 * PAGE)
    world.open.clear()
    monkeypatch.setattr(World, "boot_generation", Epoch(8))
    lender.reclaim(0, keep_bytes=2 * PAGE)
    assert lender.offered_bytes == world.memory_bytes == 0
    assert world.own.came_back, "else none of its pages is free there"


def test_who_ends_soon_waits_no_longer_for_a_mempool_that_is_gone_and_a_call_under_way_neither(world, lender):
    lender.lend(4 * PAGE)
    world.fails = {"present": "never"}
    failures = []

    def reclaim():
        try:
            lender.reclaim(0)
        except PeerTimeout as error:
            failures.append(error)

    under_way = threading.Thread(target=reclaim, daemon=True)
    under_way.start()
    while not lender._lock.locked():
        time.sleep(0.001)
    lender.end_soon(50)
    under_way.join(10)
    assert len(failures) == 1
    with pytest.raises(PeerTimeout):
        lender.close()
    assert world.patience_ms == 50, "nor for the coordinator"
    lender.close()


def test_a_name_that_another_living_process_lends_under_is_refused(world, lender):
    world.rival_looks = 10_000
    with pytest.raises(InvalidRequest, match="another process of this host lends as 'p'"):
        lender.lend(4 * PAGE)
    assert (world.memory_bytes, world.open, world.told()) == (0, {}, [])
    world.rival_looks = 2
    assert lender.lend(4 * PAGE) == 4 * PAGE, "it has just ended, and the mempool sees it a moment later"


def test_of_two_that_begin_at_once_under_a_name_none_goes_on_beside_the_other(world, lender, monkeypatch):
    class Second(Own):
        """Another process attaches at the same moment, and its space is the same."""

        def __init__(self, *_, **__):
            super().__init__()
            world.rival_looks, world.rivals = 10_000, ["engine p", "engine p"]

        def close(self):
            world.memory_bytes = 0

    monkeypatch.setattr(module, "OwnSpace", Second)
    with pytest.raises(InvalidRequest, match="another process"):
        lender.lend(4 * PAGE)
    assert (world.memory_bytes, world.open, world.told()) == (0, {}, [])


def test_a_coordinator_that_knows_no_mempool_of_this_host_says_what_switches_that_on(
    world, lender, monkeypatch
):
    monkeypatch.setattr(World, "boot_generation", Epoch(8))
    with pytest.raises(Overloaded, match="quire up --set memory_market=true"):
        lender.lend(4 * PAGE)
