"""What the prompts of one request do where there are more of them than places."""

from services.gateway.core.request_flow import (
    MAX_ATTEMPTS,
    Cancel,
    Complete,
    Fail,
    Phase,
    RequestFlow,
    SendPlace,
)
from tests.unit.test_gateway_request_flow import placed, rejected, started


def siblings(number: int) -> list[RequestFlow]:
    flows = [started() for _ in range(number)]
    for flow in flows:
        flow.siblings = flows[0].siblings
    return flows


def test_a_prompt_waits_for_the_others_of_its_request_and_not_for_a_second_only():
    first, second, third = siblings(3)
    first.on_placed(placed(1, prefill=None), now_ms=1)
    now_ms = 1
    while now_ms < 8_000:  # far beyond what sheds, what bounds a placement, and the number of tries
        now_ms += 100
        for flow in (second, third):
            flow.on_tick(now_ms=now_ms)
            flow.on_rejected(rejected(flow.attempt, "overloaded", 10), now_ms=now_ms)
            assert flow.phase is Phase.BACKOFF
    assert second.attempt < 20, "asks now and then"
    attempts = second.attempt, third.attempt
    assert first.on_finished(1)[-1] == Complete()
    assert second.on_tick(now_ms=now_ms) == [SendPlace(attempts[0] + 1, [])], "its place is free"
    assert third.on_tick(now_ms=now_ms) == []
    second.on_placed(placed(second.attempt, prefill=None), now_ms=now_ms)
    assert second.on_client_gone()[-1] == Cancel()
    assert third.on_tick(now_ms=now_ms) == [SendPlace(attempts[1] + 1, [])]


def test_prompts_of_which_some_were_answered_are_not_shed_but_the_deadlines_hold():
    first, second = siblings(2)
    first.on_placed(placed(1, prefill=None), now_ms=1)
    first.on_finished(1)
    now_ms = 300
    assert second.on_rejected(rejected(1, "overloaded"), now_ms=now_ms) == []
    while second.phase is not Phase.ENDED:
        now_ms += 50
        second.on_tick(now_ms=now_ms)
        last = second.on_rejected(rejected(second.attempt, "overloaded"), now_ms=now_ms)
    assert isinstance(last[-1], Fail)
    assert 900 <= now_ms <= 1_100


def test_a_request_of_which_no_prompt_runs_is_shed_as_ever():
    flow = siblings(2)[0]
    assert isinstance(flow.on_rejected(rejected(1, "overloaded", 300), now_ms=1)[-1], Fail)


def test_many_prompts_wait_without_a_bound_on_tries_and_end_with_their_deadline():
    first, second = siblings(2)
    first.on_placed(placed(1, prefill=None), now_ms=1)
    for number in range(1, 2 * MAX_ATTEMPTS):
        assert second.on_rejected(rejected(number, "overloaded"), now_ms=number) == []
        second.wake()
        assert second.on_tick(now_ms=number) == [SendPlace(number + 1, [])]
    assert second.on_tick(now_ms=10_000)[-1].code == "peer.timeout"
