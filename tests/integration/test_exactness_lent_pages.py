"""A real engine borrows by itself, and its tokens equal stock's while the memory is taken back at any moment.

One colocated worker whose space is too small for what it is asked again and again; the other engine of its mempool is
the test's: idle, then with a queue, from one moment to the next. Nobody presents an offer, a grant or a reclaim.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from deploy.local.config import paths_of
from loadtest.profiler.core.profile import Profile, encode
from shared.ids import Epoch
from shared.wire.mempool_lending import ReportLoad
from tests.integration.mempool_rig import DESCRIPTION, MempoolProcess
from tests.integration.test_exactness import CASES, assert_same, completion_body
from tests.integration.test_mempool_lending import Engine
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

SPACE_BYTES, BLOCK_BYTES = 14 << 20, 200_000  # of the worker's space; larger than one of its blocks
NAMES = [f"greedy-{n}" for n in (257, 400, 511, 640, 777)]  # more blocks than the space has pages
NUM_RECLAIMS = int(
    os.environ.get("QUIRE_RECLAIMS", "6")
)  # 200: every moment that issues ask for, in ten minutes
LIMIT_S = max(900.0, 15.0 * NUM_RECLAIMS)
DEADLINE_S, LATE_S = 0.5, 10.0  # of a reclaim; what a busy machine may add, and a copy that is under way
LENDING = {
    "QUIRE_MEMPOOL_LENDING_THRESHOLD_BYTES": "1000000", "QUIRE_MEMPOOL_LENDING_STEADY_MS": "100",
    "QUIRE_MEMPOOL_LENDING_HOLD_MS": "100", "QUIRE_MEMPOOL_LENDING_INTERVAL_MS": "20",
    "QUIRE_MEMPOOL_LENDING_ASK_BYTES": "2000000", "QUIRE_MEMPOOL_LENDING_PAUSE_MS": "50",
    "QUIRE_MEMPOOL_LENDING_MAX_PAUSE_MS": "200", "QUIRE_MEMPOOL_LENDING_SILENT_MS": "30000",
    "QUIRE_MEMPOOL_LENDING_RECLAIM_DEADLINE_MS": str(int(DEADLINE_S * 1000)),
}  # fmt: skip


@contextmanager
def cluster_of(folder: Path, env: dict[str, str]) -> Iterator[LocalCluster]:
    """One worker that borrows by itself, with a space that is too small for NAMES."""
    profile = Profile(
        model="quire-demo", tp=1, role="consumer", bytes_per_gpu=-(64 << 20), stable_rate_per_s=1.0,
        pool_bytes=SPACE_BYTES, peak_kv_bytes=SPACE_BYTES, free_bytes=0,
    )  # fmt: skip
    (folder / "profile.json").write_bytes(encode(profile))
    flags = (
        "dtype=float32", "kv_space=own", f"mempool_bytes={SPACE_BYTES}", "max_model_len=2048", "memory_market=true",
        "dram_bytes=536870912", f"lending_profiles={folder / 'profile.json'}",
    )  # fmt: skip
    words = ["--topology", "colocated", *(word for flag in flags for word in ("--set", flag))]
    with LocalCluster(folder / "home", *words, env=env) as cluster:
        yield cluster


@pytest.fixture
def cluster(tmp_path_factory):
    with cluster_of(tmp_path_factory.mktemp("lent"), LENDING) as cluster:
        yield cluster


class Producer:
    """The test's engine, and what its front says."""

    def __init__(self, cluster: LocalCluster) -> None:
        at: Any = SimpleNamespace(socket=Path(paths_of(cluster.home).sockets) / "mempool.sock")
        model = msgspec.structs.replace(DESCRIPTION, model="other", fingerprint="g", block_bytes=BLOCK_BYTES)
        self.engine = Engine(cast(MempoolProcess, at), "producer", model)
        self.waiting = 0
        self.seconds: list[float] = []  # from a queue until all lent pages are back
        self._pressed_s = 0.0

    async def run(self) -> None:
        while True:
            load = ReportLoad(instance_epoch=Epoch(1), model="other", num_waiting=self.waiting)
            self.engine.client.report_load(load)
            self.engine.answer()
            if self._pressed_s and not self.lent_bytes:
                self.seconds.append(time.monotonic() - self._pressed_s)
                self._pressed_s = 0.0
            await asyncio.sleep(0.01)

    @property
    def lent_bytes(self) -> int:
        shares = self.engine.client.memory
        return shares.lent_bytes if shares is not None else 0

    @property
    def is_pressed(self) -> bool:
        """It wants its pages back, and has not noted that they are."""
        return self._pressed_s > 0.0

    def press(self) -> None:
        self.waiting, self._pressed_s = 9, time.monotonic()


def test_tokens_equal_stocks_while_a_real_engine_borrows_and_lent_pages_are_reclaimed(reference, cluster):
    chance = random.Random(5)

    async def ask(client: httpx.AsyncClient, name: str) -> None:
        answer = await client.post("/v1/completions", json=completion_body(CASES[name], reference[name]))
        assert_same(name, answer.json(), reference[name])

    async def run() -> None:
        producer = Producer(cluster)
        producer.engine.client.start()
        assert await producer.engine.client.wait_connected(30_000)
        front = asyncio.ensure_future(producer.run())
        try:
            await reclaims(producer)
        finally:
            front.cancel()
            with suppress(asyncio.CancelledError):
                await front
            await producer.engine.close()
        counters = cluster.pool()["counters"]
        found = sorted(producer.seconds)
        middle, most = found[len(found) // 2], found[-1]
        print(f"{len(found)} reclaims; seconds until all was back: median {middle:.3f}, most {most:.3f}")
        assert len(found) >= NUM_RECLAIMS
        assert found[0] < DEADLINE_S + 1, "of a queue that is heard of every 20 ms"
        assert found[-1] < DEADLINE_S + LATE_S
        assert counters["lending_loans_reclaim"] >= NUM_RECLAIMS
        assert counters["peer_blocks_out"] > 0
        assert counters["blocks_pulled_from_peer"] > 0

    async def reclaims(producer: Producer) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
            for left in reversed(range(NUM_RECLAIMS)):
                while not producer.lent_bytes:
                    await ask(client, chance.choice(NAMES))
                for _ in range(chance.randrange(1, 4)):
                    await ask(client, chance.choice(NAMES))
                while not left and not cluster.pool()["counters"].get("blocks_pulled_from_peer"):
                    await ask(client, chance.choice(NAMES))  # chance brought nothing back yet
                loop.call_later(chance.uniform(0.0, 0.3), producer.press)
                while not producer.waiting or producer.is_pressed:  # its front notes that all is back
                    await ask(client, chance.choice(NAMES))
                producer.waiting = 0

    asyncio.run(run())
