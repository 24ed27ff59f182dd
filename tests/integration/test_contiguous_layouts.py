"""Without a block table, in both layouts, the cluster's tokens equal stock vLLM's, on the CPU in float32.

`worker.kv_layout` is all that differs from test_exactness.py: prefill and decode apart, prefix hits and handoffs by
aliasing the same pages in other slots.
"""

import asyncio
import json

import httpx
import pytest

from tests.integration.test_exactness import (
    CASES,
    ENDED_BY_FIRST_TOKEN,
    FIRST_TURNS,
    assert_same,
    complete,
    completion_body,
    is_one_token,
    num_computed_by_decode,
    stage,
)
from tests.support.exactness_cases import SECOND_TURNS_AFTER
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]
BLOCK_TOKENS = 32
STEP_TOKENS = 128  # at most, of a prefill worker that computes prompts in parts
LAYOUTS = ["token-major", "layer-major"]


@pytest.fixture(scope="module", params=LAYOUTS)
def cluster(request, tmp_path_factory):
    """1 prefill + 1 decode, float32, one thread, in one of the two layouts."""
    home = tmp_path_factory.mktemp(request.param) / "home"
    env = {"QUIRE_WORKER_KV_LAYOUT": request.param}
    with LocalCluster(home, "--set", "dtype=float32", env=env) as running:
        yield running


def in_use(pool: dict) -> int:
    """Pages that somebody may write, or that a lease pins: not what engines keep or cache."""
    return pool["pages_by_state"].get("writing", 0) + pool["pages_by_state"].get("leased", 0)


def test_every_case_equals_stock_vllm_token_for_token(reference, cluster):
    wrong = []
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        for name in FIRST_TURNS:
            answer = complete(client, CASES[name], reference[name])
            try:
                assert_same(name, answer, reference[name])
                if name not in ENDED_BY_FIRST_TOKEN and not is_one_token(reference[name]):
                    decode = stage(answer, "decode")
                    assert decode is not None, f"{name}: {answer['quire_receipt'].get('reason')}"
                    assert decode["tokens_computed"] == num_computed_by_decode(name), f"{name}: {decode}"
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("length", SECOND_TURNS_AFTER)
def test_a_second_turn_finds_its_prefix_by_aliasing(reference, cluster, length):
    name = f"second-{length}"
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        complete(client, CASES[f"greedy-{length}"], reference[f"greedy-{length}"])
        answer = complete(client, CASES[name], reference[name])
    assert_same(name, answer, reference[name])
    kept_blocks = (len(reference[f"greedy-{length}"]["prompt"]) + 24 - 1) // BLOCK_TOKENS
    prefill, decode = stage(answer, "prefill"), stage(answer, "decode")
    assert prefill["tokens_engine"] + prefill["tokens_pool"] == kept_blocks * BLOCK_TOKENS, prefill
    assert (prefill["blocks_moved"], prefill["bytes_moved"]) == (0, 0), prefill
    prompt_tokens = len(reference[name]["prompt"])
    assert decode["blocks_moved"] == int(prompt_tokens % BLOCK_TOKENS > 0), decode


def test_eight_clients_at_once_get_what_each_would_get_alone(reference, cluster):
    names = [f"greedy-{n}" for n in (5, 33, 64, 100, 161, 257, 400, 777)]

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n])) for n in names
            ]
            return [r.json() for r in await asyncio.gather(*posts)]

    for name, answer in zip(names, asyncio.run(run()), strict=True):
        assert_same(name, answer, reference[name])


def test_aborted_requests_give_their_pages_back_and_disturb_nobody(reference, cluster):
    """Clients that leave in the middle of an answer; then the same prompts again, beside others."""
    names = [f"greedy-{n}" for n in (511, 777, 1000, 1280)]

    async def leave(client: httpx.AsyncClient, name: str) -> None:
        body = {**completion_body(CASES[name], reference[name]), "stream": True, "max_tokens": 400}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and json.loads(line[6:])["choices"]:
                    return

    async def run() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:
            for _ in range(3):
                await asyncio.gather(*(leave(client, name) for name in names))
            deadline = asyncio.get_running_loop().time() + 30
            while in_use(cluster.pool()) > 40:  # writing: stock that once held a partial block
                assert asyncio.get_running_loop().time() < deadline, cluster.pool()["pages_by_state"]
                await asyncio.sleep(0.2)

    before = sum(cluster.pool()["pages_by_state"].values())
    asyncio.run(run())
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        for name in names:
            assert_same(name, complete(client, CASES[name], reference[name]), reference[name])
    assert sum(cluster.pool()["pages_by_state"].values()) == before


@pytest.fixture(scope="module", params=LAYOUTS)
def chunked(request, tmp_path_factory):
    """As `cluster`, in steps so short that most prompts take several."""
    env = {
        "QUIRE_WORKER_KV_LAYOUT": request.param,
        "QUIRE_WORKER_MAX_NUM_BATCHED_TOKENS": str(STEP_TOKENS),
    }
    home = tmp_path_factory.mktemp(f"chunked-{request.param}") / "home"
    with LocalCluster(home, "--set", "dtype=float32", env=env) as running:
        yield running


def test_prompts_computed_in_several_steps_equal_stock_vllm_alone_and_beside_each_other(reference, chunked):
    """Later parts attend to what earlier parts left in the slot: from inside a block, and at its edge."""
    names = [f"greedy-{n}" for n in (96, 128, 161, 257, 640, 1000)]

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=chunked.url, timeout=180) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n])) for n in names
            ]
            return [r.json() for r in await asyncio.gather(*posts)]

    with httpx.Client(base_url=chunked.url, timeout=180) as client:
        alone = {
            name: complete(client, CASES[name], reference[name]) for name in ("greedy-1500", "second-1500")
        }
    for name, answer in alone.items():
        assert_same(name, answer, reference[name])
    prefill = stage(alone["greedy-1500"], "prefill")
    assert prefill is not None
    assert prefill["tokens_computed"] > 11 * STEP_TOKENS, prefill  # no cache had any of it
    for name, answer in zip(names, asyncio.run(run()), strict=True):
        assert_same(name, answer, reference[name])
