"""Liveness, epochs and load of the scheduler's instances."""

import pytest

from services.scheduler.core.instances import InstanceLimits, Instances
from services.scheduler.core.load import InstanceLoad
from shared.wire.reports import Goodbye, Refused, Resync, Room, Welcome
from tests.support.control_plane import hello, report


def names(instances, now_ms):
    return {known.instance for known in instances.live(now_ms=now_ms)}


def test_an_instance_lives_while_it_reports_and_dies_1500_ms_after():
    instances = Instances()
    assert isinstance(instances.hello(hello("p0"), now_ms=0), Welcome)
    assert names(instances, 1_499) == {"p0"}
    instances.report(report("p0"), now_ms=1_400)
    assert names(instances, 2_899) == {"p0"}
    assert names(instances, 2_900) == set()


def test_a_scheduler_that_stood_still_takes_nobody_for_dead_because_of_it():
    """Its first message after the pause is a request; the reports lie behind it."""
    instances = Instances()
    for name in ("p0", "d0"):
        instances.hello(hello(name), now_ms=0)
    instances.attend(now_ms=0)
    instances.report(report("d0"), now_ms=1_000)
    for now_ms in range(100, 1_100, 100):
        instances.attend(now_ms=now_ms)
    assert names(instances, 1_000) == {"p0", "d0"}
    instances.attend(now_ms=6_000)
    assert names(instances, 6_000) == {"p0", "d0"}
    for now_ms in range(6_100, 6_600, 100):
        instances.attend(now_ms=now_ms)
    assert names(instances, 6_399) == {"p0", "d0"}
    assert names(instances, 6_400) == {"d0"}, "its silence before the pause and after it counts"
    instances.attend(now_ms=30_000)
    assert names(instances, 30_000) == {"d0"}, "who was dead before a pause is dead after it"


def test_a_scheduler_that_stands_still_at_every_turn_sees_who_is_dead():
    """A machine with far too much to do: what was unread at one turn has been read by the next ones."""
    instances = Instances()
    for name in ("p0", "d0"):
        instances.hello(hello(name), now_ms=0)
    for turn in range(15):
        instances.attend(now_ms=turn * 400)
        instances.report(report("d0", seq=turn), now_ms=turn * 400)
        assert names(instances, turn * 400) == {"p0", "d0"}
    instances.attend(now_ms=6_000)
    assert names(instances, 6_000) == {"d0"}
    assert [known.instance for known in instances.tick(now_ms=6_000)] == ["p0"]


def test_a_death_is_told_once_and_a_late_report_revives():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    assert [k.instance for k in instances.tick(now_ms=1_500)] == ["p0"]
    assert instances.tick(now_ms=1_600) == []
    assert names(instances, 1_600) == set()
    assert instances.report(report("p0"), now_ms=1_700) is None
    assert names(instances, 1_700) == {"p0"}
    assert len(instances.tick(now_ms=5_000)) == 1


def test_an_unknown_reporter_is_asked_to_say_hello():
    instances = Instances()
    assert isinstance(instances.report(report("p0", epoch=5), now_ms=0), Resync)
    instances.hello(hello("p0", epoch=5), now_ms=0)
    assert isinstance(instances.report(report("p0", epoch=6), now_ms=0), Resync)
    instances.tick(now_ms=100_000)
    assert isinstance(instances.report(report("p0", epoch=5), now_ms=100_000), Resync)


def test_a_smaller_epoch_is_refused_for_good():
    instances = Instances()
    instances.hello(hello("p0", epoch=5), now_ms=0)
    for _ in range(2):
        for answer in (
            instances.hello(hello("p0", epoch=4), now_ms=0),
            instances.report(report("p0", epoch=4), now_ms=0),
        ):
            assert isinstance(answer, Refused)
            assert answer.code == "epoch.stale"
        instances.tick(now_ms=100_000)  # forgotten, but not its epoch


