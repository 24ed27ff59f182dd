"""A real mempool keeps blocks of parked requests: in lent pages, in host memory, across reclaims and its own death.

The engine is one that works in the pages of a space of its own, without a model; copies are the mover's.
"""

import asyncio
import os
import random

import pytest

from shared.fair.away import Absences, Block
from shared.ids import Epoch, PageId
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.mempool.page_quota import Owned, SealedPage
from shared.wire.mempool import Holding
from shared.wire.mempool_swap import NO_PAGE, SwappedIn, SwappedOut
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import SEED, MempoolProcess, until
from tests.integration.test_mempool_lending import (
    NUM_LENT,
    NUM_PAGES,
    PAGE_BYTES,
    PROMPTS,
    Engine,
    Market,
    begin,
    content,
    leased,
)
from tests.support.open_files import open_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Parking:
    """Requests of an engine, each one of PROMPTS: their blocks are in pages here, or away."""

    def __init__(self, engine: Engine, *others: Engine) -> None:
        self.engine, self.others = engine, others
        self.book = Absences()
        self.pages: dict[str, dict[int, Owned]] = {}
        self.num_lost = 0

    async def compute(self, name: str, number: int) -> None:
        engine, hashes = self.engine, PROMPTS[number]
        await engine.until(lambda: len(engine.stock) >= len(hashes), "pages", *self.others)
        pages = [engine.stock.pop() for _ in hashes]
        engine.quota.writing(pages)
        for (page, _), block_hash in zip(pages, hashes, strict=True):
            engine.write(page, content(block_hash))
        lines = zip(pages, hashes, [SEED, *hashes], strict=False)
        engine.quota.seal([SealedPage(page, epoch, h, parent, 4) for (page, epoch), h, parent in lines])
        self.pages[name] = dict(enumerate(pages))

    async def out(self, name: str, number: int) -> SwappedOut:
        blocks = {i: Block(h, SEED) for i, h in enumerate(PROMPTS[number])}
        swap = self.book.leave(name, blocks, 0.0)
        self.engine.quota.swap_out(swap.number, swap.hashes())
        answer = await self.answer()
        assert isinstance(answer, SwappedOut)
        _, positions = self.book.left(answer.swap, answer.kept)
        self.engine.quota.unpin([self.pages[name].pop(position) for position in positions])
        return answer

    async def back(self, name: str) -> None:
        """Every block that comes holds its bytes; what was lost is computed again."""
        engine = self.engine
        if not self.book.num_away(name):
            return
        count = self.book.num_away(name)
        await engine.until(lambda: len(engine.stock) >= count, "pages to come into", *self.others)
        swap = self.book.come(name, 0.0)
        given = [engine.stock.pop() for _ in swap.blocks]
        engine.quota.swap_in(swap.number, swap.hashes(), given)
        answer = await self.answer()
        assert isinstance(answer, SwappedIn)
        assert self.book.came(answer.swap) is swap
        pages = zip(u32_list(answer.pages), u64_list(answer.epochs), strict=True)
        for (position, block), (page, epoch) in zip(swap.blocks.items(), pages, strict=True):
            if page == NO_PAGE:
                self.num_lost += 1
                continue
            assert engine.read(page) == content(block.block_hash), "other bytes came back"
            self.pages[name][position] = (PageId(page), Epoch(epoch))

    def end(self, name: str) -> None:
        self.engine.quota.unpin(list(self.pages.pop(name).values()))

    async def answer(self) -> SwappedOut | SwappedIn:
        found: list = []
        await self.engine.until(
            lambda: found.extend(self.engine.quota.take_swapped()) or found, "an answer", *self.others
        )
        ((message, _),) = found
        return message


@pytest.fixture
def pool(tmp_path, request):
    limits = {"dram-bytes": 64 * PAGE_BYTES, "dram-for-host": "true", "offer-patience-ms": 60_000}
    limits |= {"copy-timeout-ms": 60_000, "out-timeout-ms": 60_000} | getattr(request, "param", {})
    made = MempoolProcess(tmp_path, **{"capacity-bytes": NUM_PAGES * PAGE_BYTES}, **limits)
    yield made
    made.stop()


