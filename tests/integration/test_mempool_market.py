"""A real coordinator with its Redis and a real mempool: what REST grants is lent, kept while the coordinator is dead,
and taken back by REST."""

import asyncio
from itertools import count

import pytest

from shared.ids import Epoch, InstanceId, SpaceId
from shared.transport.lending_client import LendingClient
from shared.wire.lending import AskLease, AskReclaim, Grant, OfferMemory, OfferView, ReclaimView, SpaceRef
from shared.wire.mempool_lending import LendingDone
from tests.integration.lending_rig import coordinator, pool_flags
from tests.integration.mempool_rig import MempoolProcess
from tests.integration.test_mempool_lending import (
    NUM_LENT,
    PAGE_BYTES,
    PROMPTS,
    Engine,
    begin,
    leased,
)

__all__ = ["coordinator"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MEMPOOL = InstanceId("mempool-0")


@pytest.fixture
def pool(tmp_path, coordinator):
    made = MempoolProcess(tmp_path, **pool_flags(coordinator))
    yield made
    made.stop()


async def asked(call, is_good, *engines: Engine):
    """Repeat a call of the market until its answer is good."""
    async with asyncio.timeout(120):
        while not is_good(answer := await call()):
            for engine in engines:
                engine.answer()
            await asyncio.sleep(0.02)
    return answer


def test_memory_goes_from_one_engine_to_another_and_back_by_rest(pool, coordinator):
    async def run() -> None:
        consumer, producer, by_hand = await begin(pool)
        both = (consumer, producer)
        client = LendingClient(coordinator.url, patience_ms=60_000)
        space, boot = SpaceId(by_hand.space), Epoch(producer.client.boot_generation)
        offer = OfferMemory(
            producer=producer.name, mempool=MEMPOOL, boot_generation=boot, space=space,
            length_bytes=NUM_LENT * PAGE_BYTES,
        )  # fmt: skip
        view = await asked(
            lambda: client.offer(offer, key="offer"),
            lambda answer: isinstance(answer, OfferView) and answer.state == "open",
            *both,
        )
        assert leased(pool) == NUM_LENT == view.limit_bytes // PAGE_BYTES
        ask = AskLease(
            consumer=consumer.name, length_bytes=NUM_LENT * PAGE_BYTES, purpose="overflow",
            spaces=[SpaceRef(mempool=MEMPOOL, space=space)], ttl_ms=600_000,
        )  # fmt: skip
        keys = count()

        async def borrow() -> object:
            """A grant that came too late is no good, and another one is asked for."""
            answer = await client.lease(ask, key=f"l{next(keys)}")
            return await consumer.client.present(answer) if isinstance(answer, Grant) else answer

        await asked(borrow, lambda answer: isinstance(answer, LendingDone))
        for hashes in PROMPTS:
            await consumer.compute(hashes, producer)
        coordinator.process.kill()
        for hashes in PROMPTS:
            assert await consumer.acquired(hashes, producer) == len(hashes), "nobody needs the coordinator"
        counters = pool.status()["counters"]
        assert counters["peer_blocks_out"] > 0
        assert counters["blocks_pulled_from_peer"] > 0
        coordinator.start().wait()
        order = AskReclaim(offer_id=view.offer.offer_id, producer=producer.name, deadline_ms=60_000)
        taken = await asked(
            lambda: client.reclaim(order, key="r"), lambda answer: hasattr(answer, "reclaim_id"), *both
        )
        await asked(
            lambda: client.reclaim_state(taken.reclaim_id),
            lambda answer: isinstance(answer, ReclaimView) and answer.state == "done",
            *both,
        )
        assert leased(pool) == 0
        for hashes in PROMPTS:
            assert await consumer.acquired(hashes, producer) == len(hashes)
        await client.close()
        await consumer.close()
        await producer.close()

    asyncio.run(run())
