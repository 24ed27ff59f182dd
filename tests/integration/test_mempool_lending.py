"""A real mempool lends pages of one engine's space to another's: every byte comes back, also while pages are reclaimed.

Two engines that work in their pages, in spaces of host memory; copies are the mover's. The test is the market: it
presents offers, grants and orders as the coordinator would have answered them.
"""

import asyncio
import os
import random

import msgspec
import numpy as np
import pytest

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_list
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.mempool.rank_memory import RankMemory
from shared.wire import mempool as wire
from shared.wire.lending import Grant, Offer, ReclaimOrder, Token
from shared.wire.mempool_lending import LendingDone
from tests.integration.mempool_rig import BLOCK_BYTES, DESCRIPTION, SEED, MempoolProcess, PatientClient, chain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUM_PAGES = 32  # of each space
PAGE_BYTES = 8192
NUM_LENT = 12
PROMPTS = [chain(*(f"{p}-{i}" for i in range(8))) for p in range(6)]  # more than the consumer's space holds
LIMIT_S = 60.0


class Engine:
    """One that works in the pages of a space of its own, and answers the mempool between two calls of the test."""

    def __init__(self, pool: MempoolProcess, name: str, model: EngineDescription = DESCRIPTION) -> None:
        self.name = InstanceId(name)
        self.memory = RankMemory(pool.socket, self.name, model, 0, device=f"cpu:{name}")
        self.quota = PageQuota(pool.socket, self.name, model, NUM_PAGES)
        self.header = self.quota.attach()
        self.stock: list = []
        self.client = PatientClient(pool.socket, self.name)

    def answer(self) -> None:
        """What an engine does between two steps."""
        self.stock += self.quota.take_granted()
        asked = self.quota.take_shrink()
        self.quota.give_back([self.stock.pop() for _ in range(min(len(self.stock), asked))], answers=asked)

    async def until(self, condition, what: str, *others: "Engine"):
        async with asyncio.timeout(LIMIT_S):
            while not (found := condition()):
                for engine in (self, *others):
                    engine.answer()
                await asyncio.sleep(0.002)
        assert found, what
        return found

    def write(self, page: int, data: bytes) -> None:
        os.pwrite(self.memory.fd, data, self.memory.offset_bytes + page * self.header.page_bytes)

    def read(self, page: int) -> bytes:
        return os.pread(self.memory.fd, BLOCK_BYTES, self.memory.offset_bytes + page * self.header.page_bytes)

    async def compute(self, hashes: list, *others: "Engine") -> None:
        """Seal a prompt's blocks, then use them no more."""
        await self.until(lambda: len(self.stock) >= len(hashes), "pages", *others)
        pages = [self.stock.pop() for _ in hashes]
        self.quota.writing(pages)
        for (page, _), block_hash in zip(pages, hashes, strict=True):
            self.write(page, content(block_hash))
        lines = zip(pages, hashes, [SEED, *hashes], strict=False)
        self.quota.seal([SealedPage(page, epoch, h, parent, 4) for (page, epoch), h, parent in lines])
        self.quota.unpin(pages)

    async def acquired(self, hashes: list, *others: "Engine") -> int:
        """Read a prompt through the mempool; every byte must be the block's. How many blocks it found."""
        call = asyncio.ensure_future(self.client.acquire(hashes, ttl_ms=30_000, wait_ms=30_000))
        await self.until(call.done, "an answer", *others)
        got = call.result()
        assert got is not None
        pages = u32_list(got.pages)
        for page, block_hash in zip(pages, hashes, strict=False):
            assert self.read(page) == content(block_hash), f"{self.name}: page {page} holds something else"
        self.client.release(got.lease_id)
        return len(pages)

    async def close(self) -> None:
        await self.client.close()
        self.quota.close()
        self.memory.close()


def content(block_hash: bytes) -> bytes:
    return np.resize(np.frombuffer(block_hash, np.uint8), BLOCK_BYTES).tobytes()


class Market:
    """What the coordinator would answer."""

    def __init__(self, consumer: Engine, producer: Engine, space: int) -> None:
        self.consumer, self.producer, self.space = consumer, producer, space
        self.boot = Epoch(producer.client.boot_generation)
        self.number = 0

    async def lend(self, num_pages: int) -> tuple[str, LeaseId]:
        """Offer, wait until the pages are set aside, and take all of them."""
        self.number += 1
        offer = Offer(
            offer_id=f"o{self.number}", producer=self.producer.name, producer_epoch=Epoch(1),
            mempool=InstanceId("mempool-0"), boot_generation=self.boot, space=SpaceId(self.space),
            length_bytes=num_pages * PAGE_BYTES,
        )  # fmt: skip
        assert isinstance(await self.producer.client.present(offer), LendingDone)
        grant = Grant(
            lease_id=LeaseId(f"l{self.number}"), offer_id=offer.offer_id, consumer=self.consumer.name,
            purpose="overflow", mempool=InstanceId("mempool-0"), address="", boot_generation=self.boot,
            space=SpaceId(self.space), length_bytes=num_pages * PAGE_BYTES, token=Token(1, self.number),
            present_ms=60_000, ttl_ms=600_000, consumer_ttl_ms=300_000,
        )  # fmt: skip
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(answer := await self.consumer.client.present(grant), LendingDone):
                assert isinstance(answer, wire.CallFailed)
                assert answer.code == "offer.exceeded", answer  # the engine has not given enough back yet
                self.producer.answer()
                self.consumer.answer()
        assert answer.num_bytes == num_pages * PAGE_BYTES
        return offer.offer_id, grant.lease_id

    async def reclaim(self, offer_id: str, keep: int, deadline_ms: int) -> None:
        order = ReclaimOrder(
            reclaim_id=f"r{offer_id}",
            offer_id=offer_id,
            keep_bytes=keep * PAGE_BYTES,
            deadline_ms=deadline_ms,
        )
        assert isinstance(await self.producer.client.present(order), LendingDone)


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


