"""Placer: pairs, fallbacks, exclusions, refusals, account of what was placed."""

import math

import pytest

from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.placement import Placer
from shared.wire.placement import Ended, Placed, Rejected
from tests.support.control_plane import description, hello, place, report
from tests.support.cost_view import View, coefficients


def placer(*hellos, policy="prompt_tree", now_ms=0, **limits):
    made = Placer(Instances(), policy, "boot", PlacementLimits(**limits))
    for one in hellos:
        made.instances.hello(one, now_ms=now_ms)
    return made


def pair(**more):
    return placer(hello("p0"), hello("d0", role="decode"), **more)


def test_a_live_pair_serves_disaggregated_under_its_epochs():
    placed = placer(hello("p0", epoch=7), hello("d0", epoch=9, role="decode")).place(place(), now_ms=0)
    assert isinstance(placed, Placed)
    assert (placed.kind, placed.prefill.instance, placed.decode.instance) == ("disaggregated", "p0", "d0")
    assert (placed.prefill.epoch, placed.decode.epoch) == (7, 9)
    assert placed.reason.endswith(".")
    assert placed.policy == "prompt_tree"


def test_handoff_ids_are_unique_within_and_across_lives():
    first, second = pair(), Placer(pair().instances, "least_load", "boot2")
    ids = [p.place(place(f"r{i}"), now_ms=0).handoff_id for p in (first, second) for i in range(5)]
    assert len(set(ids)) == 10


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_one_engine_of_any_role_serves_alone(role):
    placed = placer(hello("only", role=role)).place(place(), now_ms=0)
    assert (placed.kind, placed.decode.instance, placed.prefill) == ("colocated", "only", None)


def test_without_a_pair_colocated_comes_before_decode_before_prefill():
    hellos = [hello("c0", role="colocated"), hello("p0")]
    assert placer(*hellos).place(place(), now_ms=0).decode.instance == "c0"
    other = description(isa="other")
    unlike = placer(hello("p0"), hello("d0", role="decode", description=other)).place(place(), now_ms=0)
    assert (unlike.kind, unlike.decode.instance) == ("colocated", "d0")
    assert "hold KV alike" in unlike.reason


def test_only_instances_with_equal_content_keys_are_paired():
    a, b = description(isa="a"), description(isa="b")
    made = placer(
        hello("pa", description=a), hello("pb", description=b), hello("db", role="decode", description=b)
    )
    for i in range(6):
        placed = made.place(place(f"r{i}"), now_ms=0)
        assert (placed.prefill.instance, placed.decode.instance) == ("pb", "db")


def test_excluded_instances_are_left_out_while_another_lives():
    placed = pair().place(place(exclude=["p0"]), now_ms=0)
    assert (placed.kind, placed.decode.instance) == ("colocated", "d0")


def test_exclusion_gives_way_when_nothing_else_lives():
    placed = pair().place(place(exclude=["p0", "d0"]), now_ms=0)
    assert placed.kind == "disaggregated"


def test_must_colocate_is_obeyed():
    assert pair().place(place(must_colocate=True), now_ms=0).kind == "colocated"


def test_nothing_alive_is_rejected_with_a_time_to_come_back():
    answer = pair().place(place(), now_ms=1_500)
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.retry_after_ms > 0, answer.request_id, answer.attempt) == (
        "no_instance", True, "r1", 1,
    )  # fmt: skip


def test_another_model_is_rejected_by_name():
    answer = pair().place(place(model="other"), now_ms=0)
    assert (answer.code, "'other'" in answer.reason) == ("no_instance", True)


def test_full_instances_reject_as_overloaded_and_recover_when_requests_end():
    made = pair(overload_factor=1.0)
    placed = [made.place(place(f"r{i}", tokens=1), now_ms=0) for i in range(8)]
    assert {p.kind for p in placed} == {"disaggregated"}
    full = made.place(place("r8"), now_ms=0)
    assert (full.code, full.retry_after_ms > 0) == ("overloaded", True)
    made.ended(Ended(request_id="r3", attempt=1))
    assert made.place(place("r8"), now_ms=0).kind == "disaggregated"


def test_a_colocated_engine_takes_what_a_full_pair_cannot():
    made = placer(hello("p0"), hello("d0", role="decode"), hello("c0", role="colocated"), overload_factor=1.0)
    kinds = [made.place(place(f"r{i}", tokens=1), now_ms=0) for i in range(9)]
    assert kinds[8].decode.instance == "c0"
    assert "full" in kinds[8].reason


def test_a_draining_or_departed_instance_gets_nothing():
    made = placer(hello("c0", role="colocated"), hello("c1", role="colocated"))
    made.instances.report(report("c0", draining=True), now_ms=1)
    assert {made.place(place(f"r{i}"), now_ms=2).decode.instance for i in range(4)} == {"c1"}


def test_the_same_attempt_twice_counts_once():
    made = pair()
    made.place(place(), now_ms=0)
    made.place(place(), now_ms=0)
    assert made.num_open == 1
    assert [known.load.num_open for known in made.instances] == [1, 1]


def test_open_attempts_are_bounded_and_the_oldest_goes_first():
    made = pair(max_open=3, overload_factor=100.0)
    for i in range(10):
        made.place(place(f"r{i}"), now_ms=0)
    assert made.num_open == 3
    assert [known.load.num_open for known in made.instances] == [3, 3]


def test_hits_from_the_wire_are_cut_to_the_prompt():
    made = pair()
    placed = made.place(place(tokens=100, hits={"p0": 10**9, "d0": -5, "ghost": 40}), now_ms=0)
    assert (placed.prefill_hit_tokens, placed.decode_hit_tokens) == (100, 0)
    assert made.instances.get("p0").view(now_ms=0).prefill_tokens == 0
    assert made.place(place("r2", tokens=-5), now_ms=0).kind == "disaggregated"


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_predictions_that_make_no_sense_do_not_disturb_who_stands_where(nonsense):
    view = View()
    for number in range(12):
        view.add(f"c{number}", "colocated", cost=coefficients(prefill_ms=nonsense), host=number + 1)
    for number in range(60):
        answer = view.placer.place(place(f"r{number}"), now_ms=number)
        assert isinstance(answer, Placed)
        view.now_ms = number
        view.say(f"c{number % 12}", queued_prefill_ms=nonsense, kv_used_share=nonsense)
        if number % 2:
            view.placer.ended(Ended(request_id=f"r{number - 1}", attempt=1))
    for standing in [standing for _, standing in view.placer._standing.values()]:
        for group in standing.groups["colocated"].values():
            assert sorted(key[2] for key in group.loaded) == sorted(f"c{number}" for number in range(12))


def test_queues_that_drain_again_and_again_leave_nothing_in_the_heap_of_who_is_due():
    """While the oldest whole request is due in fifteen minutes, and each report's queue in 20 ms."""
    made = placer(hello("c0", role="colocated"))
    for number in range(100):
        now_ms = 100 * number
        made.instances.report(report("c0", seq=number, queued_prefill_ms=20.0), now_ms=now_ms)
        for at_ms, name in ((now_ms, f"a{number}"), (now_ms + 50, f"b{number}")):
            assert isinstance(made.place(place(name), now_ms=at_ms), Placed)
        for name in (f"a{number}", f"b{number}") if number else ():
            made.ended(Ended(request_id=name, attempt=1))
    [(_, standing)] = made._standing.values()
    assert len(standing._due) == 1
    assert [(due_ms, "c0") for due_ms in standing.rows["c0"].dues_ms[1:]] == standing._due
