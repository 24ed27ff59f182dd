"""A consumer that is stopped (SIGSTOP) at any step of lending keeps nothing, and changes nothing when it goes on.

A real mempool, coordinator and Redis; the lender is the test's engine, the consumer a process of its own. One kind maps
lent pages and reads them in place (far_consumer.py): at the deadline the mempool kills it, and the pages are back with
the proof of its death. The other kind maps none (stopped_aqua.py): its bytes leave without it, and it lives on.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shared.ids import Epoch, InstanceId, SpaceId
from shared.transport.lending_client import LendingClient
from shared.wire.lending import AskLease, AskReclaim, Grant, OfferMemory, OfferView, ReclaimOrder, SpaceRef
from shared.wire.mempool_lending import LendingDone
from tests.integration.mempool_rig import ROOT
from tests.integration.test_mempool_lending import NUM_PAGES, PAGE_BYTES, Engine, content
from tests.integration.test_mempool_market import MEMPOOL, asked
from tests.support.aqua_rig import AquaRig
from tests.support.market_rig import until_market
from tests.support.quickest import quickest_s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_LENT, NUM_TENSOR_PAGES = 8, 3
DEADLINE_MS = 200
KILL_AND_TEARDOWN_S = 2.0  # behind the deadline, until the lender's pages are back (docs/memory-market.md)
LIMIT_S = 60.0
SEEDS = (1, 2, 3)
numbers = count()


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    patience: dict[str, Any] = {"dram-bytes": 8 * NUM_PAGES * PAGE_BYTES, "instance": MEMPOOL}
    made = AquaRig(tmp_path_factory.mktemp("stopped"), PAGE_BYTES, NUM_PAGES, **patience)
    yield made
    made.close()


class Consumer:
    """A process that is stopped and goes on."""

    def __init__(self, *words: object) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", *map(str, words)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    @property
    def state(self) -> str:
        """As in /proc: "T" stopped, "Z" dead."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    async def hears(self, what: str) -> None:
        """Among lines of its log."""
        async with asyncio.timeout(LIMIT_S):
            while (line := await asyncio.to_thread(self.process.stdout.readline)) != what + "\n":
                assert line, f"it ended instead: {self.process.wait()}"

    async def stopped(self, lender: Engine) -> None:
        await lender.until(lambda: self.state in "TZ", "it stops")
        assert self.state == "T"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, LIMIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Market:
    """Of one lender: what it offers, lends and takes back, through the coordinator."""

    def __init__(self, rig: AquaRig, lender: Engine) -> None:
        self.rig, self.lender = rig, lender
        self.client = LendingClient(rig.coordinator.url, patience_ms=60_000)
        self.offer_id = ""

    def space(self) -> SpaceId:
        spaces = self.rig.mempool.status()["spaces"]
        return next(SpaceId(s["number"]) for s in spaces if s["devices"] == [f"cpu:{self.lender.name}"])

    async def offer(self) -> None:
        words = OfferMemory(
            producer=self.lender.name, mempool=MEMPOOL, space=self.space(), length_bytes=NUM_LENT * PAGE_BYTES,
            boot_generation=Epoch(self.lender.client.boot_generation),
        )  # fmt: skip
        view = await asked(
            lambda: self.client.offer(words, key=self.lender.name),
            lambda answer: isinstance(answer, OfferView) and answer.state == "open",
            self.lender,
        )
        self.offer_id = view.offer.offer_id

    async def lend_to(self, consumer: str) -> None:
        """In the consumer's name."""
        words = AskLease(
            consumer=InstanceId(consumer), length_bytes=NUM_LENT * PAGE_BYTES, purpose="overflow",
            spaces=[SpaceRef(mempool=MEMPOOL, space=self.space())], ttl_ms=600_000,
        )  # fmt: skip

        async def borrow() -> object:
            answer = await self.client.lease(words)
            return await self.lender.client.present(answer) if isinstance(answer, Grant) else answer

        await asked(borrow, lambda answer: isinstance(answer, LendingDone), self.lender)

    async def reclaim(self) -> None:
        """All of it. The mempool remembers offers that are over, the coordinator does not: it is asked first."""
        ask = AskReclaim(offer_id=self.offer_id, producer=self.lender.name, deadline_ms=DEADLINE_MS)
        assert isinstance(await self.client.reclaim(ask), ReclaimOrder)
        order = ReclaimOrder(
            reclaim_id=self.offer_id, offer_id=self.offer_id, keep_bytes=0, deadline_ms=DEADLINE_MS
        )
        assert isinstance(await self.lender.client.present(order), LendingDone)

    def num_borrowed(self) -> int:
        """Blocks that have been copied to lent pages, of all consumers ever."""
        return self.rig.mempool.status()["counters"].get("far_blocks_out_peer", 0)

    def num_leased(self) -> int:
        (mine,) = [s for s in self.rig.mempool.status()["spaces"] if s["number"] == self.space()]
        return mine["pages_by_state"].get("leased", 0)

    async def home(self) -> None:
        await self.lender.until(lambda: not self.num_leased(), "the pages are back")

    async def closed(self) -> None:
        """The coordinator knows that nothing of it is lent."""

        def is_over(view: Any) -> bool:
            mine = [lease for lease in view.leases if lease.offer_id == self.offer_id]
            return all(lease.state == "ended" for lease in mine)

        await until_market(self.client, is_over)


