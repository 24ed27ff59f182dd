"""Prefill and decode have their pages in spaces of their own, as on two GPUs: what decode lacks is copied.

The cases of test_exactness.py against the same kind of reference; here every handoff goes through the mempool's copies.
"""

import asyncio

import httpx
import pytest

from deploy.local.services_table import Ports
from shared.wire.requests import KvPlan
from tests.integration.kv_plan_check import ask_both
from tests.integration.test_exactness import (
    BLOCK_TOKENS,
    CASES,
    FIRST_TURNS,
    assert_same,
    complete,
    completion_body,
    stage,
)
from tests.support.exactness_cases import SECOND_TURNS_AFTER
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--set", "dtype=float32", "--set", "kv_space=own")
    env = {"QUIRE_WORKER_FETCH_WAIT_MS": "10000"}  # what is fetched comes, however busy the machine is
    env["QUIRE_WORKER_EARLY_FROM_TOKENS"] = "1"  # every prompt goes to the engine while its pages come
    with LocalCluster(tmp_path_factory.mktemp("own") / "home", *flags, env=env) as cluster:
        yield cluster


def test_every_case_equals_stock_and_blocks_are_copied_between_the_spaces(reference, cluster):
    wrong = []
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
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
    assert cluster.pool_at_rest()["num_leases"] == 0
    assert num_early(cluster, "prefill") > 10
    assert num_early(cluster, "decode") > 10


def num_early(cluster, role):
    """Prompts that went to that engine before their leases."""
    _, admin = Ports(gateway=cluster.base + 90, base=cluster.base).worker(role, 0)
    lines = httpx.get(f"http://127.0.0.1:{admin}/metrics", timeout=30).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("quire_worker_early_requests_total")
    )


def test_a_prompt_that_another_instance_holds_is_fetched_or_computed_as_told(cluster):
    """MemServe eq 2's verdict, executed: nothing is computed twice, or nothing is moved; the tokens are the same."""
    holder, reader = (worker_of(cluster, role) for role in ("prefill", "decode"))
    fetch = KvPlan(reach="host", source="prefill-0", tokens=320, path="peer")
    fetched = ask_both(holder, reader, fetch, seed=1)
    assert fetched.second == fetched.first
    assert (fetched.receipt.tokens_peer, fetched.receipt.tokens_computed) == (320, 10), fetched.receipt
    assert (fetched.receipt.fetch_path, fetched.receipt.bytes_fetched > 0) == ("peer", True)
    recompute = KvPlan(reach="own", source="prefill-0", tokens=320, path="peer", recompute=True)
    computed = ask_both(holder, reader, recompute, seed=2)
    assert computed.second == computed.first
    assert (computed.receipt.tokens_pool, computed.receipt.tokens_computed) == (0, 330), computed.receipt
    assert computed.receipt.bytes_fetched == 0


def worker_of(cluster, role):
    """(endpoint, epoch)."""
    _, admin = Ports(gateway=cluster.base + 90, base=cluster.base).worker(role, 0)
    status = httpx.get(f"http://127.0.0.1:{admin}/status", timeout=30).json()
    return status["endpoint"], status["epoch"]


def second(client, length, reference):
    """The next turn: prefill finds what decode made, after a copy (PD-Caching-3's return, when it is wanted)."""
    name = f"second-{length}"
    answer = complete(client, CASES[name], reference[name])
    assert_same(name, answer, reference[name])
    first_prompt = len(reference[f"greedy-{length}"]["prompt"])
    kept_blocks = (first_prompt + 24 - 1) // BLOCK_TOKENS
    prefill = stage(answer, "prefill")
    assert prefill["tokens_engine"] + prefill["tokens_pool"] == kept_blocks * BLOCK_TOKENS, prefill


def test_tiny_spaces_under_load_answer_everything_as_stock_does(reference, tmp_path):
    """Decode's engine has to give pages back for what is copied to it; nothing hangs, nothing is left."""
    flags = ("--set", "dtype=float32", "--set", "kv_space=own", "--set", "max_model_len=2048")
    flags += ("--set", f"mempool_bytes={90 * 196_608}")
    names = [name for name in FIRST_TURNS if CASES[name]["params"].get("temperature") == 0][:16]
    with LocalCluster(tmp_path / "home", *flags) as cluster:
        answers = asyncio.run(all_at_once(cluster.url, names, reference))
        pool = cluster.pool_at_rest()
    wrong = []
    for name, answer in zip(names, answers, strict=True):
        try:
            assert_same(name, answer, reference[name])
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)
    assert pool["counters"]["pages_asked_back"] > 0, pool["counters"]
    assert pool["counters"]["blocks_pulled"] > 0, pool["counters"]
    assert pool["num_leases"] == 0
    assert pool["num_handoffs"] == 0


async def all_at_once(url, names, reference):
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        asked = [client.post("/v1/completions", json=completion_body(CASES[n], reference[n])) for n in names]
        replies = await asyncio.gather(*asked)
    assert [reply.status_code for reply in replies] == [200] * len(names), [reply.text for reply in replies]
    return [reply.json() for reply in replies]
