"""Tokens of the disaggregated cluster equal stock vLLM's, token for token.

One run of stock vLLM (tests/support/stock_reference.py) and one cluster of real processes on the same model, both
float32 on one thread. Every case goes to the gateway over HTTP with token ids in and token ids out.
"""

import asyncio
import json
from pathlib import Path
from unittest import mock

import httpx
import pytest

from deploy.local.services_table import Ports
from loadtest.profiler.live import LiveOptions, LiveRunner
from loadtest.workloads.request import Request, Segment, content_id
from tests.integration.mempool_rig import until
from tests.support.exactness_cases import SECOND_TURNS_AFTER, build_cases

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "deploy" / "models" / "quire-demo"
BLOCK_TOKENS = 32

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


def eos_token_id() -> int:
    config = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    return config[0] if isinstance(config, list) else config


CASES = {case["id"]: case for case in build_cases(MODEL, eos_token_id())}


@pytest.fixture(scope="module")
def cluster(live_cluster):
    """1 prefill + 1 decode, float32, one thread, everything else with default settings."""
    return live_cluster


def completion_body(case: dict, resolved: dict) -> dict:
    """The HTTP request that means the same as the reference's SamplingParams."""
    params = dict(resolved["params"])
    body = {
        "model": "quire-demo",
        "prompt": resolved["prompt"],
        "return_token_ids": True,
        "quire_receipt": True,
        **params,
    }
    if "structured" in case:
        schema = {"name": "answer", "schema": json.loads(case["structured"])}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def complete(client: httpx.Client, case: dict, resolved: dict) -> dict:
    response = client.post("/v1/completions", json=completion_body(case, resolved))
    assert response.status_code == 200, response.text
    return response.json()


def assert_same(case_id: str, answer: dict, expected: dict) -> None:
    choices = sorted(answer["choices"], key=lambda c: c["index"])
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in expected["choices"]], case_id
    assert [c["text"] for c in choices] == [c["text"] for c in expected["choices"]], case_id
    assert [c["finish_reason"] for c in choices] == [c["finish_reason"] for c in expected["choices"]], case_id
    if "logprobs" in expected["params"]:
        for got, want in zip(choices, expected["choices"], strict=True):
            assert got["logprobs"]["token_logprobs"] == pytest.approx(want["logprobs"], abs=2e-4), case_id
    num_tokens = sum(len(c["token_ids"]) for c in expected["choices"])
    assert answer["usage"]["completion_tokens"] == num_tokens, case_id
    assert answer["usage"]["prompt_tokens"] == len(expected["prompt"]), case_id


FIRST_TURNS = [name for name, case in CASES.items() if "after" not in case]
ENDED_BY_FIRST_TOKEN = {"eos-first", "max-tokens-1", "max-tokens-1-seeded"}


def stage(answer: dict, name: str) -> dict | None:
    return next((s for s in answer["quire_receipt"]["stages"] if s["stage"] == name), None)


def is_one_token(wanted: dict) -> bool:
    """A stop string may be in the first token's text already: then the gateway needs nothing of decode."""
    return [len(choice["token_ids"]) for choice in wanted["choices"]] == [1]


def num_computed_by_decode(name: str) -> object:
    """The token that nobody has computed: of the answer, the first, or of the prompt, the last.

    n choices that came later share all whole blocks.
    """
    return 1 if CASES[name]["params"].get("n", 1) == 1 else mock.ANY


def test_every_case_equals_stock_vllm_token_for_token(reference, cluster):
    """One after another, so that no batch mixes requests; second turns last."""
    wrong = []
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        for name in FIRST_TURNS:
            answer = complete(client, CASES[name], reference[name])
            try:
                assert_same(name, answer, reference[name])
                decode = stage(answer, "decode")
                if name in ENDED_BY_FIRST_TOKEN or is_one_token(reference[name]):
                    assert decode is None, f"{name}: handed off although the first token ended it"
                else:
                    receipt = answer["quire_receipt"]
                    assert receipt["placement"] == "disaggregated", f"{name}: {receipt['reason']}"
                    assert decode is not None, f"{name}: decode sent no receipt"
                    assert decode["tokens_computed"] == num_computed_by_decode(name), f"{name}: {decode}"
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("length", SECOND_TURNS_AFTER)
def test_a_second_turn_equals_stock_and_moves_no_whole_block(reference, cluster, length):
    """Both engines work in the same pages: prefill aliases the answer's blocks, decode the new turn's."""
    name = f"second-{length}"
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        complete(client, CASES[f"greedy-{length}"], reference[f"greedy-{length}"])
        answer = complete(client, CASES[name], reference[name])
    assert_same(name, answer, reference[name])
    prompt_tokens = len(reference[name]["prompt"])
    first_prompt = len(reference[f"greedy-{length}"]["prompt"])
    # KV exists for the first prompt and all but the last answer token
    kept_blocks = (first_prompt + 24 - 1) // BLOCK_TOKENS
    decode, prefill = stage(answer, "decode"), stage(answer, "prefill")
    assert decode is not None
    assert prefill is not None
    # Whose page a block lies in (this engine's own cache, or the pool's) depends on who computed it first.
    assert prefill["tokens_engine"] + prefill["tokens_pool"] == kept_blocks * BLOCK_TOKENS, prefill
    assert prefill["tokens_computed"] == prompt_tokens - kept_blocks * BLOCK_TOKENS, prefill
    assert (prefill["blocks_moved"], prefill["bytes_moved"]) == (0, 0), prefill
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == kept_blocks * BLOCK_TOKENS
    # of all that decode found, only the block that it goes on writing is copied
    assert decode["tokens_computed"] == 1, decode
    assert decode["tokens_engine"] + decode["tokens_pool"] == prompt_tokens, decode
    assert decode["blocks_moved"] == int(prompt_tokens % BLOCK_TOKENS > 0), decode