@asynccontextmanager
async def lending(rig: AquaRig):
    """A lender whose pages are on offer. (lender, market, a name for a consumer)"""
    number = next(numbers)
    lender = Engine(rig.mempool, f"lender-{number}")
    lender.client.start()
    assert await lender.client.wait_connected(30_000)
    market = Market(rig, lender)
    await market.offer()
    try:
        yield lender, market, f"consumer-{number}"
    finally:
        await market.client.close()
        await lender.close()


async def refill(lender: Engine) -> list[int]:
    """The lender has all of its pages and writes them."""
    await lender.until(lambda: len(lender.stock) == NUM_PAGES - 1, "all of its pages")
    mine = [page for page, _ in lender.stock]
    for page in mine:
        lender.write(page, content(page.to_bytes(32, "little")))
    return mine


def assert_unchanged(lender: Engine, pages: list[int]) -> None:
    wrong = [page for page in pages if lender.read(page) != content(page.to_bytes(32, "little"))]
    assert not wrong, "a page of the lender holds something else"


async def taken_back(market: Market, consumer: Consumer, began_s: float) -> tuple[float, bool]:
    """Behind the deadline, until pages are back: s. Whether the consumer was killed, by then and not before it."""
    await market.home()
    took_s = time.monotonic() - began_s
    if is_dead := consumer.state == "Z":
        assert await consumer.ended() == -signal.SIGKILL
        assert took_s >= DEADLINE_MS / 1_000, "it had time until the deadline"
    return took_s - DEADLINE_MS / 1_000, is_dead


def reader(rig: AquaRig, name: str, step: str) -> Consumer:
    return Consumer("tests.integration.far_consumer", rig.mempool.socket, name, NUM_LENT, step)


async def stopped_reader(rig: AquaRig, step: str) -> float:
    """One that maps lent pages. How long behind the deadline they were back, s."""
    async with lending(rig) as (lender, market, name):
        consumer, num_before = reader(rig, name, step), market.num_borrowed()
        try:
            await consumer.hears("ready")
            await market.lend_to(name)
            if step == "granted":
                consumer.stop()
            else:
                consumer.say("go")
            if step in ("asked", "mapped"):
                await consumer.stopped(lender)
            elif step != "granted":
                await consumer.hears("placed")
            if step == "asked":  # a reclaim before the copies takes pages that nobody uses
                await lender.until(lambda: market.num_borrowed() == num_before + NUM_LENT, "copies")
            if step == "placed":
                consumer.stop()
            began_s = time.monotonic()
            await market.reclaim()
            late_s, is_dead = await taken_back(market, consumer, began_s)
            mine = await refill(lender)
            consumer.go_on()
            assert is_dead == (step != "granted"), "who maps lent pages, and only who does, is killed"
            if not is_dead:
                consumer.say("go")
                await consumer.hears("placed")
                consumer.say("end")
                assert await consumer.ended() == 0, "a byte was wrong"
            assert_unchanged(lender, mine)
            await market.closed()
        finally:
            consumer.close()
    return late_s


