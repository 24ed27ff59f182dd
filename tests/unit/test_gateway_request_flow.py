"""What one request does when things happen to it."""

from services.gateway.core.request_flow import (
    MAX_ATTEMPTS,
    MAX_LOSSES,
    MAX_LOSSES_IN_A_ROW,
    Cancel,
    Complete,
    Discard,
    Fail,
    GoOn,
    Limits,
    Phase,
    RequestFlow,
    SendAbort,
    SendEnded,
    SendGenerate,
    SendPlace,
)
from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.kv.layout import EngineDescription
from shared.wire.handoff import HandoffState
from shared.wire.placement import Held, Placed, Rejected, Target

LIMITS = Limits(
    placement_deadline_ms=1_000,
    shed_wait_ms=200,
    place_reply_ms=100,
    request_deadline_ms=10_000,
    resume_deadline_ms=900,
)
P0 = Target(instance=InstanceId("p0"), epoch=Epoch(1), role="prefill", endpoint="tcp://p0")
D0 = Target(instance=InstanceId("d0"), epoch=Epoch(1), role="decode", endpoint="tcp://d0")
DESCRIPTION = EngineDescription(model="m", fingerprint="f", dtype="float32", layout="l", backend="b")
H = HandoffId("h")
HANDOFF = HandoffState(handoff_id=H, source=P0.instance, description=DESCRIPTION)


def placed(attempt: int, prefill: Target | None = P0, decode: Target = D0) -> Placed:
    return Placed(
        request_id=RequestId("r"), attempt=attempt, decode=decode, prefill=prefill,
        kind="disaggregated" if prefill else "colocated", handoff_id=H,
    )  # fmt: skip


def rejected(attempt: int, code: str = "unavailable", wait_ms: int = 50) -> Rejected:
    return Rejected(
        request_id=RequestId("r"), attempt=attempt, code=code, reason="none", retry_after_ms=wait_ms
    )


def started() -> RequestFlow:
    flow = RequestFlow(LIMITS)
    assert flow.start(now_ms=0) == [SendPlace(1, [])]
    return flow


def decoding() -> RequestFlow:
    flow = started()
    flow.on_placed(placed(1), now_ms=1)
    flow.on_prefilled(1, HANDOFF, now_ms=2)
    assert flow.phase is Phase.DECODING
    return flow


def test_a_request_that_continues_goes_on_behind_what_the_client_has():
    flow = RequestFlow(LIMITS, continues=True)
    flow.start(now_ms=0)
    flow.on_placed(placed(1), now_ms=1)
    flow.on_prefilled(1, HANDOFF, now_ms=2)
    flow.mark_sent()
    actions = flow.on_instance_down(D0.instance, now_ms=3)
    assert actions[-2:] == [GoOn(), SendPlace(2, [D0.instance])]
    assert Discard() not in actions
    flow.on_placed(placed(2, prefill=None, decode=P0), now_ms=4)
    actions = flow.on_failed(2, "x", "text", False, now_ms=5, source=P0.instance)
    assert actions[-1] == Fail("x", "text"), "what can never run is not tried again"


def begun_and_lost() -> RequestFlow:
    """A stream that goes on: it lost its instance at 3 ms and waits for attempt 2."""
    flow = RequestFlow(LIMITS, continues=True)
    flow.start(now_ms=0)
    flow.on_placed(placed(1), now_ms=1)
    flow.on_prefilled(1, HANDOFF, now_ms=2)
    flow.mark_sent()
    flow.on_instance_down(D0.instance, now_ms=3)
    return flow


def test_a_begun_stream_that_no_instance_takes_ends_within_the_resume_deadline():
    flow, now_ms = begun_and_lost(), 3
    while flow.phase is not Phase.ENDED:
        flow.on_rejected(rejected(flow.attempt), now_ms=now_ms)
        assert flow.wants_quick_ticks
        now_ms += 50
        actions = flow.on_tick(now_ms=now_ms)
    assert actions[-1].code == "peer.gone"
    assert 3 + LIMITS.resume_deadline_ms <= now_ms <= 3 + LIMITS.resume_deadline_ms + 50


