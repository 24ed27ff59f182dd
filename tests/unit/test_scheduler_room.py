"""Room in decode's pages: who has it is preferred, else one instance, else a bounded wait in order, and it says so."""

import msgspec
import pytest

from services.scheduler.core import room
from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.placement import Placer
from services.scheduler.core.predict import CostSettings
from shared.wire.explain import explain
from shared.wire.placement import Ended, Held, Placed
from shared.wire.reports import Room
from tests.support.control_plane import hello, place, report
from tests.support.cost_view import coefficients

WAIT_MS = 5_000
FULL = Room(100, 4, 2, 64)
FREE = Room(100, 90, 0, 64)


def cluster(rooms, policy="prompt_tree", cost=None, disaggregation="auto", wait_ms=WAIT_MS, **roles):
    """Instances by name with what they say of their pages; 32 tokens a block."""
    limits = PlacementLimits(room_wait_ms=wait_ms, max_held=4)
    made = Placer(Instances(), policy, "boot", limits, CostSettings(disaggregation=disaggregation))
    for name in rooms:
        made.instances.hello(hello(name, role=roles.get(name, _role(name)), cost=cost), now_ms=0)
    tell(made, rooms, 0)
    return made


def _role(name):
    return {"p": "prefill", "d": "decode", "c": "colocated"}[name[0]]


def tell(made, rooms, now_ms, seq=1, **more):
    for name, said in rooms.items():
        made.instances.report(report(name, seq=seq, room=said, **more), now_ms=now_ms)


@pytest.mark.parametrize("policy", ["cost", "prompt_tree", "least_load", "session"])
def test_a_decode_instance_with_room_is_taken_whoever_else_holds_the_prefix(policy):
    made = cluster({"p0": FREE, "d0": FULL, "d1": FREE}, policy, cost=coefficients(), disaggregation="always")
    placed = made.place(place(tokens=320, hits={"d0": 320}, session="s", max_tokens=100), now_ms=1)
    assert (placed.kind, placed.decode.instance) == ("disaggregated", "d1")
    assert "without 1 that lack room in their pages" in placed.reason


def test_a_little_more_than_there_is_room_for_may_wait_at_its_source_so_that_decode_does_not_run_dry():
    nearly = Room(100, 30, 24, 64)  # 6 of 12 wanted; a quarter of its pages is allowed on top
    placed = cluster({"p0": FREE, "d0": nearly}).place(place(tokens=320, max_tokens=64), now_ms=1)
    assert placed.kind == "disaggregated"
    assert "waits there for room" in placed.reason


@pytest.mark.parametrize(("policy", "cost"), [("cost", coefficients()), ("cost", None), ("least_load", None)])
def test_with_no_room_in_decode_one_instance_that_has_it_runs_all_of_the_request(policy, cost):
    made = cluster({"p0": FREE, "d0": Room(100, 0, 30, 64)}, policy, cost)
    placed = made.place(place(tokens=320, max_tokens=64), now_ms=1)
    assert (placed.kind, placed.decode.instance) == ("colocated", "p0")
    assert "no decode instance has room in its pages" in placed.reason


@pytest.mark.parametrize("policy", ["cost", "prompt_tree", "least_load", "session"])
@pytest.mark.parametrize("wait_ms", [0, WAIT_MS])
def test_a_full_decode_instance_beside_one_without_room_is_no_reason_to_refuse(policy, wait_ms):
    """Policies without predictions run whole requests on prefill instances only where no decode instance lives."""
    made = cluster({"p0": FREE, "d0": FREE, "d1": Room(100, 0, 40, 64)}, policy, wait_ms=wait_ms)
    tell(made, {"d0": FREE}, 0, seq=2, num_running=10_000)
    answer = made.place(place(tokens=320, max_tokens=64), now_ms=0)
    if wait_ms:
        assert isinstance(answer, Held)
        tell(made, {"p0": FREE, "d0": FREE, "d1": FREE}, wait_ms, seq=3, num_running=10_000)
        tell(made, {"d1": Room(100, 0, 40, 64), "p0": FREE}, wait_ms, seq=4)
        (answer,) = made.serve_held(now_ms=wait_ms)
    assert (answer.kind, answer.decode.instance) == ("disaggregated", "d1")
    assert "without room in the pages" in answer.reason


def test_who_comes_behind_one_that_left_does_not_wait_for_it():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    made.place(place("r0", tokens=320, max_tokens=64), now_ms=0)
    made.ended(Ended(request_id="r0", attempt=1))
    tell(made, {"d0": FREE}, 10, seq=2)
    assert isinstance(made.place(place("r1", tokens=320, max_tokens=64), now_ms=20), Placed)


def test_answers_are_as_long_as_the_instance_says_at_most_max_tokens():
    rooms = {"p0": None, "d0": Room(1_000, 20, 0, 64)}
    assert isinstance(cluster(rooms).place(place(tokens=320, max_tokens=4_000), now_ms=1), Placed)
    rooms["d0"] = Room(1_000, 20, 400, 0)
    assert isinstance(
        cluster(rooms, disaggregation="always").place(place(tokens=320, max_tokens=9_000), now_ms=1), Held
    )


