"""Leases of requests that wait, in each other's way: which end, and when, until one of the requests runs."""

import pytest

from shared.engine.lease_stalls import NEXT_S, STALL_S, LeaseStalls

STEP_S = 0.001  # an engine with nothing to run looks again so soon


def ended(num_to_end, steps=400):
    """(whose, when) of the leases of a, b and c that end, where so many must before a request runs.

    The pages of a lease are there half of NEXT_S after its end.
    """
    stalls, held, found = LeaseStalls(), ["a", "b", "c"], []
    for now_s in (number * STEP_S for number in range(steps)):
        if sum(now_s - at_s >= NEXT_S / 2 for _, at_s in found) >= num_to_end:
            stalls.runs()
        elif (request_id := stalls.to_end(held, now_s)) is not None:
            held.remove(request_id)
            found.append((request_id, now_s))
    return found


@pytest.mark.parametrize("num_to_end", [1, 2, 3])
def test_no_more_leases_end_than_it_takes_for_a_request_to_run_the_last_in_the_queue_first(num_to_end):
    found = ended(num_to_end)
    assert [request_id for request_id, _ in found] == ["c", "b", "a"][:num_to_end]
    assert found[0][1] == pytest.approx(STALL_S, abs=2 * STEP_S)
    assert found[-1][1] < STALL_S + num_to_end * (NEXT_S + STEP_S), "a queue full of them is no long wait"


def test_a_stall_that_ends_by_itself_ends_no_lease():
    stalls = LeaseStalls()
    for number in range(1_000):
        assert stalls.to_end(["a"], number * STEP_S) is None
        if number % 90 == 89:
            stalls.runs()


def test_nobody_has_a_lease_to_end():
    stalls = LeaseStalls()
    assert [stalls.to_end([], number * STALL_S) for number in range(5)] == [None] * 5
    assert stalls.to_end(["a"], 5 * STALL_S) == "a"