def test_a_begun_stream_ends_in_time_also_when_its_new_instance_is_silent_or_lost_again():
    flow = begun_and_lost()
    flow.on_placed(placed(2, prefill=None, decode=P0), now_ms=10)
    assert flow.wants_quick_ticks
    flow.on_instance_down(P0.instance, now_ms=400)
    flow.on_tick(now_ms=500)
    flow.on_placed(placed(3, prefill=None, decode=D0), now_ms=510)
    due_ms = 3 + LIMITS.resume_deadline_ms
    assert flow.on_tick(now_ms=due_ms - 1) == []
    *aborts, ended, fail = flow.on_tick(now_ms=due_ms)
    assert aborts == [SendAbort(3, D0)]
    assert ended == SendEnded(3)
    assert fail.code == "peer.gone"


def test_a_stream_that_went_on_owes_nothing_more():
    flow = begun_and_lost()
    flow.on_placed(placed(2, prefill=None, decode=P0), now_ms=10)
    assert flow.mark_resumed(now_ms=100) == 3 + LIMITS.resume_deadline_ms - 100
    assert not flow.wants_quick_ticks
    assert flow.on_tick(now_ms=5_000) == []


def test_an_answer_whose_last_token_has_come_is_complete_though_its_instance_is_gone():
    for lose in (
        lambda flow: flow.on_instance_down(D0.instance, now_ms=3),
        lambda flow: flow.on_failed(1, "x", "text", True, now_ms=3, source=D0.instance),
    ):
        flow = decoding()
        flow.mark_sent()
        flow.mark_answered()
        assert lose(flow)[-1] == Complete()


def test_disaggregated_goes_through_both_stages():
    flow = started()
    (prefill,) = flow.on_placed(placed(1), now_ms=1)
    assert isinstance(prefill, SendGenerate)
    assert (prefill.target, prefill.stage) == (P0, "prefill")
    assert prefill.handoff_to is not None
    assert prefill.handoff_to.target == D0.instance
    assert not flow.accepts(1)  # the prefill's first token is not forwarded
    (decode,) = flow.on_prefilled(1, HANDOFF, now_ms=2)
    assert decode == SendGenerate(1, D0, "decode", 9_998, handoff=HANDOFF)
    assert flow.accepts(1)
    assert flow.on_finished(1) == [SendEnded(1), Complete()]
    assert flow.on_finished(1) == []


def test_colocated_has_one_stage():
    flow = started()
    assert flow.on_placed(placed(1, prefill=None), now_ms=1) == [SendGenerate(1, D0, "colocated", 9_999)]
    assert flow.on_finished(1) == [SendEnded(1), Complete()]


def test_no_handoff_ends_after_prefill():
    flow = started()
    flow.on_placed(placed(1), now_ms=1)
    assert flow.on_prefilled(1, None, now_ms=2) == [SendEnded(1), Complete()]


def test_worker_lost_before_the_first_byte_is_placed_again_without_it():
    flow = decoding()
    actions = flow.on_instance_down(D0.instance, now_ms=5)
    assert actions == [SendAbort(1, P0, H), SendEnded(1), Discard(), SendPlace(2, [D0.instance])]


def test_worker_lost_after_the_first_byte_fails():
    flow = decoding()
    flow.mark_sent()
    *_, last = flow.on_instance_down(D0.instance, now_ms=5)
    assert isinstance(last, Fail)
    assert last.code == "peer.gone"


def test_prefill_lost_while_decoding_changes_nothing():
    flow = decoding()
    assert flow.on_instance_down(P0.instance, now_ms=5) == []
    assert flow.accepts(1)


def test_decode_lost_while_prefilling_is_placed_again():
    flow = started()
    flow.on_placed(placed(1), now_ms=1)
    actions = flow.on_instance_down(D0.instance, now_ms=2)
    assert actions == [SendAbort(1, P0, H), SendEnded(1), Discard(), SendPlace(2, [D0.instance])]


