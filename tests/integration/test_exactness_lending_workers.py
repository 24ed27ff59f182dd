"""Two real workers, one of which lends to the other by itself: both say stock vLLM's tokens, whoever has the memory.

The borrower reads a prompt of more than twice its memory. Nobody presents an offer, a grant or a reclaim: the idle
worker's memory is lent because blocks are read in host memory, and goes home when the lender has work of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from deploy.local.services_table import Ports
from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.requests import Finished, SamplingSpec
from tests.integration.test_pages_under_pressure import PAGE_BYTES
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SPACE_PAGES = 20  # of each worker: it lends half, the long prompt takes 47
NUM_READ = 4  # lent pages that are read when they are wanted back
FAR, SMALL = "long-answer", "greedy-33"
BURSTS = [[f"greedy-{n}" for n in lengths] for lengths in ((400, 161, 47, 31, 17), (320, 200, 63, 9, 5))]
NUM_TAKEN_BACK = 3
LIMIT_S = 1_200.0
LENDING = {
    "QUIRE_MEMPOOL_LENDING_THRESHOLD_BYTES": str(4 * PAGE_BYTES), "QUIRE_MEMPOOL_LENDING_INTERVAL_MS": "20",
    "QUIRE_MEMPOOL_LENDING_WINDOW_MS": "500", "QUIRE_MEMPOOL_LENDING_PEAK_MS": "500",
    "QUIRE_MEMPOOL_LENDING_STEADY_MS": "500", "QUIRE_MEMPOOL_LENDING_HOLD_MS": "100",
    "QUIRE_MEMPOOL_LENDING_LEAST_ARRIVALS": "4",  # a burst's, not those of one small request after another
    "QUIRE_MEMPOOL_LENDING_ASK_BYTES": str(4 * PAGE_BYTES), "QUIRE_MEMPOOL_LENDING_PAUSE_MS": "50",
    "QUIRE_MEMPOOL_LENDING_MAX_PAUSE_MS": "200", "QUIRE_MEMPOOL_LENDING_SILENT_MS": "30000",
    "QUIRE_MEMPOOL_LENDING_RECLAIM_DEADLINE_MS": "600000",  # nobody is killed for being slow
    "QUIRE_WORKER_FAR_BYTES": str(80 * PAGE_BYTES),
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    flags = (
        "dtype=float32", "kv_space=own", f"mempool_bytes={SPACE_PAGES * PAGE_BYTES}", "max_model_len=2048",
        "memory_market=true", f"dram_bytes={400 * PAGE_BYTES}", "num_decode=2",
    )  # fmt: skip
    words = ["--topology", "colocated", *(word for flag in flags for word in ("--set", flag))]
    with LocalCluster(tmp_path / "home", *words, env=LENDING) as cluster:
        yield cluster


class Worker:
    """One of the two, and what it is asked."""

    def __init__(self, cluster: LocalCluster, index: int, reference: dict[str, Any]) -> None:
        _, admin = Ports(gateway=cluster.base + 90, base=cluster.base).worker("colocated", index)
        status = httpx.get(f"http://127.0.0.1:{admin}/status", timeout=30).json()
        self.name, self.reference = f"colocated-{index}", reference
        self.gateway = ScriptedGateway(status["endpoint"], status["epoch"], silent_ms=int(LIMIT_S * 1_000))
        self.num_asked = 0

    async def ask(self, name: str) -> None:
        """Its answer is stock's."""
        self.num_asked += 1
        wanted, request = self.reference[name], f"{name}-{self.num_asked}"
        sampling = SamplingSpec(**wanted["params"])
        self.gateway.generate(request, wanted["prompt"], sampling=sampling, deadline_ms=int(LIMIT_S * 1_000))
        end = await self.gateway.end_of(request, LIMIT_S)
        assert isinstance(end, Finished), end
        assert self.gateway.tokens[request, 0] == wanted["choices"][0]["token_ids"], (self.name, request)

    async def ask_until(self, is_over: asyncio.Event, name: str) -> None:
        while not is_over.is_set():
            await self.ask(name)


class Story:
    """What the mempool says of both, while the borrower reads."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.reading: asyncio.Task[None] | None = None  # what the borrower does
        self.pool: dict[str, Any] = {}

    async def look(self) -> None:
        if self.reading is not None and self.reading.done():
            self.reading.result()  # raises what went wrong there
        self.pool = await asyncio.to_thread(self.cluster.pool)

    def counter(self, name: str) -> int:
        return self.pool["counters"].get(name, 0)

    def share(self, worker: Worker, name: str) -> int:
        """Bytes of its memory that are offered, or lent."""
        spaces = self.pool["lending"]["spaces"].values()
        return sum(space[name] for space in spaces if space["instances"] == [worker.name])

    def is_read(self, lender: Worker) -> bool:
        """Whether the running request reads blocks in pages of this worker."""
        loans = [space for space in self.pool["spaces"] if space["devices"] == ["cpu:loan"]]
        return sum(loan["num_pinned"] for loan in loans) >= NUM_READ and self.share(lender, "lent_bytes") > 0

    async def until(
        self, condition: Callable[[], bool], meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        await self.look()
        while not condition():
            await (meanwhile() if meanwhile is not None else asyncio.sleep(0.02))
            await self.look()


def test_a_lenders_and_a_borrowers_tokens_are_stocks_over_reclaims_of_memory_that_nobody_granted_by_hand(
    reference, cluster
):
    async def run() -> None:
        lender, borrower = (Worker(cluster, index, reference) for index in (0, 1))
        async with lender.gateway, borrower.gateway, asyncio.timeout(LIMIT_S):
            story = Story(cluster)
            await story.until(lambda: story.share(lender, "offered_bytes") > 0)
            is_over = asyncio.Event()
            story.reading = asyncio.create_task(borrower.ask_until(is_over, FAR))
            try:
                await tell(story, lender)
                is_over.set()
                await story.reading
            finally:
                story.reading.cancel()
                await asyncio.gather(story.reading, return_exceptions=True)
            await story.look()
        print(story.pool["counters"])
        assert story.counter("far_engines_killed") == 0
        assert story.counter("far_maps_failed") == 0

    async def tell(story: Story, lender: Worker) -> None:
        await story.until(lambda: story.is_read(lender))
        assert story.counter("far_blocks_out_dram") > 0
        assert story.counter("blocks_pulled_from_dram") == 0, "it borrowed for what it reads in host memory"
        number = 0
        while number < NUM_TAKEN_BACK or not (
            story.counter("far_blocks_moved") and story.counter("far_blocks_back")
        ):
            await taken_back(story, lender, BURSTS[number % len(BURSTS)])
            number += 1

    async def taken_back(story: Story, lender: Worker, burst: list[str]) -> None:
        await story.until(lambda: story.is_read(lender))
        reclaims, home = story.counter("lending_loans_reclaim"), story.counter("lending_pages_returned")
        while True:  # beside the other's blocks in its memory
            await lender.ask(SMALL)
            await story.look()
            if story.is_read(lender) or story.counter("lending_loans_reclaim") > reclaims:
                break
        await story.until(
            lambda: story.counter("lending_loans_reclaim") > reclaims, lambda: all_of(lender, burst)
        )
        await story.until(lambda: story.counter("lending_pages_returned") > home)
        await all_of(lender, [SMALL, *burst])

    async def all_of(worker: Worker, names: list[str]) -> None:
        await asyncio.gather(*(worker.ask(name) for name in names))

    asyncio.run(run())