async def begin(
    pool: MempoolProcess, model: EngineDescription = DESCRIPTION
) -> tuple[Engine, Engine, Market]:
    """Args: model: the producer's."""
    consumer, producer = Engine(pool, "consumer"), Engine(pool, "producer", model)
    for engine in (consumer, producer):
        engine.client.start()
        assert await engine.client.wait_connected(20_000)
    status = pool.status()
    space = next(s["number"] for s in status["spaces"] if s["devices"] == ["cpu:producer"])
    return consumer, producer, Market(consumer, producer, space)


def leased(pool: MempoolProcess) -> int:
    return pool.counts().get("leased", 0)


def test_blocks_go_to_an_idle_peers_pages_and_come_back_and_its_pages_return_when_it_wants_them(pool):
    async def run() -> None:
        consumer, producer, market = await begin(pool)
        offer_id, _ = await market.lend(NUM_LENT)
        assert leased(pool) == NUM_LENT
        for hashes in PROMPTS:
            await consumer.compute(hashes, producer)
        await consumer.until(lambda: pool.status()["counters"].get("peer_blocks_out", 0), "blocks leave")
        for hashes in PROMPTS:
            assert await consumer.acquired(hashes, producer) == len(hashes)
        counters = pool.status()["counters"]
        assert counters["peer_blocks_out"] >= NUM_LENT
        assert counters["blocks_pulled_from_peer"] > 0
        await market.reclaim(offer_id, 0, 30_000)
        await producer.until(lambda: not leased(pool), "the pages return", consumer)
        await producer.until(lambda: len(producer.stock) >= NUM_PAGES - 1, "its engine gets them", consumer)
        mine = [page for page, _ in producer.stock]
        for page in mine:
            producer.write(page, b"p" * BLOCK_BYTES)
        for hashes in PROMPTS:
            assert await consumer.acquired(hashes, producer) == len(hashes)
        assert set(mine) <= {page for page, _ in producer.stock}, "nobody asked for them again"
        assert all(producer.read(page) == b"p" * BLOCK_BYTES for page in mine)
        assert not pool.status()["counters"].get("lending_blocks_dropped")
        await consumer.close()
        await producer.close()

    asyncio.run(run())


def test_an_engine_of_another_model_lends_its_pages_too(pool):
    """AQUA's producers serve other models: what lies in their pages is nobody's but the consumer's."""
    other = msgspec.structs.replace(
        DESCRIPTION, model="other", fingerprint="g", dtype="bfloat16", num_layers=3, num_kv_heads=2,
        total_kv_heads=2, block_bytes=8_000,
    )  # fmt: skip

    async def run() -> None:
        consumer, producer, market = await begin(pool, other)
        offer_id, _ = await market.lend(NUM_LENT)
        for hashes in PROMPTS:
            await consumer.compute(hashes, producer)
        for hashes in PROMPTS:
            assert await consumer.acquired(hashes, producer) == len(hashes)
        counters = pool.status()["counters"]
        assert counters["peer_blocks_out"] > 0
        assert counters["blocks_pulled_from_peer"] > 0
        await market.reclaim(offer_id, 0, 30_000)
        await producer.until(lambda: not leased(pool), "the pages return", consumer)
        for hashes in PROMPTS:
            assert await consumer.acquired(hashes, producer) == len(hashes)
        await consumer.close()
        await producer.close()

    asyncio.run(run())


@pytest.mark.parametrize("seed", [1, 2])
def test_reclaims_at_any_moment_change_no_byte_and_meet_their_deadline(pool, seed):
    """Whatever is reclaimed, how much, and how soon: what a reader gets holds its block, and pages return."""
    chance = random.Random(seed)

    async def work(consumer: Engine, producer: Engine) -> None:
        hashes = chance.choice(PROMPTS)
        found = await consumer.acquired(hashes, producer)
        if found < len(hashes):  # dropped at a deadline, or never computed
            await consumer.compute(hashes, producer)

    async def run() -> None:
        consumer, producer, market = await begin(pool)
        for part in range(6):
            offer_id, _ = await market.lend(NUM_LENT)
            for hashes in PROMPTS if not part else ():
                await consumer.compute(hashes, producer)
            for _ in range(chance.randrange(1, 7)):
                await work(consumer, producer)
            keep = chance.choice([0, 0, 5])
            await market.reclaim(offer_id, keep, chance.choice([0, 20, 10_000]))
            for _ in range(chance.randrange(3)):
                await work(consumer, producer)
            await market.reclaim(offer_id, 0, 0)
            await producer.until(lambda: not leased(pool), "the pages return", consumer)
        counters = pool.status()["counters"]
        assert counters["lending_loans_taken"] == 6
        assert counters["peer_blocks_out"] > 0
        await consumer.close()
        await producer.close()

    asyncio.run(run())