def test_blocks_leave_for_a_peers_pages_first_then_for_host_memory_and_come_back_with_their_bytes(pool):
    async def run() -> None:
        consumer, producer, market = await begin(pool)
        await market.lend(NUM_LENT)
        parking = Parking(consumer, producer)
        for number in range(6):  # more than the space holds
            await parking.compute(f"r{number}", number)
            answer = await parking.out(f"r{number}", number)
            assert answer.kept == b"\1" * 8
        for turn in (3, 0, 5, 1, 4, 2):
            await parking.back(f"r{turn}")
            parking.end(f"r{turn}")
        assert parking.num_lost == 0
        counters = pool.status()["counters"]
        assert counters["swap_blocks_out_peer"] > 0
        assert counters["swap_blocks_out_peer"] + counters["swap_blocks_out_dram"] == 48
        assert counters["swap_blocks_in_peer"] > 0
        await consumer.close()
        await producer.close()
        assert pool.status()["num_pinned"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("seed", [1, 2])
def test_reclaims_at_any_moment_change_no_byte_of_what_is_away(pool, seed):
    chance = random.Random(seed)

    async def turn(parking: Parking, number: int) -> None:
        name = f"r{number}"
        if name in parking.pages and parking.book.num_away(name):
            await parking.back(name)
            parking.end(name)
        elif name not in parking.pages:
            await parking.compute(name, number)
            await parking.out(name, number)

    async def run(consumer: Engine, producer: Engine, market: Market) -> None:
        parking = Parking(consumer, producer)
        for _ in range(5):
            offer_id, _ = await market.lend(NUM_LENT)
            for _ in range(chance.randrange(2, 7)):
                await turn(parking, chance.randrange(6))
            await market.reclaim(offer_id, chance.choice([0, 5]), chance.choice([0, 20, 10_000]))
            await turn(parking, chance.randrange(6))
            await market.reclaim(offer_id, 0, 0)
            await producer.until(lambda: not leased(pool), "the pages return", consumer)
        for name in list(parking.pages):
            await parking.back(name)
            parking.end(name)
        assert pool.status()["counters"]["swap_blocks_out_peer"] > 0

    async def whole() -> None:
        consumer, producer, market = await begin(pool)
        await run(consumer, producer, market)
        await consumer.close()
        await producer.close()

    asyncio.run(whole())


# what is away is not here, too: blocks are evicted for all that an engine may have
@pytest.mark.parametrize("pool", [{"checksum-rate": 1, "stock-share": 1.0}], indirect=True)
@pytest.mark.parametrize("where", ["peer", "dram"])
def test_what_somebody_wrote_over_while_it_was_away_is_lost_and_not_wrong(pool, where):
    async def run() -> None:
        consumer, producer, market = await begin(pool)
        if where == "peer":
            await market.lend(NUM_LENT)
        parking = Parking(consumer, producer)
        await parking.compute("whole", 0)
        assert (await parking.out("whole", 0)).kept == b"\1" * 8
        await parking.back("whole")
        parking.end("whole")
        assert parking.num_lost == 0
        await parking.compute("r", 1)
        assert (await parking.out("r", 1)).kept == b"\1" * 8
        counters = pool.status()["counters"]
        assert counters[f"swap_blocks_out_{where}"] == 16
        until(lambda: pool.status()["checks_waiting"] == 0, "all sums are taken")
        await spoil(pool, PROMPTS[1][3], producer if where == "peer" else None)
        await parking.back("r")  # which reads what comes
        parking.end("r")
        assert parking.num_lost > 0
        counters = pool.status()["counters"]
        assert counters["checks_copies_wrong"] == counters["checks_pages_corrupt"] == 1
        await consumer.close()
        await producer.close()
        until(lambda: pool.status()["num_pinned"] == 0, "no pin is left")

    asyncio.run(run())


async def spoil(pool: MempoolProcess, block_hash: bytes, producer: Engine | None) -> None:
    """Change a byte of the one page outside the engine's space that holds this block."""
    wanted = content(block_hash)
    fd = producer.memory.fd if producer is not None else os.open(host_memory_of(pool), os.O_RDWR)
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    place = data.index(wanted)
    assert data.find(wanted, place + 1) < 0
    os.pwrite(fd, bytes([wanted[7] ^ 1]), place + 7)


def host_memory_of(pool: MempoolProcess) -> str:
    """Path of the pages of the last space that was made: host memory behind the engines'."""
    pid = pool.process.pid
    pages = [fd for fd, name in open_files(pid).items() if name.startswith("/memfd:quire-pages ")]
    return f"/proc/{pid}/fd/{max(pages)}"


def test_a_mempool_that_dies_and_comes_back_still_has_what_is_in_host_memory(tmp_path):
    keeper = KeeperProcess(tmp_path)
    limits = {"dram-bytes": 64 * PAGE_BYTES, "dram-for-host": "true", "keeper-socket": keeper.socket}
    limits |= {"copy-timeout-ms": 60_000, "out-timeout-ms": 60_000}
    pool = MempoolProcess(tmp_path, **{"capacity-bytes": NUM_PAGES * PAGE_BYTES}, **limits)

    async def run() -> None:
        engine = Engine(pool, "consumer")
        parking = Parking(engine)
        await parking.compute("r", 0)
        assert (await parking.out("r", 0)).kept == b"\1" * 8
        await parking.compute("stays", 1)
        blocks = {i: Block(h, SEED) for i, h in enumerate(PROMPTS[1])}
        parking.book.leave("stays", blocks, 0.0)  # it was about to ask
        pool.kill()
        until(lambda: engine.quota.lost, "the engine notices")
        pool.start()
        engine.stock += engine.quota.take_granted()
        sealed = list(parking.pages["stays"].values())
        holding = Holding(
            pages=u32_bytes(p for p, _ in engine.stock), epochs=u64_bytes(e for _, e in engine.stock),
            sealed_pages=u32_bytes(p for p, _ in sealed), sealed_epochs=u64_bytes(e for _, e in sealed),
            sealed_hashes=b"".join(PROMPTS[1]), sealed_parents=b"".join([SEED, *PROMPTS[1][:-1]]),
            sealed_valid_tokens=u32_bytes([4] * len(sealed)),
        )  # fmt: skip
        until(lambda: engine.quota.reattach(holding), "attached again")
        assert parking.book.lost_pool() == ["r"]
        assert parking.book.is_here("stays")
        swap = parking.book.again("r", 0.0)
        engine.quota.swap_out(swap.number, swap.hashes())
        answer = await parking.answer()
        assert isinstance(answer, SwappedOut)
        assert answer.kept == b"\1" * 8
        assert answer.blocks_copied == 0
        parking.book.left(answer.swap, answer.kept)
        await parking.back("r")
        assert parking.num_lost == 0
        engine.quota.close()
        engine.memory.close()

    try:
        asyncio.run(run())
    finally:
        pool.stop()
        keeper.stop()
