"""PD-Basic to PD-Caching-3 with spaces of their own: tokens equal stock's, a second turn finds what the mode keeps."""

import time

import httpx
import pytest

from tests.integration.test_exactness import (
    BLOCK_TOKENS,
    CASES,
    FIRST_TURNS,
    assert_same,
    complete,
    stage,
)
from tests.support.exactness_cases import ANSWER_TOKENS
from tests.support.local_cluster import LocalCluster
from tests.support.spans import spans_of_request

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SECOND = [777, 1500]  # decode completes a block behind these prompts
FIRST = [
    name for name in FIRST_TURNS if name not in {f"greedy-{length}" for length in SECOND}
]  # those come later


def num_found(mode: str, length: int) -> int:
    """Blocks of the second turn's prompt that its prefill does not compute."""
    completed = (length + ANSWER_TOKENS - 1) // BLOCK_TOKENS
    assert completed > length // BLOCK_TOKENS
    return {"basic": 0, "1": length // BLOCK_TOKENS, "2": length // BLOCK_TOKENS, "3": completed}[mode]


@pytest.mark.parametrize("mode", ["basic", "1", "2", "3"])
def test_each_mode_says_what_stock_says_and_finds_what_it_keeps(reference, tmp_path, mode):
    words = ["--set", "dtype=float32", "--set", "kv_space=own", "--set", f"pd_caching={mode}"]
    with (
        LocalCluster(tmp_path / "home", *words) as cluster,
        httpx.Client(base_url=cluster.url, timeout=180) as client,
    ):
        for name in FIRST:
            assert_same(name, complete(client, CASES[name], reference[name]), reference[name])
        for length in SECOND:
            first, second = f"greedy-{length}", f"second-{length}"
            before = cluster.pool()["counters"].get("blocks_pushed_back", 0)
            told = complete(client, CASES[first], reference[first])
            assert_same(first, told, reference[first])
            if mode == "3":  # before anybody asks
                deadline = time.monotonic() + 60
                while cluster.pool()["counters"].get("blocks_pushed_back", 0) == before:
                    assert time.monotonic() < deadline, cluster.pool()["counters"]
                    time.sleep(0.02)
                spans = spans_of_request(cluster.home, told["id"], until={"kv.return", "mempool.copy"})
                told_of = {span["name"]: span["attributes"] for span in spans}
                assert told_of["kv.return"]["blocks"] == 1, told_of
                assert told_of["kv.return"]["copy_bytes"] > 0, told_of
                assert told_of["mempool.copy"]["blocks"] == length // BLOCK_TOKENS + 1, (
                    told_of
                )  # its last is not whole
            answer = complete(client, CASES[second], reference[second])
            assert_same(second, answer, reference[second])
            prefill = stage(answer, "prefill")
            expected = len(reference[second]["prompt"]) - num_found(mode, length) * BLOCK_TOKENS
            assert prefill["tokens_computed"] == expected, (mode, prefill)
        counters = cluster.pool()["counters"]
        assert bool(counters.get("blocks_pushed_back")) == (mode == "3")
        assert not counters.get("pulls_failed")
        assert cluster.pool_at_rest()["num_leases"] == 0
