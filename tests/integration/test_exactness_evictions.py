"""Blocks are evicted while they are handed over, in spaces of ordinary size: a miss and a recompute, never other bytes.

Somebody drops everything that is not pinned, over and over, while a stream of requests goes through prefill and decode,
several at a time, second turns among them. Once decode copies from pages of its mempool under leases that end before
the copy does, so that only the pages' epochs protect it; once the mempool copies between spaces of the two instances,
and hand-offs end before decode asks for them.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deploy.local.config import paths_of
from shared.ids import InstanceId
from shared.mempool.client import MempoolClient
from tests.integration.test_exactness import CASES, FIRST_TURNS, assert_same, completion_body, stage
from tests.support.exactness_cases import SECOND_TURNS_AFTER
from tests.support.local_cluster import LocalCluster

AT_ONCE = 4
ROUNDS = 2
MOST_PAUSE_S = 0.02
COPYING = {"QUIRE_WORKER_KV_CACHE": "copy", "QUIRE_MEMPOOL_MAX_TTL_MS": "10"}  # a copy takes longer
APART = {"QUIRE_MEMPOOL_MAX_TTL_MS": "3"}  # of hand-offs: an engine's own leases end when it says so
GREEDY = [name for name in FIRST_TURNS if CASES[name]["params"].get("temperature") == 0]
NAMES = [*GREEDY, *(f"second-{length}" for length in SECOND_TURNS_AFTER)]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@asynccontextmanager
async def evictions(socket: Path, seed: int) -> AsyncIterator[list[int]]:
    """Everything unpinned goes at random moments; how many blocks went each time."""
    client = MempoolClient(socket, InstanceId("evictor"))
    client.start()
    assert await client.wait_connected(30_000)
    rng, gone = random.Random(seed), list[int]()

    async def evict() -> None:
        while True:
            gone.append(await client.delete() or 0)
            await asyncio.sleep(rng.uniform(0, MOST_PAUSE_S))

    task = asyncio.create_task(evict())
    try:
        yield gone
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def answers(url: str, names: list[str], reference: dict) -> list[dict]:
    """A few at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(client: httpx.AsyncClient, name: str) -> dict:
        async with gate:
            body = completion_body(CASES[name], reference[name])
            reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, (name, reply.text)
        return reply.json()

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return await asyncio.gather(*(ask(client, name) for name in names))


def recomputed_tokens(answer: dict) -> int:
    """Of the prompt, by decode, which computes one token when nothing is missing."""
    decode = stage(answer, "decode")
    return max(0, decode["tokens_computed"] - 1) if decode else 0


@pytest.mark.parametrize(
    ("flags", "environment", "counter"),
    [
        pytest.param((), COPYING, "leases_expired", id="copying engines"),
        pytest.param(("--set", "kv_space=own"), APART, "handoffs_expired", id="spaces apart"),
    ],
)
async def test_evictions_during_handoffs_are_misses_and_tokens_equal_stock(
    reference, tmp_path, flags, environment, counter
):
    names = NAMES * ROUNDS
    random.Random(5).shuffle(names)
    loop = asyncio.get_running_loop()
    cluster = LocalCluster(tmp_path / "home", "--set", "dtype=float32", *flags, env=environment)
    await loop.run_in_executor(None, cluster.__enter__)
    try:
        async with evictions(Path(paths_of(cluster.home).sockets) / "mempool.sock", 3) as gone:
            got = await answers(cluster.url, names, reference)
        calm = await answers(cluster.url, GREEDY, reference)
        pool = await loop.run_in_executor(None, cluster.pool_at_rest)
    finally:
        await loop.run_in_executor(None, cluster.__exit__)
    wrong = []
    for name, answer in zip([*names, *GREEDY], [*got, *calm], strict=True):
        try:
            assert_same(name, answer, reference[name])
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join(wrong)
    assert sum(gone) > len(names), "hardly anything was evicted"
    missed = [name for name, answer in zip(names, got, strict=True) if recomputed_tokens(answer)]
    assert missed, "no hand-off lost a block"
    assert pool["counters"][counter] > 0, pool["counters"]
    assert pool["num_leases"] == pool["num_handoffs"] == 0, pool
    assert sum(pool["pages_by_state"].values()) == pool["num_pages"]
