"""Placements whose end nobody tells: of gateways that are gone, and of those that are too old."""

import pytest

from services.scheduler.core import attempts
from services.scheduler.core.gateways import GRACE_MS, MAX_NAME, TURN_COUNTS_MS, Gateways
from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import FORGET_MS, MOST_MS, PlacementLimits, forget_after
from services.scheduler.core.placement import Placer
from shared.wire.placement import Ended, Held, Placed
from shared.wire.reports import Room
from tests.support.control_plane import hello, place, report

TICK_MS = 100
LIMITS = PlacementLimits(overload_factor=2.0, forget_ms=60_000)


def placer(role="colocated", **more):
    made = Placer(Instances(), "least_load", "boot", LIMITS)
    for name in ("a", "b"):
        made.instances.hello(hello(name, role=role, max_running=4, **more), now_ms=0)
    return made


def wait(gateways, now_ms, wait_ms):
    """(time, who is gone)."""
    gone = []
    for later_ms in range(now_ms + TICK_MS, now_ms + wait_ms + 1, TICK_MS):
        gone += gateways.tick(now_ms=later_ms)
    return now_ms + wait_ms, gone


def known(*names):
    gateways = Gateways()
    gateways.tick(now_ms=0)
    for number, name in enumerate(names):
        gateways.hello(bytes([number]), name)
    return gateways


def test_a_gateway_is_gone_once_its_last_connection_has_been_lost_for_the_grace():
    gateways = known("g", "g", "h")
    gateways.lost(b"\0")
    now_ms, gone = wait(gateways, 0, 2 * GRACE_MS)
    assert gone == [], "it has another connection"
    gateways.lost(b"\1")
    now_ms, gone = wait(gateways, now_ms, GRACE_MS - TICK_MS)
    assert gone == []
    now_ms, gone = wait(gateways, now_ms, TICK_MS)
    assert gone == ["g"]
    assert wait(gateways, now_ms, 2 * GRACE_MS)[1] == [], "it is told once"


def test_a_gateway_that_is_back_within_the_grace_is_not_gone():
    gateways = known("g")
    gateways.lost(b"\0")
    now_ms, _ = wait(gateways, 0, GRACE_MS - TICK_MS)
    gateways.hello(b"new", "g")
    now_ms, gone = wait(gateways, now_ms, 2 * GRACE_MS)
    assert gone == []
    gateways.lost(b"new")
    assert wait(gateways, now_ms, GRACE_MS)[1] == ["g"], "and its next loss has a grace of its own"


def test_a_connection_that_is_new_before_the_old_one_is_lost_keeps_the_gateway():
    gateways = known("g")
    gateways.hello(b"new", "g")
    gateways.lost(b"\0")
    assert wait(gateways, 0, 2 * GRACE_MS)[1] == []


def test_the_time_in_which_the_scheduler_stood_still_is_no_absence_of_gateways():
    gateways = known("g")
    gateways.lost(b"\0")
    assert gateways.tick(now_ms=100 * GRACE_MS) == [], "the new connection may lie unread"
    assert wait(gateways, 100 * GRACE_MS, GRACE_MS - TURN_COUNTS_MS)[1] == ["g"]


def test_nonsense_names_and_connections_are_nobody():
    gateways = known("", "x" * (MAX_NAME + 1))
    gateways.hello(b"one", "g")
    gateways.hello(b"one", "other")
    assert [gateways.name(each) for each in (b"\0", b"\1", b"one", b"unknown")] == ["", "", "g", ""]
    for each in (b"\0", b"\1", b"one", b"one", b"unknown"):
        gateways.lost(each)
    assert wait(gateways, 0, GRACE_MS)[1] == ["g"]


def test_a_killed_gateways_requests_hold_no_places_and_those_of_the_others_do():
    made = placer()
    for number in range(4):
        for gateway in ("dead", "alive", ""):
            name = f"{gateway}-{number}"
            assert isinstance(made.place(place(name, tenant=gateway), now_ms=0, gateway=gateway), Placed)
    assert made.tick(now_ms=1, gone=["dead"]) == 4
    assert (made.num_open, made.tick(now_ms=2)) == (8, 0)
    assert not made.tenants.held("dead")
    assert sum(made.tenants.held("alive").values()) == sum(made.tenants.held("").values()) == 4
    assert made.tenants.share("alive", 10_000) == 0.5, "the dead one's tenant wants nothing any more"
    assert sum(each.load.num_open for each in made.instances) == 16, "prompt and decode of eight"
    made.ended(Ended(request_id="dead-0", attempt=1))  # a late word of it
    assert made.num_open == 8


