"""Fair slices (AQUA 7) in a prefill and a decode worker with memory of their own: tokens equal stock vLLM's.

Sixteen requests at once in two slots of each worker: they take turns between the chunks of their prompts, and in the
middle of answers that decode goes on with behind the hand-off. Neither has pages for all of them: decode takes in what
has room, blocks of prompts that prefill has parked leave for host memory and are back before their turn.
"""

import asyncio
import time
from typing import Any

import httpx
import pytest

from deploy.local.services_table import Ports
from tests.integration.test_exactness import CASES, assert_same, completion_body, stage
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SPACE_BYTES = 12 << 20  # of each worker: 64 blocks, of the 160 that the requests take
FAIR = {
    "QUIRE_WORKER_LOCAL_POLICY": "cfs", "QUIRE_WORKER_MAX_NUM_SEQS": "2", "QUIRE_WORKER_FAIR_SLICE_STEPS": "2",
    "QUIRE_WORKER_FAIR_CHUNK_TOKENS": "64", "QUIRE_WORKER_MAX_NUM_BATCHED_TOKENS": "128",
    "QUIRE_WORKER_FAIR_SWAP_GB_PER_S": "1000000",  # whatever the machine does, switching pays
    "QUIRE_SCHEDULER_OVERLOAD_FACTOR": "16",  # all at once, in two slots
}  # fmt: skip
NAMES = [
    *(f"greedy-{n}" for n in (5, 33, 64, 161, 257, 320, 511, 640, 777, 1000)), "seeded-31", "seeded-400",
    "logprobs-greedy", "penalties-seeded", "json-schema", "json-schema-seeded",
]  # fmt: skip
REPORTED_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = (
        "dtype=float32", "kv_space=own", f"mempool_bytes={SPACE_BYTES}", "max_model_len=1600", "dram_bytes=268435456",
    )  # fmt: skip
    words = [word for flag in flags for word in ("--set", flag)]
    with LocalCluster(tmp_path_factory.mktemp("fair") / "home", *words, env=FAIR) as cluster:
        yield cluster


def settled(cluster: LocalCluster, role: str) -> dict[str, int]:
    """The engine's own counts, which its front asks for once a second, when they say all that vLLM's do."""
    _, port = Ports(gateway=cluster.base + 90, base=cluster.base).worker(role, 0)
    until_s = time.monotonic() + REPORTED_S
    while True:
        status = httpx.get(f"http://127.0.0.1:{port}/status", timeout=30).json()
        counts = status["fair_counts"]
        times = [counts.get(name, 0) for name in ("times_parked", "times_resumed")]
        if times == [status["num_preempted"]] * 2:
            return counts
        assert time.monotonic() < until_s, status
        time.sleep(0.1)


def test_requests_that_take_turns_in_prefill_and_decode_say_what_stock_says(reference, cluster):
    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=600) as client:
            posts = [
                client.post("/v1/completions", json=completion_body(CASES[n], reference[n])) for n in NAMES
            ]
            return [response.json() for response in await asyncio.gather(*posts)]

    answers = asyncio.run(run())
    for name, answer in zip(NAMES, answers, strict=True):
        assert "choices" in answer, (name, answer)
        assert_same(name, answer, reference[name])
    handed_off = [stage(answer, "decode") is not None for answer in answers]  # but who found no room there
    assert sum(handed_off) >= len(NAMES) // 2
    for role in ("prefill", "decode"):
        found = settled(cluster, role)
        print(role, found)
        assert found.get("times_parked", 0) > 0, f"nobody lost a slot in {role}"
        assert found["recomputed_tokens"] == 0
    assert cluster.pool_at_rest()["num_leases"] == 0