def test_a_larger_epoch_replaces_and_starts_with_no_load():
    instances = Instances()
    instances.hello(hello("p0", epoch=1), now_ms=0)
    instances.get("p0").load.add_direct(("r", 1), prefill_tokens=9, context_tokens=9, now_ms=0)
    instances.hello(hello("p0", epoch=1), now_ms=0)
    assert instances.get("p0").load.num_open == 1  # a reconnect keeps the account
    instances.hello(hello("p0", epoch=2), now_ms=0)
    assert instances.get("p0").load.num_open == 0


def test_goodbye_removes_only_its_own_epoch():
    instances = Instances()
    instances.hello(hello("p0", epoch=2), now_ms=0)
    assert not instances.goodbye(Goodbye(instance="p0", epoch=1))
    assert names(instances, 0) == {"p0"}
    assert instances.goodbye(Goodbye(instance="p0", epoch=2))
    assert names(instances, 0) == set()


def test_an_epoch_of_the_coordinator_fences_the_older_process_without_refusing_it():
    instances = Instances()
    instances.hello(hello("p0", epoch=5), now_ms=0)
    instances.fence("p0", 5)
    assert names(instances, 0) == {"p0"}
    instances.fence("p0", 6)
    assert names(instances, 0) == set()
    assert isinstance(instances.report(report("p0", epoch=5), now_ms=0), Resync)
    instances.hello(hello("p0", epoch=6), now_ms=0)
    assert names(instances, 0) == {"p0"}


def test_an_old_report_proves_life_but_is_no_news_and_gaps_are_counted():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    instances.report(report("p0", seq=3, num_running=3), now_ms=10)
    instances.report(report("p0", seq=2, num_running=9), now_ms=20)
    assert instances.get("p0").view(now_ms=20).num_requests == 3
    assert instances.get("p0").seen_at_ms == 20
    instances.report(report("p0", seq=6), now_ms=30)
    assert instances.num_report_gaps == 1


def test_a_report_with_a_number_of_somebody_elses_is_news_until_the_third_report_behind_it():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    instances.report(report("p0", seq=2**63 - 1, draining=True), now_ms=1)
    assert instances.report(report("p0", seq=1), now_ms=250) is None
    assert instances.report(report("p0", seq=2), now_ms=500) is None
    assert names(instances, 500) == set()
    assert isinstance(instances.report(report("p0", seq=3), now_ms=750), Resync)
    assert isinstance(instances.report(report("p0", seq=4), now_ms=1_000), Resync), "until it says Hello"
    instances.hello(hello("p0"), now_ms=1_001)
    assert instances.report(report("p0", seq=5, num_running=3), now_ms=1_002) is None
    assert instances.get("p0").view(now_ms=1_002).num_requests == 3
    assert names(instances, 1_002) == {"p0"}


def test_old_reports_with_news_between_them_bring_no_hello():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    for seq in (5, 4, 5, 6, 6, 1, 7):
        assert instances.report(report("p0", seq=seq), now_ms=seq) is None


def test_the_table_is_bounded():
    instances = Instances(InstanceLimits(max_instances=2))
    answers = [instances.hello(hello(f"p{i}"), now_ms=0) for i in range(3)]
    assert [type(a) for a in answers] == [Welcome, Welcome, Refused]


def load():
    return InstanceLoad(max_running=8, max_batched_tokens=1000)


def test_a_placement_counts_until_a_report_that_includes_it():
    one = load()
    one.add_direct(("r", 1), prefill_tokens=500, context_tokens=600, now_ms=100)
    assert one.view(now_ms=100).prefill_tokens == 500
    one.on_report(report("p0"), now_ms=110)  # sent before the request can have arrived
    assert one.view(now_ms=110).num_requests == 1
    one.on_report(report("p0", num_running=1, unfinished_prefill_tokens=400), now_ms=130)
    view = one.view(now_ms=130)
    assert (view.num_requests, view.prefill_tokens) == (1, 400)


