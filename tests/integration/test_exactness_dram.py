"""Blocks leave small spaces for host memory behind them and come back, also while requests run: tokens equal stock's.

Spaces so small that no second turn, and no repeated prompt, finds its beginning where it was computed. What leaves does
so by itself, or because a caller of the nine calls swaps it out. Workers that are killed meanwhile lose no sealed page.
"""

import asyncio

import httpx
import pytest

from tests.integration.test_exactness import (
    BLOCK_TOKENS,
    CASES,
    FIRST_TURNS,
    assert_same,
    complete,
    completion_body,
    stage,
)
from tests.support import patience
from tests.support.cluster_dram import dram_behind_host_memory, empty, swap_out
from tests.support.exactness_cases import ANSWER_TOKENS, LENGTHS_TOKENS, SECOND_TURNS_AFTER
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SPACE_BYTES = 14 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("dtype=float32", "kv_space=own", f"mempool_bytes={SPACE_BYTES}", "max_model_len=2048")
    words = [word for flag in flags for word in ("--set", flag)]
    home = tmp_path_factory.mktemp("dram") / "home"
    # engines that have all pages, and get no core for a while, give some back for what is read
    env = dram_behind_host_memory(home) | {"QUIRE_MEMPOOL_PULL_PATIENCE_MS": str(patience.MS // 2)}
    with LocalCluster(home, *words, env=env) as cluster:
        yield cluster


def test_the_first_request_of_a_cluster_that_measured_nothing_waits_for_no_room(reference, cluster):
    """No step of these engines took in what the mempool had granted them."""
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        answer = complete(client, CASES["greedy-777"], reference["greedy-777"])
    assert_same("greedy-777", answer, reference["greedy-777"])
    assert answer["quire_receipt"]["times"]["hold"]["actual_ms"] < 1000, answer["quire_receipt"]["reason"]


def test_every_case_equals_stock_while_blocks_go_out_and_come_back(reference, cluster):
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
    dram = next(s for s in pool["spaces"] if s["devices"] == ["cpu:dram"])
    assert dram["num_indexed"] > 50
    assert pool["counters"]["dram_blocks_out"] > 100
    assert not pool["counters"].get("dram_copies_failed")


def kept_tokens(length: int) -> int:
    """Of a first turn: its prompt and answer in whole blocks, but for the answer's last token."""
    return (length + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_conversation_that_is_swapped_out_between_its_turns_goes_on_from_host_memory(
    reference,
    cluster,
):
    first, second = "greedy-257", "second-257"
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        assert_same(first, complete(client, CASES[first], reference[first]), reference[first])
        for instance in ("prefill-0", "decode-0"):
            assert asyncio.run(empty(cluster, instance)) > 0, "engines cache it, and no request uses it"
        before = cluster.pool()["counters"].get("blocks_pulled_from_dram", 0)
        answer = complete(client, CASES[second], reference[second])
    assert_same(second, answer, reference[second])
    prefill = stage(answer, "prefill")
    assert prefill["tokens_pool"] == kept_tokens(257), prefill
    assert prefill["tokens_computed"] == len(reference[second]["prompt"]) - kept_tokens(257), prefill
    back = cluster.pool()["counters"]["blocks_pulled_from_dram"] - before
    assert back >= kept_tokens(257) // BLOCK_TOKENS


def test_requests_that_run_while_the_rest_is_swapped_out_again_and_again_say_the_same(
    reference,
    cluster,
):
    names = [f"greedy-{n}" for n in (33, 100, 257, 511, 640)] * 2

    async def run() -> tuple[list[dict], int]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n])) for n in names
            ]
            answers = asyncio.gather(*posts)
            count = 0
            while not answers.done():
                count += sum(
                    [await swap_out(cluster, instance, 16) for instance in ("prefill-0", "decode-0")]
                )
            return [reply.json() for reply in await answers], count

    answers, count = asyncio.run(run())
    for name, answer in zip(names, answers, strict=True):
        assert_same(name, answer, reference[name])
    assert count > 0


@pytest.mark.parametrize(("victim", "length"), [("prefill-0", 777), ("decode-0", 1500)])
def test_a_worker_killed_between_two_turns_costs_no_sealed_page(reference, cluster, victim, length):
    """kill -9: a new one attaches to the pages; of the conversation only what is new is computed."""
    first, second = f"greedy-{length}", f"second-{length}"
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        assert_same(first, complete(client, CASES[first], reference[first]), reference[first])
        cluster.wait_replaced(victim, cluster.kill(victim))
        answer = complete(client, CASES[second], reference[second])
    assert_same(second, answer, reference[second])
    prefill, decode = stage(answer, "prefill"), stage(answer, "decode")
    assert prefill["tokens_engine"] + prefill["tokens_pool"] == kept_tokens(length), prefill
    assert prefill["tokens_computed"] == len(reference[second]["prompt"]) - kept_tokens(length), prefill
    assert decode["tokens_computed"] == 1, decode
    assert answer["quire_receipt"]["placement"] == "disaggregated"


def test_a_prompt_that_has_gone_out_is_read_from_host_memory_and_not_computed(reference, cluster):
    before = cluster.pool()["counters"]
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
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
    assert cluster.pool_at_rest()["num_leases"] == 0


def test_requests_that_run_while_others_swap_say_the_same(reference, cluster):
    names = [f"greedy-{n}" for n in (33, 64, 100, 161, 257, 400, 511, 777)]

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n]))
                for n in names * 2
            ]
            return [r.json() for r in await asyncio.gather(*posts)]

    def num_moved() -> int:
        """Blocks that went out, or came back: what earlier tests have sent out is there and does not go again."""
        found = cluster.pool()["counters"]
        return found.get("dram_blocks_out", 0) + found.get("blocks_pulled_from_dram", 0)

    before = num_moved()
    for name, answer in zip(names * 2, asyncio.run(run()), strict=True):
        assert_same(name, answer, reference[name])
    assert num_moved() > before
