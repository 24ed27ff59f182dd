"""A burst beyond an engine's memory in virtual time: real scheduler, real core of the mempool, full loan, late copies.

The model is tests/support/burst_run.py; it runs in a process of its own, because importing vLLM takes longer than it.
"""

import pytest

from tests.support.told_rows import rows_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs():
    found = rows_of("tests.support.burst_run", timeout_s=800)
    return {row["case"]: row for row in found}


@pytest.mark.parametrize("case", ["peer", "late", "later", "dram"])
def test_nothing_is_computed_again_and_what_left_comes_back(runs, case):
    """Found: eleven requests that were away were computed again, for one page of each (25,626 tokens on H200s)."""
    fair = runs[case]["fair"]
    assert runs[case]["tokens"] == runs[case]["asked_tokens"]
    assert fair["recomputed_tokens"] == 0, fair
    assert not {"times_dropped", "times_preempted"} & set(fair), fair
    assert fair["swapped_in_blocks"] == fair["swapped_out_blocks"] > 1_000, fair
    assert runs[case]["left"]["kept"] == 0


@pytest.mark.parametrize("case", ["peer", "late"])
def test_a_loan_full_of_ended_requests_takes_all_that_is_swapped(runs, case):
    """Found: lent pages kept what nobody wanted, and parked requests' blocks went to host memory."""
    pool, pages = runs[case]["pool"], runs[case]["pages"]
    assert pool["swap_made_way_peer"] > 0
    assert "swap_blocks_out_dram" not in pool
    assert "dram to engine" not in pages


def test_late_copies_delay_those_who_wait_for_them_and_nobody_else(runs):
    """Found: nearly all memory was given to requests whose bytes were still to come, and newcomers waited for it."""
    assert runs["late"]["ttft_p90_ms"] < 1.5 * runs["peer"]["ttft_p90_ms"]
    assert runs["late"]["rct_ms"] < 1.1 * runs["peer"]["rct_ms"]


def test_copies_are_of_many_pages(runs):
    for case in ("peer", "late"):
        pages, copies = runs[case]["pages"]["peer to engine"], runs[case]["copies"]["peer to engine"]
        assert pages > 20 * copies