def test_each_choice_of_a_request_has_its_answer():
    rooms = {"p0": None, "d0": Room(1_000, 10, 0, 64)}
    made = cluster(rooms, disaggregation="always")
    assert isinstance(made.place(place("one", tokens=320, max_tokens=64), now_ms=1), Placed)
    made = cluster(rooms, disaggregation="always")
    many = msgspec.structs.replace(place("many", tokens=320, max_tokens=64), num_choices=128)
    assert isinstance(made.place(many, now_ms=1), Held)


def test_nobody_has_room_so_the_request_is_held_and_placed_with_the_report_that_has_it():
    rooms = {"p0": FREE, "d0": Room(100, 0, 40, 64)}
    made = cluster(rooms, disaggregation="always")
    held = made.place(place(tokens=320, max_tokens=64), now_ms=1)
    assert (held, len(made.waiting)) == (
        Held(request_id="r1", attempt=1, wait_ms=WAIT_MS, reason=held.reason), 1,
    )  # fmt: skip
    assert made.serve_held(now_ms=200) == []
    tell(made, {"d0": FREE, "p0": FREE}, 300, seq=2)
    (placed,) = made.serve_held(now_ms=300)
    assert (placed.kind, placed.held_ms, len(made.waiting)) == ("disaggregated", 299.0, 0)
    assert "waited 299 ms for room" in placed.reason
    assert explain(placed)["quire.held_ms"] == 299.0
    assert made.num_open == 1


def test_whoever_waited_its_time_is_placed_without_room():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    made.place(place(tokens=320, max_tokens=64), now_ms=0)
    for now_ms in range(0, WAIT_MS, 250):
        tell(made, {"p0": FREE, "d0": Room(100, 0, 40, 64)}, now_ms, seq=2 + now_ms)
        assert made.serve_held(now_ms=now_ms) == []
    (placed,) = made.serve_held(now_ms=WAIT_MS)
    assert placed.kind == "disaggregated"
    assert "nobody has room" in placed.reason


def test_held_requests_keep_their_order_and_who_comes_later_does_not_overtake():
    full = {"p0": FREE, "d0": Room(100, 0, 40, 64)}
    made = cluster(full, disaggregation="always")
    made.place(place("large", tokens=1_600, max_tokens=64), now_ms=0)
    tell(made, {"d0": Room(100, 10, 10, 64)}, 10, seq=2)  # with the slack, room for a small one
    assert isinstance(made.place(place("small", tokens=32, max_tokens=32), now_ms=20), Held)
    assert made.serve_held(now_ms=20) == []
    tell(made, {"d0": FREE}, 30, seq=3)
    assert [one.request_id for one in made.serve_held(now_ms=30)] == ["large", "small"]


def test_what_was_placed_and_has_not_arrived_takes_room():
    made = cluster({"p0": FREE, "d0": Room(100, 40, 0, 64)}, disaggregation="always")
    kinds = [type(made.place(place(f"r{n}", tokens=576, max_tokens=64), now_ms=n)) for n in range(5)]
    assert kinds == [Placed, Placed, Placed, Held, Held]  # 20 blocks each: 40, and 25 that may wait there
    made.ended(Ended(request_id="r0", attempt=1))
    assert [one.request_id for one in made.serve_held(now_ms=9)] == ["r3"]


def test_what_has_arrived_is_counted_by_its_worker_alone():
    made = cluster({"p0": FREE, "d0": Room(100, 60, 0, 64)}, disaggregation="always")
    for number in range(3):
        made.place(place(f"r{number}", tokens=576, max_tokens=64), now_ms=number)
    d0 = made.instances.get("d0")
    assert d0.view(now_ms=5).room_blocks == 0
    tell(made, {"d0": Room(100, 40, 0, 64)}, 6, seq=2, num_running=1)
    assert d0.view(now_ms=6).room_blocks == 0
    tell(made, {"d0": Room(100, 60, 60, 64)}, 7, seq=3, num_running=1, num_waiting=2)
    assert d0.view(now_ms=7).room_blocks == 0
    tell(made, {"d0": FREE}, 8, seq=4)
    assert d0.view(now_ms=20_000).room_blocks == 90, "placements whose end was never told stop counting"


