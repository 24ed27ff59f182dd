"""Fair slices where swap space is nearly full: blocks of parked requests have no place, and a request that runs and
needs pages has one of them computed again.

Who that is, a model holds against the rule at each drop (tests/support/full_tier_run.py, in a process of its own); that
answers stay right, a real engine shows.
"""

import pytest

from tests.integration.fair_rig import assert_everything_came_back, in_memory_for_four
from tests.support.told_rows import rows_of

DRAM_PAGES = (24, 24, 12, 24, 12, 24)  # behind an engine with memory for four of twelve requests

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs():
    return rows_of("tests.support.full_tier_run", timeout_s=600)


def test_of_the_parked_only_who_is_here_and_furthest_from_its_turn_is_dropped_and_only_while_pages_are_missing(
    runs,
):
    """The run asserts it at each drop."""
    assert sum(row["num_for_pages"] for row in runs) > 0, "some were dropped for a running request's pages"
    for row in runs:
        fair = row["fair"]
        assert fair.get("dropped_for_pages", 0) == row["num_for_pages"]
        assert fair.get("times_dropped", 0) == row["num_for_pages"] + fair.get("dropped_stuck", 0)


def test_only_who_was_dropped_is_computed_again_and_of_it_no_more_than_it_had(runs):
    for row in runs:
        assert row["fair"]["recomputed_tokens"] == sum(row["again"].values())
        assert not row["preempted"], "nobody who runs is computed again"
        assert row["again"].keys() <= row["dropped"].keys()
        for request_id, tokens in row["again"].items():
            assert tokens <= row["dropped"][request_id]


def test_with_room_for_all_that_leaves_nobody_is_dropped(runs):
    assert "times_dropped" not in runs[-1]["fair"]
    assert runs[-1]["fair"]["recomputed_tokens"] == 0


def test_every_request_gets_all_of_its_tokens_and_nothing_stays_in_swap_space(runs):
    for row in runs:
        assert row["tokens"] == row["asked_tokens"]
        assert row["left"]["kept"] == 0


def test_answers_of_a_real_engine_are_right_though_parked_requests_are_computed_again():
    """Whether somebody is dropped is a matter of time too: it goes again until somebody is."""
    expected = None
    for dram_pages in DRAM_PAGES:
        policies = ("cfs",) if expected else ("fcfs", "cfs")
        with in_memory_for_four({"fair_slice_steps": 2}, policies, dram_pages=dram_pages) as found:
            expected = expected or found["fcfs"]["crowd"]
            assert found["status"]["counters"]["swap_blocks_out_dram"] > 0, "some had a place"
            assert found["cfs"]["crowd"] == expected
            assert found["cfs"]["again"] == expected
            assert_everything_came_back(found)
            counts = found["cfs"]["counts_again"]  # one that was dropped may be one that leaves
            if counts.get("dropped_for_pages") and counts["recomputed_tokens"] > 0:
                return
    raise AssertionError("nobody was dropped and computed again")