def test_a_worker_that_says_what_has_come_is_believed_and_its_prompts_count_once():
    one = load()
    for name, at in (("a", 100), ("b", 101), ("c", 102)):
        one.add_direct((name, 1), prefill_tokens=100, context_tokens=100, prefill_ms=20.0, now_ms=at)
    assert one.view(now_ms=105).queue_ms == 60.0
    one.on_report(report("p0", seq=1, queued_prefill_ms=20.0, arrived=[("b", 1), ("other", 1)]), now_ms=110)
    assert one.view(now_ms=110).queue_ms == 60.0, "b is in the report, a and c are not"
    one.on_report(report("p0", seq=2, queued_prefill_ms=25.0, arrived=[("c", 1)]), now_ms=400)
    assert one.view(now_ms=400).queue_ms == 45.0, "a is on its way, however long its pages take"
    one.on_report(report("p0", seq=4, arrived=[]), now_ms=430)
    assert one.view(now_ms=430).queue_ms == 0.0, "what was said in the lost report is not known"


def test_a_prompt_that_never_comes_to_a_worker_that_says_what_does_stops_counting():
    one = load()
    one.add_direct(("a", 1), prefill_tokens=100, context_tokens=100, prefill_ms=20.0, now_ms=100)
    for seq, now_ms in enumerate((1_000, 10_000, 10_200), start=1):
        one.on_report(report("p0", seq=seq, arrived=[]), now_ms=now_ms)
        assert one.view(now_ms=now_ms).num_requests == (now_ms < 10_100)


@pytest.mark.parametrize(
    "case", ["each its own", "four choices each", "of a scheduler before", "of a registration before"]
)
def test_whatever_runs_at_a_colocated_instance_decodes_there_whoever_placed_it(case):
    instances = Instances()
    instances.hello(hello("c0", role="colocated", max_running=256), now_ms=0)
    names = [f"x{n}" for n in range(15 if case == "four choices each" else 60)]
    if case != "of a scheduler before":
        for name in names:
            more = {"prefill_tokens": 9, "context_tokens": 9, "now_ms": 0, "decodes": True}
            instances.get("c0").load.add_direct((name, 1), **more)
    came = [(name, 1) for name in names]
    instances.report(report("c0", seq=1, num_running=60, arrived=came), now_ms=1)
    epoch = 1
    if case == "of a registration before":
        epoch = 2
        instances.hello(hello("c0", epoch, role="colocated", max_running=256), now_ms=2)
    instances.report(report("c0", epoch, 2, num_running=60, arrived=[]), now_ms=3)
    c0 = instances.get("c0")
    assert c0.view(now_ms=3).num_decodes == 60
    c0.load.add_direct(("r", 1), prefill_tokens=9, context_tokens=9, now_ms=4, decodes=True)
    assert c0.view(now_ms=4).num_decodes == 61
    instances.report(report("c0", epoch, 3, num_running=61, arrived=[("r", 1)]), now_ms=5)
    assert c0.view(now_ms=5).num_decodes == 61
    c0.load.end(("r", 1))
    assert c0.view(now_ms=6).num_decodes == 60, "an end counts before a report knows of it"


def test_prompts_that_leave_a_prefill_instance_are_not_taken_for_decodes():
    instances = Instances()
    instances.hello(hello("p0"), now_ms=0)
    instances.get("p0").load.add_direct(("r", 1), prefill_tokens=9, context_tokens=9, now_ms=0)
    instances.report(report("p0", seq=1, num_running=5, arrived=[("r", 1)]), now_ms=1)
    assert instances.get("p0").view(now_ms=1).num_decodes == 0


def test_a_decode_stage_counts_once_before_and_after_it_arrives():
    one = load()
    one.on_report(report("d0"), now_ms=0)
    one.add_handoff(("r", 1), context_tokens=50, now_ms=0)
    assert one.view(now_ms=5_000).num_requests == 1
    one.on_report(report("d0", num_running=1, running_context_tokens=60), now_ms=6_000)
    view = one.view(now_ms=6_000)
    assert (view.num_requests, view.context_tokens) == (1, 60)


def test_what_is_on_its_way_counts_on_top_of_requests_that_somebody_else_placed():
    """Behind a scheduler's restart, say: its worker runs ten of another's, and says what has come since."""
    one = InstanceLoad(256, 8_192, only_decodes=True)
    one.on_report(report("d0", seq=1, num_running=10, running_context_tokens=1_000, arrived=[]), now_ms=0)
    for number in range(5):
        one.add_handoff((f"r{number}", 1), context_tokens=100, now_ms=10)
    view = one.view(now_ms=11)
    assert (view.num_requests, view.num_decodes, view.context_tokens) == (15, 15, 1_500)
    came = [("r0", 1), ("r1", 1)]
    one.on_report(report("d0", seq=2, num_running=12, running_context_tokens=1_200, arrived=came), now_ms=20)
    view = one.view(now_ms=21)
    assert (view.num_requests, view.context_tokens) == (15, 1_500)


