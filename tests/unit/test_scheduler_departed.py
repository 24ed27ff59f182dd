"""What a worker held that drains or has left is fetched from its mempool, which has it; nothing is placed there."""

from types import SimpleNamespace

from msgspec import structs

from services.scheduler.core.departed import KEPT_MS, MAX_DEPARTED, Departed
from services.scheduler.core.instances import CONTRADICTED_POLLS, Instances
from shared.wire.placement import PrefixHit
from shared.wire.reports import Goodbye
from tests.support.control_plane import hello, place
from tests.support.cost_view import View
from tests.unit.test_scheduler_cost import ask
from tests.unit.test_scheduler_epochs import members

FAR = ("remote", "p0", "tcp://one")


def hosts(**more):
    """p0 holds what is asked for; p1 and d0 are on another host."""
    view = View(disaggregation="always").add("p0", host=1, address="tcp://one", **more)
    return view.add("p1", host=2, address="tcp://two").add("d0", "decode", host=2, address="tcp://two")


def leave(view, name="p0"):
    assert view.placer.instances.goodbye(Goodbye(instance=name, epoch=1))
    return view


def fetched(view, held=800, **more):
    """What p1, which gets the request, is told to fetch; None: nothing."""
    placed = ask(view, hits={"p0": held}, **more)
    assert placed.prefill.instance == "p1"
    kv = placed.kv
    return None if kv is None or kv.recompute else (kv.path, kv.source, kv.source_mempool)


def test_what_an_instance_held_that_left_is_fetched_from_its_mempool():
    view = leave(hosts())
    assert fetched(view) == FAR
    assert view.placer.instances.get("p0") is None


def test_what_an_instance_holds_that_drains_is_fetched():
    view = hosts().say("p0", draining=True)
    assert fetched(view) == FAR


def test_within_a_host_it_is_brought_from_the_space_that_the_instance_was_in():
    view = View(disaggregation="always").add("p0", space=1).add("p1", space=2).add("d0", "decode", space=3)
    assert fetched(leave(view)) == ("peer", "p0", "")


def test_host_memory_behind_it_is_a_source_too():
    view = View(disaggregation="always").add("p0", space=1).add("p1", space=2).add("d0", "decode", space=3)
    asked = structs.replace(place(hits={"p0": 320}, tokens=1_000), hits=[PrefixHit("p0", 800, "dram")])
    placed = leave(view).placer.place(asked, now_ms=0)
    assert (placed.prefill.instance, placed.kv.path, placed.kv.tokens) == ("p1", "dram", 800)


def test_an_unmeasured_way_to_it_is_tried_like_any_other():
    view = leave(hosts()).say("p1", links={})
    assert fetched(view) == FAR


def test_blocks_that_cannot_leave_its_host_are_not_fetched():
    assert fetched(leave(hosts(crosses=False))) is None


def test_an_instance_that_is_silent_without_a_goodbye_is_no_source():
    view = hosts()
    view.now_ms = 2_000
    view.say("p1").say("d0")
    assert fetched(view) is None


def test_an_instance_that_is_back_is_itself_again():
    view = leave(hosts()).add("p0", host=1, address="tcp://one", queued_prefill_ms=9_000.0)
    assert view.placer.instances.get("p0") is not None
    assert fetched(view) == FAR


def test_after_as_long_as_a_mempool_keeps_such_pages_it_is_forgotten():
    view = leave(hosts())
    for now_ms, found in ((KEPT_MS - 1, FAR), (KEPT_MS, None)):
        view.now_ms = now_ms
        view.say("p1").say("d0")
        assert fetched(view, name=f"r{now_ms}") == found


def test_one_whose_epoch_nobody_granted_is_no_source():
    instances = Instances()
    instances.hello(hello("d0", epoch=9), now_ms=0)
    instances.goodbye(Goodbye(instance="d0", epoch=9))
    assert instances.source("d0", now_ms=0) is not None
    for _ in range(CONTRADICTED_POLLS):
        instances.follow(members(5))
    assert instances.source("d0", now_ms=0) is None


def test_those_that_left_are_bounded_and_the_last_ones_stay():
    departed = Departed()
    for number in range(MAX_DEPARTED + 5):
        departed.add(SimpleNamespace(instance=f"i{number}", seen_at_ms=0))
    assert len(departed) == MAX_DEPARTED
    assert departed.find("i4", now_ms=0) is None
    assert departed.find(f"i{MAX_DEPARTED + 4}", now_ms=0) is not None
