"""Blocks of a real engine's parked requests lie in pages that another space lends, and the lender takes them back.

As test_fair_swap_engine.py: twelve requests take turns in memory for four. A second engine, the test's, lends pages to
the first; as soon as parked blocks are pinned there it wants them back, again and again. With a deadline that copies
can meet the blocks move on to host memory and nothing is computed twice; with one of nothing they are dropped, and
computed again. Either way every answer is that of the order of arrival.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import msgspec
import pytest

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire.lending import Grant, Offer, ReclaimOrder, Token
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone
from tests.integration.fair_rig import in_memory_for_four
from tests.integration.mempool_rig import DESCRIPTION, MempoolProcess
from tests.integration.test_mempool_lending import Engine
from tests.integration.test_pages_under_pressure import PAGE_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CONSUMER = InstanceId("cfs")
NUM_LENT, NUM_PINNED = 24, 4  # pages: on loan, and of these with parked blocks when they are wanted back
NUM_RECLAIMS = 2  # at least
OTHER = msgspec.structs.replace(DESCRIPTION, model="other", fingerprint="g", block_bytes=PAGE_BYTES)
POLL_S = 0.002


class Lender:
    """`num_reclaims`: while that many parked blocks lay in its pages."""

    def __init__(self, pool: MempoolProcess, deadline_ms: int) -> None:
        self.engine = Engine(pool, "lender", OTHER)
        self.deadline_ms, self.num_reclaims = deadline_ms, 0

    async def run(self) -> None:
        client = self.engine.client
        client.start()
        assert await client.wait_connected(30_000)
        for number in count(1):
            await self.lend(number)
            while await self.num_pinned() < NUM_PINNED:
                await self.turn()
            order = ReclaimOrder(
                reclaim_id=f"r{number}", offer_id=f"o{number}", keep_bytes=0, deadline_ms=self.deadline_ms
            )
            assert isinstance(await client.present(order), LendingDone)
            self.num_reclaims += 1
            while await self.num_leased():
                await self.turn()

    async def turn(self) -> None:
        self.engine.answer()
        await asyncio.sleep(POLL_S)

    async def lend(self, number: int) -> None:
        boot, space = Epoch(self.engine.client.boot_generation), SpaceId(0)  # the first that attached
        length_bytes, mempool = NUM_LENT * self.engine.header.page_bytes, InstanceId("m")
        offer = Offer(
            offer_id=f"o{number}", producer=self.engine.name, producer_epoch=Epoch(1), mempool=mempool,
            boot_generation=boot, space=space, length_bytes=length_bytes,
        )  # fmt: skip
        assert isinstance(await self.engine.client.present(offer), LendingDone)
        grant = Grant(
            lease_id=LeaseId(f"l{number}"), offer_id=offer.offer_id, consumer=CONSUMER, purpose="swap",
            mempool=mempool, address="", boot_generation=boot, space=space, length_bytes=length_bytes,
            token=Token(1, number), present_ms=600_000, ttl_ms=600_000, consumer_ttl_ms=600_000,
        )  # fmt: skip
        while not isinstance(answer := await self.engine.client.present(grant), LendingDone):
            assert isinstance(answer, CallFailed)  # its engine is not there, or pages are not
            await self.turn()

    async def num_pinned(self) -> int:
        """Pages on loan that hold blocks of parked requests, or that a copy reads."""
        status = await self.engine.client.status()
        assert status is not None
        return sum(space.num_pinned for space in status.spaces if space.devices == ["cpu:loan"])

    async def num_leased(self) -> int:
        status = await self.engine.client.status()
        assert status is not None
        return status.spaces[0].pages_by_state.get("leased", 0)


@contextmanager
def lending(pool: MempoolProcess, deadline_ms: int, made: list[Lender]):
    """On a thread of its own."""
    lender = Lender(pool, deadline_ms)
    made.append(lender)
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def work() -> None:
        running = asyncio.ensure_future(lender.run())
        ending = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await lender.engine.close()

    failed: list[BaseException] = []

    def in_thread() -> None:
        try:
            loop.run_until_complete(work())
        except BaseException as error:  # noqa: BLE001  raised again below
            failed.append(error)
        loop.close()

    thread = threading.Thread(target=in_thread)
    thread.start()
    try:
        yield
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
        thread.join()
    assert not failed, failed


def run(deadline_ms: int, *policies: str) -> Iterator[dict[str, Any]]:
    made: list[Lender] = []
    with in_memory_for_four(policies=policies, beside=lambda pool: lending(pool, deadline_ms, made)) as found:
        counters = found["status"]["counters"]
        print(
            made[0].num_reclaims,
            {name: n for name, n in counters.items() if name.startswith(("swap", "lend"))},
        )
        yield {**found, "num_reclaims": made[0].num_reclaims}


@pytest.fixture(scope="module")
def moved():
    """With time to copy."""
    yield from run(600_000, "fcfs", "cfs")


@pytest.fixture(scope="module")
def dropped():
    """With none."""
    yield from run(0, "cfs")


def assert_nothing_is_held(found: dict[str, Any]) -> None:
    """But for the lender, whose process lives and whose last loan may be out."""
    status = found["status"]
    assert found["cfs"]["leases"] == 0
    assert (status["num_pinned"], status["num_leases"], status["num_handoffs"]) == (0, 0, 0)
    for space in status["spaces"][1:]:
        assert {name for name, count in space["pages_by_state"].items() if count} <= {
            "free",
            "sealed",
            "leased",
        }
    assert sum(status["pages_by_state"].values()) == status["num_pages"]


def test_parked_blocks_in_lent_pages_move_on_when_these_are_wanted_back_and_nothing_is_computed_twice(moved):
    counts, counters = moved["cfs"]["counts_again"], moved["status"]["counters"]
    assert moved["num_reclaims"] >= NUM_RECLAIMS
    assert counters["swap_blocks_out_peer"] > NUM_RECLAIMS * NUM_PINNED
    assert counters["swap_blocks_in_dram"] > 0
    assert counts["times_parked"] >= 24
    names = ("recomputed_tokens", "times_dropped", "times_preempted", "swap_blocks_lost", "swaps_given_up")
    assert {name: counts.get(name, 0) for name in names} == dict.fromkeys(names, 0), (counts, counters)
    assert counters.get("lending_blocks_dropped", 0) == 0


def test_every_answer_is_that_of_the_order_of_arrival_while_lent_pages_are_taken_back(moved):
    assert moved["cfs"]["crowd"] == moved["fcfs"]["crowd"]
    assert moved["cfs"]["again"] == moved["fcfs"]["crowd"]
    assert_nothing_is_held(moved)


def test_parked_blocks_that_are_dropped_at_a_deadline_are_computed_again_and_no_answer_is_another(
    moved, dropped
):
    assert dropped["num_reclaims"] >= NUM_RECLAIMS
    assert dropped["status"]["counters"]["lending_blocks_dropped"] > 0
    assert dropped["cfs"]["counts_again"]["recomputed_tokens"] > 0
    assert dropped["cfs"]["crowd"] == moved["fcfs"]["crowd"]
    assert dropped["cfs"]["again"] == moved["fcfs"]["crowd"]
    assert_nothing_is_held(dropped)
