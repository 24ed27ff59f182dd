"""Twelve requests in a real engine's four slots take turns: each goes on where it was, and says what it says in turn.

See fair_rig.py. Among the twelve are prompts that share pages, sampled ones and one with a grammar.
"""

import pytest

from tests.integration.fair_rig import assert_everything_came_back, both_policies, mixed_cases
from tests.integration.test_exactness import MODEL
from tests.integration.test_pages_under_pressure import PAGE_BYTES
from tests.support.exactness_cases import prompts

NUM_PAGES = 400
ANSWER_TOKENS = 64

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found():
    texts = prompts(MODEL)
    cases = mixed_cases([texts[n] for n in (5, 9, 31, 47, 64, 100)], (65, 200), ANSWER_TOKENS)
    with both_policies(cases, {"capacity-bytes": NUM_PAGES * PAGE_BYTES}, {}) as found:
        yield found


def test_twelve_requests_in_four_slots_are_parked_eighty_times_and_nothing_is_computed_twice(found):
    counts = found["cfs"]["counts"]
    assert len(found["cfs"]["crowd"]) == 12
    assert counts["times_parked"] >= 80
    assert counts["times_resumed"] == counts["times_parked"]
    assert counts["recomputed_tokens"] == 0
    assert counts.get("times_dropped", 0) == 0
    assert found["cfs"]["reported"] == [counts["times_parked"], counts["kept_tokens"], 0]
    assert found["cfs"]["served"] == counts["computed_tokens"]
    assert (found["fcfs"]["counts"], found["fcfs"]["reported"]) == ({}, [0, 0, 0])


def test_every_answer_is_that_of_the_order_of_arrival(found):
    assert found["cfs"]["crowd"] == found["fcfs"]["crowd"]


def test_clients_that_leave_while_their_requests_are_parked_change_no_answer(found):
    assert found["cfs"]["again"] == found["fcfs"]["crowd"]
    assert found["cfs"]["counts_again"]["times_parked"] > found["cfs"]["counts"]["times_parked"]
    assert found["cfs"]["counts_again"]["recomputed_tokens"] == 0


def test_every_page_and_lease_came_back(found):
    assert_everything_came_back(found)