def test_output_of_an_old_attempt_is_refused():
    flow = decoding()
    flow.on_instance_down(D0.instance, now_ms=5)
    flow.on_placed(placed(2, prefill=None), now_ms=6)
    assert not flow.accepts(1)
    assert flow.on_finished(1) == []
    assert flow.on_failed(1, "x", "x", True, now_ms=7, source=None) == []
    assert flow.accepts(2)


def test_stale_epoch_does_not_exclude_the_instance():
    flow = decoding()
    actions = flow.on_failed(1, "epoch.stale", "old", True, now_ms=5, source=D0.instance)
    assert actions[-1] == SendPlace(2, [])


def test_fatal_failure_is_the_answer():
    flow = decoding()
    actions = flow.on_failed(1, "invalid_request", "bad grammar", False, now_ms=5, source=D0.instance)
    assert actions == [SendAbort(1, P0, H), SendEnded(1), Fail("invalid_request", "bad grammar")]


def test_rejection_waits_then_forgets_the_exclusion():
    flow = decoding()
    flow.on_instance_down(D0.instance, now_ms=5)
    assert flow.on_rejected(rejected(2), now_ms=6) == []
    assert flow.on_tick(now_ms=55) == []
    assert flow.on_tick(now_ms=56) == [SendPlace(3, [])]


def test_rejection_ends_at_the_placement_deadline():
    flow = started()
    (fail,) = flow.on_rejected(rejected(1, wait_ms=2_000), now_ms=6)
    assert fail == Fail("overloaded", "none", 2_000)


def test_overload_is_answered_sooner_than_absence():
    flow = started()
    assert isinstance(flow.on_rejected(rejected(1, "overloaded", 201), now_ms=0)[0], Fail)
    flow = started()
    assert flow.on_rejected(rejected(1, "unavailable", 201), now_ms=0) == []


def test_silent_scheduler_is_asked_again_until_the_deadline():
    flow, now_ms, places = started(), 0, 1
    while flow.phase is not Phase.ENDED:
        now_ms += 10
        actions = flow.on_tick(now_ms=now_ms)
        places += sum(isinstance(action, SendPlace) for action in actions)
        assert now_ms < 3_000
    assert isinstance(actions[-1], Fail)
    assert 3 <= places <= 10


def test_client_leaving_aborts_every_involved_instance():
    flow = decoding()
    assert flow.on_client_gone() == [SendAbort(1, D0), SendAbort(1, P0, H), SendEnded(1), Cancel()]
    assert flow.on_client_gone() == []


def test_client_leaving_during_prefill_lets_the_handoff_go_that_may_come():
    flow = started()
    flow.on_placed(placed(1), now_ms=1)
    assert flow.on_client_gone() == [SendAbort(1, P0, H), SendEnded(1), Cancel()]


def test_stop_string_completes_and_aborts():
    flow = started()
    flow.on_placed(placed(1, prefill=None), now_ms=1)
    assert flow.on_satisfied() == [SendAbort(1, D0), SendEnded(1), Complete()]


def test_request_deadline_fails_with_a_timeout():
    flow = decoding()
    *_, last = flow.on_tick(now_ms=10_000)
    assert isinstance(last, Fail)
    assert last.code == "peer.timeout"


def test_a_second_loss_backs_off_and_keeps_the_clock():
    flow = decoding()
    flow.on_instance_down(D0.instance, now_ms=5)
    flow.on_placed(placed(2, prefill=None, decode=P0), now_ms=6)
    assert flow.on_instance_down(P0.instance, now_ms=7)[-1] == Discard()
    assert flow.phase is Phase.BACKOFF
    assert flow.on_tick(now_ms=57) == [SendPlace(3, [D0.instance, P0.instance])]