def test_what_is_older_than_any_request_becomes_is_forgotten_and_nothing_younger():
    made = placer()

    def ask(number, now_ms):
        for name in ("a", "b"):
            made.instances.report(report(name, seq=now_ms), now_ms=now_ms)
        assert isinstance(made.place(place(f"r{number}", tenant="t"), now_ms=now_ms), Placed)

    for number in range(4):
        ask(number, number * 10_000)
    assert made.tick(now_ms=LIMITS.forget_ms - 1) == 0
    assert made.tick(now_ms=LIMITS.forget_ms + 10_000) == 2
    ask(2, 75_000)  # the same attempt again is young again
    assert made.tick(now_ms=LIMITS.forget_ms + 30_000) == 1
    assert made.num_open == sum(made.tenants.held("t").values()) == 1
    made.ended(Ended(request_id="r0", attempt=1))
    assert made.num_open == 1


@pytest.mark.parametrize(
    ("deadline_ms", "forgets_ms"),
    [(0, FORGET_MS), (600_000, FORGET_MS), (3_600_000, 3_900_000), (1 << 60, MOST_MS + 300_000)],
)
def test_what_a_gateway_may_still_wait_for_is_not_forgotten(deadline_ms, forgets_ms):
    assert forget_after(deadline_ms) == forgets_ms


def test_requests_that_may_run_for_an_hour_count_for_an_hour_at_instances_that_come_later_too():
    made = Placer(Instances(), "least_load", "boot")
    made.instances.hello(hello("a", role="colocated", max_running=4), now_ms=0)
    for kept in (made, made.instances):
        kept.keep_for(3_900_000)
        kept.keep_for(FORGET_MS)  # another gateway's
    made.instances.hello(hello("b", role="colocated", max_running=4), now_ms=0)
    for number in range(2):
        assert isinstance(made.place(place(f"r{number}", tenant="t"), now_ms=0), Placed)
    for now_ms in (FORGET_MS + 1, 3_899_999):
        for name in ("a", "b"):
            made.instances.report(report(name, seq=now_ms), now_ms=now_ms)
        assert made.tick(now_ms=now_ms) == 0
        for each in made.instances:
            each.load.view(now_ms=now_ms)  # which drops what is too old
        assert sum(len(each.load._colocated) for each in made.instances) == 2
    assert made.tick(now_ms=3_900_000) == 2


def test_one_tick_forgets_a_bounded_number_and_the_next_ones_the_rest(monkeypatch):
    monkeypatch.setattr(attempts, "FORGET_AT_ONCE", 3)
    made = placer()
    for number in range(8):
        made.place(place(f"r{number}"), now_ms=0, gateway="g")
    assert [made.tick(now_ms=1, gone=["g"]), made.tick(now_ms=2), made.tick(now_ms=3)] == [3, 3, 2]
    assert made.num_open == 0


def test_a_hand_off_that_nobody_ended_takes_no_room_for_ever():
    """Reports say that one runs, and count its pages: what is forgotten must not be taken for others on their way."""
    made = Placer(Instances(), "least_load", "boot", LIMITS)
    for name, role in (("p", "prefill"), ("d", "decode")):
        made.instances.hello(hello(name, role=role), now_ms=0)
    room = Room(1_000, 1_000, 0)
    made.instances.report(report("d", room=room), now_ms=0)
    for number in range(4):
        made.place(place(f"dead-{number}", tokens=320, max_tokens=320), now_ms=0, gateway="dead")
    made.tick(now_ms=20_000, gone=["dead"])
    for seq, name in enumerate(("p", "d")):
        made.instances.report(report(name, seq=seq + 1, room=room), now_ms=20_000)
    made.place(place("r", tokens=320, max_tokens=320), now_ms=20_000)
    made.instances.report(report("d", seq=9, num_running=1, room=Room(1_000, 980, 0)), now_ms=20_100)
    assert made.instances.get("d").view(now_ms=20_100).room_blocks == 980


def test_a_request_that_was_held_is_its_gateways_when_it_is_placed():
    made = Placer(Instances(), "cost", "boot", PlacementLimits(room_wait_ms=5_000))
    for name, role in (("p", "prefill"), ("d", "decode")):
        made.instances.hello(hello(name, role=role), now_ms=0)
        made.instances.report(report(name, room=Room(100, 0, 0)), now_ms=0)
    assert isinstance(made.place(place("r", tokens=320), now_ms=0, gateway="g"), Held)
    for name in "pd":
        made.instances.report(report(name, seq=1, room=Room(100, 100, 0)), now_ms=100)
    assert [type(answer) for answer in made.serve_held(now_ms=100)] == [Placed]
    assert made.tick(now_ms=200, gone=["g"]) == 1
