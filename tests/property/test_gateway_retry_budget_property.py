"""Retries never exceed share * requests + floor * time + burst, whatever comes in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.retry_budget import RetryBudget

EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 500)), max_size=300)


@given(EVENTS, st.sampled_from([0.0, 0.1, 0.2, 1.0]), st.sampled_from([0.0, 1.0, 5.0]), st.integers(0, 20))
def test_retries_are_bounded_by_requests_time_and_burst(events, share, floor_per_s, burst):
    budget = RetryBudget(share, floor_per_s, float(burst))
    now_ms = requests = taken = 0
    for is_request, elapsed_ms in events:
        now_ms += elapsed_ms
        if is_request:
            requests += 1
            budget.on_request(now_ms)
        else:
            taken += budget.take(now_ms)
        assert taken <= share * requests + floor_per_s * now_ms / 1000 + burst + 1e-6
        assert 0 <= budget.left <= burst
    assert taken == budget.num_taken
