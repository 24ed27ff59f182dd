"""Blocks of a prompt that takes several steps leave for decode's space meanwhile; tokens are stock's."""

import httpx
import pytest

from tests.integration.test_exactness import CASES, assert_same, complete, stage
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

NAMES = ["greedy-5", "greedy-777", "seeded-100", "greedy-1500", "n3-short", "greedy-1000"]
STEP_TOKENS = 256


def test_a_handoff_waits_for_the_last_steps_blocks_only(reference, tmp_path):
    flags = ("--set", "dtype=float32", "--set", "kv_space=own", "--topology", "disaggregated")
    env = {"QUIRE_WORKER_MAX_NUM_BATCHED_TOKENS": str(STEP_TOKENS)}
    with LocalCluster(tmp_path / "home", *flags, env=env) as cluster:
        with httpx.Client(base_url=cluster.url, timeout=180) as client:
            answers = {name: complete(client, CASES[name], reference[name]) for name in NAMES}
        pool = cluster.pool_at_rest()
    for name, answer in answers.items():
        assert_same(name, answer, reference[name])
        assert stage(answer, "decode") is not None
    counters = pool["counters"]
    # of 777, 1,000 and 1,500 tokens: whole steps but the last, as far as half of the free pages take them
    assert counters["blocks_ahead"] >= 24, counters
    assert not counters.get("pulls_failed")
    assert (pool["num_leases"], pool["num_handoffs"]) == (0, 0)
