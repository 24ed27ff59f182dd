"""The retry budget: its bound, and what a request is told when it is spent."""

import pytest

from services.gateway.core.request_flow import Discard, Fail, RequestFlow, SendPlace
from services.gateway.core.retry_budget import RetryBudget
from tests.unit.test_gateway_request_flow import D0, HANDOFF, LIMITS, placed


def decoding(budget):
    flow = RequestFlow(LIMITS, budget)
    flow.start(now_ms=0)
    flow.on_placed(placed(1), now_ms=0)
    flow.on_prefilled(1, HANDOFF, now_ms=0)
    return flow


def test_what_is_saved_is_taken_and_no_more():
    budget = RetryBudget(share=0.0, floor_per_s=0.0, burst=3.0)
    assert [budget.take(0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert (budget.num_taken, budget.num_refused, budget.left) == (3, 2, 0.0)


def test_four_requests_earn_one_retry_at_a_share_of_a_quarter():
    budget = RetryBudget(share=0.25, floor_per_s=0.0, burst=1.0)
    assert budget.take(0)
    for number in range(1, 5):
        assert not budget.take(0)
        budget.on_request(0)
        assert budget.left == pytest.approx(0.25 * number)
    assert budget.take(0)


def test_time_alone_earns_the_floor():
    budget = RetryBudget(share=0.0, floor_per_s=2.0, burst=1.0)
    assert budget.take(0)
    assert not budget.take(499)
    assert budget.take(501)


def test_a_clock_that_stands_still_or_goes_back_earns_nothing():
    budget = RetryBudget(share=0.0, floor_per_s=1_000.0, burst=1.0)
    assert budget.take(1_000)
    assert not budget.take(1_000)
    assert not budget.take(0)


def test_a_lost_attempt_is_repeated_while_the_budget_lasts_then_fails_with_its_own_code():
    budget = RetryBudget(share=0.0, floor_per_s=0.0, burst=1.0)
    *_, discard, again = decoding(budget).on_instance_down(D0.instance, now_ms=1)
    assert (discard, again) == (Discard(), SendPlace(2, [D0.instance]))
    *_, fail = decoding(budget).on_instance_down(D0.instance, now_ms=2)
    assert isinstance(fail, Fail)
    assert (fail.code, fail.retry_after_ms) == ("peer.gone", 1_000)
    assert "budget" in fail.message
    *_, fail = decoding(budget).on_failed(1, "peer.error", "died", True, now_ms=3, source=D0.instance)
    assert fail.code == "peer.error"


def test_what_would_not_be_repeated_anyway_takes_nothing():
    budget = RetryBudget(share=0.0, floor_per_s=0.0, burst=1.0)
    sent = decoding(budget)
    sent.mark_sent()
    sent.on_instance_down(D0.instance, now_ms=1)
    decoding(budget).on_failed(1, "invalid_request", "no", False, now_ms=1, source=None)
    assert budget.left == 1.0