def _sixty_that_run(case):
    """60 requests run on d0 and take its pages: by whom the scheduler knows them, if at all."""
    limits, cost = PlacementLimits(room_wait_ms=WAIT_MS), CostSettings(disaggregation="always")
    made = Placer(Instances(), "least_load", "boot", limits, cost)
    for name in ("p0", "d0"):
        made.instances.hello(hello(name, role=_role(name), max_running=256), now_ms=0)
    num_choices = 4 if case == "four choices each" else 1
    names = [f"x{n}" for n in range(60 // num_choices)]
    for name in names if case != "of a scheduler before" else ():
        made.place(place(name, tokens=32, max_tokens=8, num_choices=num_choices), now_ms=1, gateway="g")
    came = [(name, 1) for name in names]
    tell(made, {"d0": Room(1_000, 30, 0, 64)}, 2, seq=2, num_running=60, arrived=came)
    if case == "their gateway was cut off":
        made.tick(now_ms=3, gone=["g"])
    epoch = 1
    if case == "of a registration before":
        epoch = 2
        made.instances.hello(hello("d0", epoch, role="decode", max_running=256), now_ms=3)
    said = report("d0", epoch, 3, num_running=60, room=Room(1_000, 30, 0, 64), arrived=[])
    made.instances.report(said, now_ms=4)
    return made


@pytest.mark.parametrize(
    "case",
    [
        "each its own", "four choices each", "of a scheduler before", "of a registration before",
        "their gateway was cut off",
    ],
)  # fmt: skip
def test_what_is_on_its_way_takes_room_whatever_else_the_worker_counts(case):
    made = _sixty_that_run(case)
    d0 = made.instances.get("d0")
    assert d0.view(now_ms=5).room_blocks == 30
    answers = [made.place(place(f"r{n}", tokens=320, max_tokens=32), now_ms=5) for n in range(40)]
    kinds = [type(one) for one in answers]
    assert kinds == [Placed] * 25 + [Held] * 15, "11 blocks each: 30, and a quarter of all"
    assert d0.view(now_ms=5).room_blocks == 30 - 25 * 11
    came = [(f"r{n}", 1) for n in range(24)]
    said = report("d0", d0.epoch, 4, num_running=84, room=Room(1_000, 30, 264, 64), arrived=came)
    made.instances.report(said, now_ms=6)
    assert d0.view(now_ms=6).room_blocks == 30 - 25 * 11, "24 by their worker, one by the scheduler"


def test_with_too_many_waiting_the_first_goes_without_room_and_the_last_does_not_overtake():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    answers = [made.place(place(f"r{n}", tokens=320, max_tokens=64), now_ms=0) for n in range(6)]
    assert [type(one) for one in answers] == [Held] * 6
    served = made.serve_held(now_ms=10)
    assert [(one.request_id, type(one)) for one in served] == [("r0", Placed), ("r1", Placed)]
    assert len(made.waiting) == 4


def test_who_makes_way_in_one_moment_is_bounded_too_and_another_models_requests_make_none():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    answers = [made.place(place(f"r{n}", tokens=320, max_tokens=64), now_ms=0) for n in range(9)]
    assert [type(one) for one in answers] == [Held] * 8 + [Placed]
    assert not made.waiting._make_way("another")


def test_a_held_request_whose_client_left_is_forgotten():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    for n in range(4):
        assert isinstance(made.place(place(f"r{n}", tokens=320, max_tokens=64), now_ms=0), Held)
    made.ended(Ended(request_id="r0", attempt=1))
    tell(made, {"d0": FREE}, 10, seq=2)
    assert [one.request_id for one in made.serve_held(now_ms=10)] == ["r1", "r2", "r3"]
    assert len(made.waiting) == 0


@pytest.mark.parametrize("case", ["must colocate", "its stream has begun", "held off", "nobody says"])
def test_who_is_never_held(case):
    full = None if case == "nobody says" else Room(100, 0, 40, 64)
    made = cluster(
        {"p0": full, "d0": full}, disaggregation="always", wait_ms=0 if case == "held off" else WAIT_MS
    )
    more = {"must_colocate": case == "must colocate", "begun": case == "its stream has begun"}
    for attempt in (1, 2):
        answer = made.place(place(attempt=attempt, tokens=320, max_tokens=64, **more), now_ms=1)
        assert isinstance(answer, Placed)


def test_attempts_that_come_back_to_a_new_scheduler_wait_like_first_ones_and_overtake_nobody():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    for n, attempt in enumerate((2, 1, 5)):
        asked = place(f"r{n}", attempt=attempt, tokens=320, max_tokens=64)
        assert isinstance(made.place(asked, now_ms=n), Held)
    tell(made, {"d0": FREE}, 10, seq=2)
    assert [one.request_id for one in made.serve_held(now_ms=10)] == ["r0", "r1", "r2"]


def test_looking_for_room_costs_nothing_for_instances_that_have_plenty(monkeypatch):
    looked = []
    monkeypatch.setattr(
        room, "_need", lambda request, said, block_tokens: looked.append(said.num_blocks) or 1_000
    )
    made = cluster({"p0": FREE, "d0": FREE, "d1": Room(4_000, 3_000, 0, 64), "d2": Room(4_000, 3_500, 9, 64)})
    placed = made.place(place(tokens=3_000, max_tokens=500), now_ms=1)  # at most 110 blocks of 32
    assert placed.decode.instance in ("d1", "d2")
    assert looked[0] == 100
    assert len(looked) == 3, "once for d0, and for each of those that were chosen"


def test_held_requests_are_looked_at_once_in_ten_milliseconds_however_many_instances_report():
    made = cluster({"p0": FREE, "d0": Room(100, 0, 40, 64)}, disaggregation="always")
    made.place(place(tokens=320, max_tokens=64), now_ms=0)
    assert made.serve_held(now_ms=5) == []
    tell(made, {"d0": FREE}, 6, seq=2)
    assert [len(made.serve_held(now_ms=now_ms)) for now_ms in (6, 14, 15)] == [0, 0, 1]
