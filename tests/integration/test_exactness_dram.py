"""Blocks leave small spaces for host memory behind them and come back, also while requests run: tokens equal stock's.

Spaces so small that no second turn, and no repeated prompt, finds its beginning where it was computed.
"""

import asyncio

import httpx
import pytest

from tests.integration.test_exactness import (
    CASES,
    FIRST_TURNS,
    assert_same,
    complete,
    completion_body,
    reference,  # noqa: F401  the fixture
    stage,
)
from tests.support.exactness_cases import LENGTHS_TOKENS, SECOND_TURNS_AFTER
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SPACE_BYTES = 14 << 20
DRAM = {"QUIRE_MEMPOOL_DRAM_BYTES": str(512 << 20), "QUIRE_MEMPOOL_DRAM_FOR_HOST": "true"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("dtype=float32", "kv_space=own", f"mempool_bytes={SPACE_BYTES}", "max_model_len=2048")
    words = [word for flag in flags for word in ("--set", flag)]
    with LocalCluster(tmp_path_factory.mktemp("dram") / "home", *words, env=DRAM) as cluster:
        yield cluster


def test_every_case_equals_stock_while_blocks_go_out_and_come_back(reference, cluster):  # noqa: F811
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
    dram = next(s for s in pool["spaces"] if s["devices"] == ["cpu:dram"])
    assert dram["num_indexed"] > 50
    assert pool["counters"]["dram_blocks_out"] > 100
    assert not pool["counters"].get("dram_copies_failed")


def test_a_prompt_that_has_gone_out_is_read_from_host_memory_and_not_computed(reference, cluster):  # noqa: F811
    before = cluster.pool()["counters"]
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for length in LENGTHS_TOKENS:
            name = f"greedy-{length}"
            answer = complete(client, CASES[name], reference[name])
            assert_same(name, answer, reference[name])
        for length in SECOND_TURNS_AFTER:
            answer = complete(client, CASES[f"second-{length}"], reference[f"second-{length}"])
            assert_same(f"second-{length}", answer, reference[f"second-{length}"])
            prefill = stage(answer, "prefill")
            assert prefill["tokens_computed"] < len(reference[f"second-{length}"]["prompt"])
    after = cluster.pool()["counters"]
    assert after["blocks_pulled_from_dram"] - before.get("blocks_pulled_from_dram", 0) > 100
    assert cluster.pool()["num_leases"] == 0


def test_requests_that_run_while_others_swap_say_the_same(reference, cluster):  # noqa: F811
    names = [f"greedy-{n}" for n in (33, 64, 100, 161, 257, 400, 511, 777)]

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n]))
                for n in names * 2
            ]
            return [r.json() for r in await asyncio.gather(*posts)]

    before = cluster.pool()["counters"]["dram_blocks_out"]
    for name, answer in zip(names * 2, asyncio.run(run()), strict=True):
        assert_same(name, answer, reference[name])
    assert cluster.pool()["counters"]["dram_blocks_out"] > before
