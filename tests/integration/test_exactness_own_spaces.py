"""Prefill and decode have their pages in spaces of their own, as on two GPUs: what decode lacks is copied.

The cases of test_exactness.py against the same kind of reference; here every handoff goes through the mempool's copies.
"""

import httpx
import pytest

from tests.integration.test_exactness import (
    BLOCK_TOKENS,
    CASES,
    FIRST_TURNS,
    assert_same,
    complete,
    reference,  # noqa: F401  the fixture
    stage,
)
from tests.support.exactness_cases import SECOND_TURNS_AFTER
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--set", "dtype=float32", "--set", "kv_space=own")
    with LocalCluster(tmp_path_factory.mktemp("own") / "home", *flags) as cluster:
        yield cluster


def test_every_case_equals_stock_and_blocks_are_copied_between_the_spaces(reference, cluster):  # noqa: F811
    wrong = []
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for name in FIRST_TURNS:
            answer = complete(client, CASES[name], reference[name])
            try:
                assert_same(name, answer, reference[name])
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
        assert not wrong, "\n".join(wrong)
        pool = cluster.pool()
        assert len(pool["spaces"]) == 2
        assert pool["counters"]["blocks_pulled"] > 100
        assert not pool["counters"].get("pulls_failed")
        for length in SECOND_TURNS_AFTER:
            second(client, length, reference)
    assert cluster.pool()["num_leases"] == 0


def second(client, length, reference):  # noqa: F811
    """The next turn: prefill finds what decode made, after a copy (PD-Caching-3's return, when it is wanted)."""
    name = f"second-{length}"
    answer = complete(client, CASES[name], reference[name])
    assert_same(name, answer, reference[name])
    first_prompt = len(reference[f"greedy-{length}"]["prompt"])
    kept_blocks = (first_prompt + 24 - 1) // BLOCK_TOKENS
    prefill = stage(answer, "prefill")
    assert prefill["tokens_engine"] + prefill["tokens_pool"] == kept_blocks * BLOCK_TOKENS, prefill
