"""Twelve requests in memory for four, by the rules of a burst: first slices at once, then order of arrival, prompts in
chunks beside the decodes. Nothing is computed twice, and answers are those of the order of arrival.

See fair_rig.py and test_fair_swap_engine.py, whose requests these are.
"""

import pytest

from tests.integration.fair_rig import assert_everything_came_back, in_memory_for_four

RULES = {
    "fair_quantum_tokens": 1 << 20,
    "fair_patience_slices": 2,
    "fair_spread_ms": 50.0,
    "fair_chunk_tokens": 32,
}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found():
    with in_memory_for_four(RULES) as found:
        yield found


def test_blocks_leave_and_come_back_and_nothing_is_computed_twice(found):
    counts = found["cfs"]["counts"]
    assert len(found["cfs"]["crowd"]) == 12
    assert counts["times_parked"] >= 12
    assert counts["swapped_in_blocks"] >= 20
    assert counts["recomputed_tokens"] == 0
    assert counts.get("times_dropped", 0) == 0


def test_every_answer_is_that_of_the_order_of_arrival(found):
    assert found["cfs"]["crowd"] == found["fcfs"]["crowd"]
    assert found["cfs"]["again"] == found["fcfs"]["crowd"]


def test_every_page_pin_and_lease_came_back_and_pages_add_up(found):
    assert_everything_came_back(found)