def test_a_stream_that_got_on_after_a_loss_takes_the_next_one_as_its_first():
    flow = begun_and_lost()
    flow.on_placed(placed(2, prefill=None, decode=P0), now_ms=10)
    flow.on_instance_down(P0.instance, now_ms=20)
    assert flow.phase is Phase.BACKOFF, "no token between the two losses"
    flow.on_tick(now_ms=70)
    flow.on_placed(placed(3, prefill=None, decode=D0), now_ms=80)
    flow.mark_resumed(now_ms=100)
    late_ms = 3 + 5 * LIMITS.placement_deadline_ms
    assert flow.on_instance_down(D0.instance, now_ms=late_ms)[-1] == SendPlace(4, [D0.instance])
    until_ms = late_ms + LIMITS.resume_deadline_ms
    assert flow.on_rejected(rejected(4), now_ms=until_ms - 100) == []
    assert flow.on_tick(now_ms=until_ms)[-1].code == "peer.gone"


def test_a_whole_answer_that_had_output_has_a_fresh_placements_time_after_each_loss():
    late_ms = 5 + 2 * LIMITS.placement_deadline_ms
    for had_output in (True, False):
        flow = decoding()
        flow.mark_output()
        flow.on_instance_down(D0.instance, now_ms=5)
        flow.on_placed(placed(2, prefill=None, decode=P0), now_ms=6)
        if had_output:
            flow.mark_output()
        last = flow.on_instance_down(P0.instance, now_ms=late_ms)[-1]
        assert flow.phase is (Phase.BACKOFF if had_output else Phase.ENDED)
        assert isinstance(last, Discard if had_output else Fail)


def test_losses_are_bounded_however_often_a_stream_gets_on():
    flow, now_ms = begun_and_lost(), 3
    while flow.phase is not Phase.ENDED:
        now_ms += 1
        assert flow.attempt <= MAX_ATTEMPTS
        flow.on_placed(placed(flow.attempt, prefill=None, decode=P0), now_ms=now_ms)
        flow.mark_resumed(now_ms=now_ms)
        actions = flow.on_instance_down(P0.instance, now_ms=now_ms)
        if flow.phase is Phase.BACKOFF:
            actions = flow.on_tick(now_ms=now_ms + 50)
    assert isinstance(actions[-1], Fail)


def test_a_request_that_instances_die_of_is_given_up_and_one_that_met_those_that_go_is_not():
    for code, has_output, most in (
        ("peer.gone", False, MAX_LOSSES_IN_A_ROW),
        ("peer.gone", True, MAX_LOSSES),
        ("draining", False, MAX_ATTEMPTS),
        ("", False, MAX_ATTEMPTS),
    ):
        flow = started()
        for number in range(1, most + 1):
            flow.on_tick(now_ms=flow._wake_ms if flow.phase is Phase.BACKOFF else 1)
            flow.on_placed(placed(number, prefill=None), now_ms=1)
            if has_output:
                flow.mark_output()
            assert flow.phase is Phase.DECODING
            last = flow.on_instance_down(D0.instance, now_ms=2, reached=False) if not code else []
            last = last or flow.on_failed(number, code, "x", True, now_ms=2, source=D0.instance)
        assert (last[-1].code == "cluster.error") == (most < MAX_ATTEMPTS)


def test_a_held_placement_is_waited_for_as_long_as_the_scheduler_says_and_not_beyond_its_deadline():
    def held(attempt: int, wait_ms: int) -> Held:
        return Held(request_id=RequestId("r"), attempt=attempt, wait_ms=wait_ms)

    flow = started()
    flow.on_held(held(2, 600), now_ms=50)
    assert isinstance(flow.on_tick(now_ms=100)[0], SendEnded), "another attempt's word changes nothing"
    flow = started()
    assert flow.on_scheduler(held(1, 600), now_ms=50) == []
    assert flow.on_tick(now_ms=749) == []
    assert isinstance(flow.on_scheduler(placed(1), now_ms=749)[0], SendGenerate)
    flow = started()
    flow.on_held(held(1, 600), now_ms=50)
    assert flow.on_tick(now_ms=750)[0] == SendEnded(1), "the answer is overdue"
    flow = started()
    flow.on_held(held(1, 60_000), now_ms=50)
    assert isinstance(flow.on_tick(now_ms=LIMITS.placement_deadline_ms)[-1], Fail)