def test_streaming_says_the_same_as_not_streaming(reference, cluster):
    names = ["greedy-100", "seeded-31", "stop-crossing", "n3-short", "eos-first", "max-tokens-1"]
    with httpx.Client(base_url=cluster.url, timeout=180) as client:
        for name in names:
            body = {**completion_body(CASES[name], reference[name]), "stream": True}
            tokens: dict[int, list[int]] = {}
            text: dict[int, str] = {}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            for line in lines[:-1]:
                for choice in json.loads(line[6:])["choices"]:
                    tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                    text[choice["index"]] = text.get(choice["index"], "") + (choice.get("text") or "")
            for index, want in enumerate(reference[name]["choices"]):
                assert tokens.get(index, []) == want["token_ids"], name
                assert text.get(index, "") == want["text"], name


def test_eight_clients_at_once_get_what_each_would_get_alone(reference, cluster):
    """Batched steps in float32: the greedy answers stay the same."""
    names = [f"greedy-{n}" for n in (5, 33, 64, 100, 161, 257, 400, 777)]

    async def run() -> list[dict]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=180) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n])) for n in names
            ]
            return [r.json() for r in await asyncio.gather(*posts)]

    for name, answer in zip(names, asyncio.run(run()), strict=True):
        assert_same(name, answer, reference[name])


def test_a_worker_counts_a_prompt_that_was_handed_over_in_the_share_of_its_pages_that_is_used(cluster):
    """Leases pin it: none of it is the decode engine's own."""
    admin = Ports(gateway=cluster.base + 90, base=cluster.base).worker("decode", 0)[1]
    body = {"model": "quire-demo", "prompt": [9] * (40 * BLOCK_TOKENS), "max_tokens": 600, "ignore_eos": True}

    async def run() -> list[dict]:
        async with httpx.AsyncClient(timeout=180) as client:
            asking, seen = asyncio.create_task(client.post(f"{cluster.url}/v1/completions", json=body)), []
            while not asking.done():
                seen.append((await client.get(f"http://127.0.0.1:{admin}/status")).json())
            assert (await asking).status_code == 200
            return seen

    used = [status for status in asyncio.run(run()) if status["kv_used_bytes"]]
    assert max(status["kv_used_bytes"] for status in used) >= 40 * used[0]["block_bytes"]
    for status in used:
        assert status["kv_used_share"] == pytest.approx(status["kv_used_bytes"] / status["kv_pool_bytes"])


def test_a_profiled_run_needs_the_prompts_that_decode_was_handed_and_no_more(cluster):
    """Prefill sealed them, in pages of the space that both engines work in: decode has even parts of it."""
    admin = [
        Ports(gateway=cluster.base + 90, base=cluster.base).worker(role, 0)[1]
        for role in ("prefill", "decode")
    ]
    urls = tuple(f"http://127.0.0.1:{port}/status" for port in admin)
    until(
        lambda: not httpx.get(urls[1], timeout=30).json()["kv_used_bytes"], "nothing of other tests is used"
    )
    runner = LiveRunner(LiveOptions(url=cluster.url, statuses=urls, max_lag_ms=60_000, sample_ms=20))
    worker = httpx.get(urls[1], timeout=30).json()
    (space,) = cluster.pool()["spaces"]
    assert runner.pool_bytes == space["num_pages"] // 2 * worker["block_bytes"]
    request = Request(
        0, 0.0, "profiled", 0, (Segment(content_id("profiled"), 40 * BLOCK_TOKENS),), 8 * BLOCK_TOKENS
    )
    for _ in range(5):
        observed = runner.run([request])
        if observed.peak_kv_bytes:  # else whoever reads the pages stood still over the whole answer
            break
    assert not [one.error for one in observed.outcomes if one.error]
    assert 40 <= observed.peak_kv_bytes / worker["block_bytes"] <= 40 + 6 + 2, "and a block in advance"
    until(lambda: not httpx.get(urls[1], timeout=30).json()["kv_used_bytes"], "nothing is used")
