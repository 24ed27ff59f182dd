"""Lending by itself while somebody dies or stands still: memory comes home, and no byte is another than its block's.

Engines are processes of their own (lending_engine.py), which end when a byte is wrong; the other side is the test's.
"""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shared.ids import Epoch
from shared.wire.mempool_lending import MemoryShares, ReportLoad
from tests.integration.lending_rig import coordinator
from tests.integration.mempool_rig import BLOCK_BYTES
from tests.integration.test_lending_by_itself import start
from tests.integration.test_mempool_lending import PROMPTS, Engine, leased
from tests.support.quickest import quickest_s

__all__ = ["coordinator", "start"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TTL_MS, SILENT_MS = 10_000, 1_000
LIMIT_S = 90.0
TIMES = {"lending-ttl-ms": TTL_MS, "lending-silent-ms": SILENT_MS}


class Child:
    """An engine that is killed, stopped and continued."""

    def __init__(self, pool, job: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.lending_engine", str(pool.socket), job],
            cwd=ROOT, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.num_turns = 0
        self.reader = threading.Thread(target=self._count)
        self.reader.start()

    def _count(self) -> None:
        assert self.process.stdout is not None
        for _ in self.process.stdout:
            self.num_turns += 1

    async def turns(self, count: int) -> None:
        """So many that begin and end from now on."""
        aim, began_s = self.num_turns + count + 1, time.monotonic()
        while self.num_turns < aim:
            assert self.process.poll() is None, "the engine has ended: a byte was wrong, or it was not served"
            assert time.monotonic() - began_s < LIMIT_S
            await asyncio.sleep(0.005)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Harmless when it has ended."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def spawn():
    made = []

    def child(pool, job: str) -> Child:
        made.append(Child(pool, job))
        return made[-1]

    yield child
    for one in made:
        one.end()


class Side:
    """The engine of the test's own process, which reports load for as long as `waiting` is not None."""

    def __init__(self, pool, name: str, waiting: int) -> None:
        self.pool, self.waiting = pool, waiting
        self.engine = Engine(pool, name)
        self.task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.engine.client.start()
        assert await self.engine.client.wait_connected(30_000)
        self.task = asyncio.ensure_future(self.report())

    async def report(self) -> None:
        while True:
            message = ReportLoad(instance_epoch=Epoch(1), model=self.engine.name, num_waiting=self.waiting)
            self.engine.client.report_load(message)
            self.engine.answer()
            await asyncio.sleep(0.01)

    @property
    def shares(self) -> MemoryShares:
        return self.engine.client.memory or MemoryShares(total_bytes=0)

    async def until(self, condition, what: str) -> float:
        """How long it took, s."""
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() - began_s < LIMIT_S, what
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        await self.engine.close()


def lent_and_used(pool) -> bool:
    return pool.status()["counters"].get("blocks_pulled_from_peer", 0) > 0


def test_a_killed_consumers_memory_is_back_within_its_time_to_live_and_a_second(start, spawn):
    async def run() -> None:
        pool = start(**TIMES)
        side = Side(pool, "producer", 0)
        await side.begin()

        async def attempt() -> float:
            child = spawn(pool, "borrow")
            await side.until(lambda: side.shares.lent_bytes and lent_and_used(pool), "it borrows")
            child.end()
            return await side.until(lambda: not side.shares.lent_bytes, "the loan ends")

        assert await quickest_s(attempt, TTL_MS / 1_000 + 1) < TTL_MS / 1_000 + 1
        side.waiting = 99
        await side.until(lambda: not leased(pool), "the pages return")
        await side.close()

    asyncio.run(run())


def test_a_consumer_that_stands_still_keeps_nothing_and_changes_nothing_when_it_goes_on(start, spawn):
    async def run() -> None:
        pool = start(**TIMES | {"lending-ttl-ms": 2_000})
        side = Side(pool, "producer", 0)
        await side.begin()
        child = spawn(pool, "borrow")
        await side.until(lambda: side.shares.lent_bytes and lent_and_used(pool), "it borrows")
        child.signal(signal.SIGSTOP)
        await side.until(lambda: not side.shares.lent_bytes, "nobody renews the loan")
        side.waiting = 99
        await side.until(lambda: not leased(pool), "the pages return")
        engine = side.engine
        await side.until(lambda: len(engine.stock) >= 16, "its engine gets them")
        mine = [page for page, _ in engine.stock]
        for page in mine:
            engine.write(page, b"p" * BLOCK_BYTES)
        child.signal(signal.SIGCONT)
        await child.turns(20)
        assert all(engine.read(page) == b"p" * BLOCK_BYTES for page in mine)
        await side.close()

    asyncio.run(run())


def test_a_consumer_of_a_killed_producer_goes_on_from_host_memory_or_computes(start, spawn):
    async def run() -> None:
        pool = start(**TIMES)
        child = spawn(pool, "lend")
        side = Side(pool, "consumer", 99)
        await side.begin()
        async with asyncio.timeout(LIMIT_S):
            while not (side.shares.borrowed_bytes and lent_and_used(pool)):
                for hashes in PROMPTS:
                    if await side.engine.acquired(hashes) < len(hashes):
                        await side.engine.compute(hashes)
        child.end()
        began_s = time.monotonic()
        while side.shares.borrowed_bytes or leased(pool):
            assert time.monotonic() - began_s < LIMIT_S, "what nobody reports for is taken back"
            for hashes in PROMPTS:
                if await side.engine.acquired(hashes) < len(hashes):
                    await side.engine.compute(hashes)
        for hashes in PROMPTS:
            assert await side.engine.acquired(hashes) == len(hashes)
        await side.close()

    asyncio.run(run())


def test_without_a_coordinator_loans_go_on_and_come_home_and_with_it_new_ones_are_made(
    start, spawn, coordinator
):
    async def run() -> None:
        pool = start()  # nobody is too slow here
        side = Side(pool, "producer", 0)
        await side.begin()
        child = spawn(pool, "borrow")
        await side.until(lambda: side.shares.lent_bytes and lent_and_used(pool), "it borrows")
        coordinator.process.kill()
        taken = pool.status()["counters"]["lending_loans_taken"]
        await child.turns(50)
        assert side.shares.lent_bytes, "loans outlive the coordinator"
        side.waiting = 99
        await side.until(lambda: not leased(pool), "the pages return without it")
        await side.until(lambda: not side.shares.lent_bytes, "and their engine's front is told")
        coordinator.start().wait()
        side.waiting = 0
        await side.until(lambda: side.shares.lent_bytes, "it lends again")
        assert pool.status()["counters"]["lending_loans_taken"] > taken
        await child.turns(20)
        await side.close()

    asyncio.run(run())
