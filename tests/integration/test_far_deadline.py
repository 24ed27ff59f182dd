"""Lent pages that a process reads in place: back when it has let go of them, or when it is proven dead.

A real mempool, the test's engine that lends, and a process that maps lent pages (far_consumer.py).
"""

import asyncio
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from shared.ids import InstanceId
from tests.integration.mempool_rig import ROOT, MempoolProcess, until
from tests.integration.test_mempool_lending import NUM_PAGES, PAGE_BYTES, Engine, Market, content

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_LENT = 8
LIMIT_S = 120.0


class Consumer:
    """The process."""

    name = InstanceId("reader")

    def __init__(self, pool: MempoolProcess) -> None:
        words = [
            sys.executable,
            "-m",
            "tests.integration.far_consumer",
            str(pool.socket),
            self.name,
            str(NUM_LENT),
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    async def heard(self, what: str) -> None:
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), LIMIT_S)
        assert line == what + "\n", (line, self.process.poll())


@pytest.fixture
def pool(tmp_path):
    made = MempoolProcess(
        tmp_path,
        **{
            "capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": 64 * PAGE_BYTES, "dram-for-host": "true",
            "offer-patience-ms": 60_000, "copy-timeout-ms": 60_000, "out-timeout-ms": 60_000,
        },
    )  # fmt: skip
    yield made
    made.stop()


async def lent(pool: MempoolProcess) -> tuple[Engine, Market, Consumer, str]:
    """A lender whose pages a consumer reads, and the offer."""
    lender = Engine(pool, "lender")
    lender.client.start()
    assert await lender.client.wait_connected(30_000)
    consumer = Consumer(pool)
    await consumer.heard("ready")
    asks = SimpleNamespace(name=Consumer.name, client=lender.client, answer=lambda: None)  # in its name
    market = Market(cast(Engine, asks), lender, 0)
    offer_id, _ = await market.lend(NUM_LENT)
    consumer.say("go")
    await consumer.heard("placed")
    assert pool.status()["counters"]["far_blocks_out_peer"] == NUM_LENT
    return lender, market, consumer, offer_id


async def refill(lender: Engine, pool: MempoolProcess) -> None:
    """The lender has all of its pages, writes them, and finds what it wrote."""
    await lender.until(lambda: not pool.counts().get("leased"), "nothing is lent")
    await lender.until(lambda: len(lender.stock) == NUM_PAGES - 1, "all of its pages")
    for page, _ in lender.stock:
        lender.write(page, content(page.to_bytes(32, "little")))
    for page, _ in lender.stock:
        assert lender.read(page) == content(page.to_bytes(32, "little"))


def test_who_follows_a_reclaim_reads_on_and_the_pages_are_back(pool):
    async def run() -> None:
        lender, market, consumer, offer_id = await lent(pool)
        try:
            await market.reclaim(offer_id, 0, 600_000)
            await consumer.heard("moved")
            await refill(lender, pool)
            consumer.say("end")
            assert await asyncio.to_thread(consumer.process.wait, LIMIT_S) == 0
            until(lambda: pool.status()["num_pinned"] == 0, "no pin is left")
        finally:
            consumer.close()
        await lender.close()

    asyncio.run(run())


def test_who_is_asleep_at_the_deadline_is_killed_and_the_lender_writes_only_after_that(pool):
    async def run() -> None:
        lender, market, consumer, offer_id = await lent(pool)
        try:
            consumer.process.send_signal(signal.SIGSTOP)
            await market.reclaim(offer_id, 0, 300)
            await lender.until(lambda: not pool.counts().get("leased"), "nothing is lent")
            assert consumer.process.wait(LIMIT_S) == -signal.SIGKILL
            assert [line["reason"] for line in pool.log_lines() if line["event"] == "process_killed"]
            await refill(lender, pool)
            until(lambda: pool.status()["num_pinned"] == 0, "no pin is left")
            assert pool.status()["counters"]["far_engines_killed"] == 1
        finally:
            consumer.close()
        await lender.close()

    asyncio.run(run())