@pytest.mark.parametrize("step", ["granted", "asked", "mapped", "placed", "moved", "dropped", "unmapped"])
def test_who_maps_lent_pages_and_stands_still_is_dead_before_they_are_back(rig, step):
    async def run() -> None:
        late_s = await quickest_s(lambda: stopped_reader(rig, step), KILL_AND_TEARDOWN_S)
        print(f"{step}: back {late_s * 1_000:.0f} ms behind the deadline")
        assert late_s < KILL_AND_TEARDOWN_S

    asyncio.run(run())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_is_stopped_at_any_moment_is_dead_or_reads_on_what_is_its_own(rig, seed):
    chance = random.Random(seed)

    async def run() -> None:
        async with lending(rig) as (lender, market, name):
            consumer = reader(rig, name, "")
            try:
                await consumer.hears("ready")
                await market.lend_to(name)
                consumer.say("go")
                is_moving = chance.random() < 0.5
                if is_moving:
                    await consumer.hears("placed")
                else:
                    await asyncio.sleep(chance.uniform(0.0, 0.05))
                    consumer.stop()
                began_s = time.monotonic()
                await market.reclaim()
                if is_moving:
                    await asyncio.sleep(chance.uniform(0.0, 0.02))
                    consumer.stop()
                _, is_dead = await taken_back(market, consumer, began_s)
                mine = await refill(lender)
                consumer.go_on()
                if not is_dead:
                    if not is_moving:
                        await consumer.hears("placed")
                    consumer.say("end")
                    assert await consumer.ended() == 0, "a byte was wrong"
                assert_unchanged(lender, mine)
            finally:
                consumer.close()

    asyncio.run(run())


async def stopped_tensor(rig: AquaRig, step: str) -> float:
    """One that maps no lent page. As stopped_reader()."""
    async with lending(rig) as (lender, market, name):
        settings = asdict(rig.consumer(name, borrow_bytes=NUM_LENT * PAGE_BYTES))
        consumer = Consumer("tests.integration.stopped_aqua", json.dumps(settings), step, NUM_TENSOR_PAGES)
        try:
            if step == "told":
                await consumer.hears("away")
            else:
                await consumer.stopped(lender)
            began_s = time.monotonic()
            await market.reclaim()
            late_s, is_dead = await taken_back(market, consumer, began_s)
            if step == "told":
                await consumer.stopped(lender)
            mine = await refill(lender)
            consumer.go_on()
            assert not is_dead, "nobody is killed who maps nothing of the lender"
            await consumer.hears("right")
            assert_unchanged(lender, mine)
            await market.closed()
            consumer.say("end")
            assert await consumer.ended() == 0
        finally:
            consumer.close()
    return late_s


@pytest.mark.parametrize("step", ["granted", "filling", "away", "fetching", "computing", "storing", "told"])
def test_whose_tensor_is_on_a_peer_loses_no_byte_while_it_stands_still_and_holds_up_nobody(rig, step):
    async def run() -> None:
        late_s = await quickest_s(lambda: stopped_tensor(rig, step), KILL_AND_TEARDOWN_S)
        print(f"{step}: back {late_s * 1_000:.0f} ms behind the deadline")
        assert late_s < KILL_AND_TEARDOWN_S

    asyncio.run(run())
