"""Twelve requests in memory for four take turns: their blocks leave for swap space, and nothing is computed twice.

See fair_rig.py; slices are short, so that all leave many times. Among the twelve are prompts that share pages, sampled
ones and one with a grammar.
"""

import pytest

from tests.integration.fair_rig import assert_everything_came_back, in_memory_for_four

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found():
    with in_memory_for_four({"fair_slice_steps": 2}) as found:
        yield found


def test_twelve_requests_in_memory_for_four_leave_eighty_times_and_nothing_is_computed_twice(found):
    counts = found["cfs"]["counts"]
    assert len(found["cfs"]["crowd"]) == 12
    assert counts["times_parked"] >= 80
    assert counts["swapped_out_blocks"] >= 100
    assert counts["swapped_in_blocks"] >= 100
    assert counts["recomputed_tokens"] == 0
    assert counts.get("times_dropped", 0) == 0
    assert counts.get("swap_blocks_lost", 0) == 0
    assert found["fcfs"]["counts"] == {}


def test_every_answer_is_that_of_the_order_of_arrival(found):
    assert found["cfs"]["crowd"] == found["fcfs"]["crowd"]


def test_clients_that_leave_while_their_blocks_are_away_change_no_answer(found):
    assert found["cfs"]["again"] == found["fcfs"]["crowd"]
    assert found["cfs"]["counts_again"]["swapped_in_blocks"] > found["cfs"]["counts"]["swapped_in_blocks"]


def test_every_page_pin_and_lease_came_back_and_pages_add_up(found):
    assert_everything_came_back(found)