def test_a_hand_off_whose_prompt_is_long_takes_room_until_it_has_come():
    one = InstanceLoad(256, 8_192, only_decodes=True)
    one.on_report(report("d0", seq=1, room=Room(1_000, 400, 0, 64), arrived=[]), now_ms=0)
    one.add_handoff(("long", 1), context_tokens=100_000, now_ms=10, need_blocks=300)
    one.on_report(report("d0", seq=2, room=Room(1_000, 400, 0, 64), arrived=[]), now_ms=15_000)
    assert one.view(now_ms=15_000).room_blocks == 100
    came = report("d0", seq=3, num_running=1, room=Room(1_000, 100, 0, 64), arrived=[("long", 1)])
    one.on_report(came, now_ms=15_100)
    assert one.view(now_ms=15_100).room_blocks == 100


def test_hand_offs_that_a_lost_report_told_of_count_once():
    one = InstanceLoad(256, 8_192, only_decodes=True)
    one.on_report(report("d0", seq=1, arrived=[]), now_ms=0)
    for number in range(5):
        one.add_handoff((f"r{number}", 1), context_tokens=100, now_ms=10)
    one.on_report(report("d0", seq=3, num_running=5, running_context_tokens=500, arrived=[]), now_ms=200)
    view = one.view(now_ms=200)
    assert (view.num_requests, view.context_tokens) == (5, 500)


def test_hand_offs_on_their_way_take_room_behind_a_lost_report_too():
    one = InstanceLoad(256, 8_192, only_decodes=True)
    free = Room(1_000, 400, 0, 64)
    one.on_report(report("d0", seq=1, room=free, arrived=[]), now_ms=0)
    for number in range(5):
        one.add_handoff((f"r{number}", 1), context_tokens=100, now_ms=10, need_blocks=60)
    for seq in (3, 4):
        one.on_report(report("d0", seq=seq, room=free, arrived=[]), now_ms=100 * seq)
        assert one.view(now_ms=100 * seq).room_blocks == 100
    came = report("d0", seq=5, num_running=1, room=Room(1_000, 340, 0, 64), arrived=[("r0", 1)])
    one.on_report(came, now_ms=500)
    assert one.view(now_ms=500).room_blocks == 100


def test_a_decode_stage_whose_end_was_never_told_stops_counting():
    one = load()
    one.add_handoff(("r", 1), context_tokens=50, now_ms=0)
    one.on_report(report("d0", num_running=0), now_ms=11_000)
    view = one.view(now_ms=11_000)
    assert (view.num_requests, view.context_tokens) == (0, 0)
    one.view(now_ms=2_000_000)
    assert one.num_open == 0


def test_load_is_zero_after_the_end():
    one = load()
    one.add_direct(("a", 1), prefill_tokens=5, context_tokens=5, now_ms=0)
    one.add_handoff(("b", 1), context_tokens=7, now_ms=0)
    one.add_handoff(("c", 1), context_tokens=7, now_ms=0)
    one.view(now_ms=10_000)  # b and c are old now
    for key in (("a", 1), ("b", 1), ("c", 1), ("unknown", 1)):
        one.end(key)
    view = one.view(now_ms=10_000)
    assert (one.num_open, view.num_requests, view.prefill_tokens, view.context_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -3.0, 7.0])
def test_a_nonsense_share_from_the_wire_stays_within_bounds(share):
    one = load()
    one.on_report(report("d0", kv_used_share=share, num_running=-4, unfinished_prefill_tokens=-1), now_ms=0)
    view = one.view(now_ms=0)
    assert 0.0 <= view.kv_used_share <= 1.0
    assert (view.num_requests, view.prefill_tokens) == (0, 0)
