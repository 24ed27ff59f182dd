"""A pair of real engines in little memory, asked for far more than fits: what prefill computed is computed once."""

import asyncio
import random

import httpx
import pytest

from tests.integration.test_exactness import stage
from tests.support.local_cluster import LocalCluster

PAGE_BYTES = 2 * 6 * 2 * 64 * 32 * 4  # K and V, layers, heads, their size, tokens, float32
NUM_PAGES = 56  # of each engine; a request takes 9 to 20
NUM_REQUESTS = 12
FLAGS = ("dtype=float32", "kv_space=own", f"mempool_bytes={NUM_PAGES * PAGE_BYTES}", "max_model_len=1472")

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def bodies() -> list[dict]:
    rng = random.Random(7)
    common = {"model": "quire-demo", "temperature": 0, "ignore_eos": True}
    return [
        {
            **common,
            "prompt": [rng.randrange(5, 4000) for _ in range(rng.randint(150, 400))],
            "max_tokens": rng.randint(120, 240),
            "return_token_ids": True,
            "quire_receipt": True,
        }
        for _ in range(NUM_REQUESTS)
    ]


async def ask(url: str) -> list[dict]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies()))
    assert [reply.status_code for reply in replies] == [200] * NUM_REQUESTS
    return [reply.json() for reply in replies]


def test_handed_over_prompts_wait_at_their_source_and_none_is_computed_again(tmp_path):
    flags = [word for setting in FLAGS for word in ("--set", setting)]
    patient = {"QUIRE_WORKER_HANDOFF_ROOM_MS": "600000"}
    with LocalCluster(tmp_path / "home", *flags, env=patient) as cluster:
        answers = asyncio.run(ask(cluster.url))
        pool = cluster.pool_at_rest()
    decodes = [stage(answer, "decode") for answer in answers]
    assert all(decodes), "every one was handed over"
    assert [max(0, one["tokens_computed"] - 1) for one in decodes if one] == [0] * NUM_REQUESTS
    assert any(one.get("room_wait_ms", 0) > 0 for one in decodes if one), "all at once they do not fit"
    assert pool["num_leases"] == pool["num_handoffs"] == pool["counters"].get("handoffs_expired", 0) == 0
