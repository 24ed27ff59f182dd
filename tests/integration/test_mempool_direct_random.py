"""What a caller's library believes that it holds, against what the mempool knows: never more, whatever overlaps.

Calls of one connection overlap at random, copies end late or fail, answers are not waited for; another connection works
in the same spaces. After every turn each page that the library would copy from or into by itself is really held, of
that epoch, and touched by no copy of the mempool's.
"""

import asyncio
import random
from collections import defaultdict
from contextlib import suppress

import numpy as np
import pytest

from services.mempool.core.api_state import MovePages
from shared.errors import ClusterError
from shared.ids import InstanceId
from shared.mempool.api import MemPoolApi
from shared.mempool.held_pages import HeldPages, stretch_of
from shared.wire.mempool_api import InsertFlags, MatchFlags, PageAddress, TransferFlags, instance_key
from tests.integration.test_mempool_api_socket import SEED, Served
from tests.support import held_checks
from tests.unit.mempool_api_rig import D, P

SEEDS = range(12)
STEPS = 150
KINDS = [
    "alloc",
    "alloc",
    "alloc",
    "free",
    "free",
    "insert",
    "insert",
    "match",
    "transfer",
    "transfer",
    "swap",
]


class Random:
    def __init__(self, served: Served, api: MemPoolApi, seed: int) -> None:
        self.served, self.api, self.rng = served, api, random.Random(seed)
        self.seen: list[PageAddress] = []  # every address of an answer
        self.in_doubt: list[tuple[int, int]] = []
        self.prompts: list[list[int]] = [[n] * 8 + [n, 1, 2, 3] for n in range(4)]

    def some(self, most: int = 3) -> list[PageAddress]:
        recent = self.seen[-12:]
        return self.rng.sample(recent, min(len(recent), self.rng.randint(1, most)))

    async def step(self) -> None:
        api, rng = self.api, self.rng
        kind = rng.choice(KINDS)
        instance, tokens = rng.choice([P, D]), rng.choice(self.prompts)
        match kind:
            case "alloc":
                self.seen += await api.alloc_mem(
                    rng.randint(1, 3), rng.choice(["hbm", "dram", "mixed"]), instance
                )
            case "free":
                await api.free_mem(self.some())
            case "insert":
                pages = self.some(2)
                self.seen += await api.insert(tokens[: 4 * len(pages)], pages, rng.choice(list(InsertFlags)))
            case "match":
                self.seen += await api.match(tokens, rng.choice(list(MatchFlags)), instance)
            case "swap":
                await api.swap_out(1, instance)
                self.seen += await api.swap_in(self.some(2))
            case "transfer":
                await self.transfer(instance, tokens)

    async def transfer(self, instance: InstanceId, tokens: list[int]) -> None:
        sources = self.some(2)
        targets = self.some(2)[: len(sources)]
        flags = self.rng.choice([TransferFlags.NONE, TransferFlags.HBM, TransferFlags.FREE_SOURCE])
        if self.rng.random() < 0.3:
            await self.api.transfer_with_insert(
                instance, tokens[: 4 * len(sources)], sources, targets, flags, timeout_ms=60_000
            )
        else:
            await self.api.transfer(instance, sources, targets, flags, timeout_ms=60_000)

    def end_copies(self) -> None:
        """Some fail, and some of these leave their targets in doubt for a while."""
        rig, rng = self.served.rig, self.rng
        for space, page in self.in_doubt:
            rig.perform(rig.api.on_settled(space, [page]))
        self.in_doubt = []
        result = {}
        if rng.random() < 0.3:
            moved = [each for action in rig.held if isinstance(action, MovePages) for each in action.targets]
            doubted = [(each.space, page) for each in moved for page in each.pages if rng.random() < 0.5]
            result = {"failed": True, "quarantined": [page for _, page in doubted]}
            self.in_doubt = doubted
        rig.end_copies(**result)
        self.served.flush()


def check(held: HeldPages, served: Served) -> int:
    """How many pages the library would write."""
    rig = served.rig
    holder = next((h for h in rig.api.holders.values() if h.instance == P), None)
    if holder is None:  # its first message is on its way
        return 0
    count = 0
    for (key, space), columns in held._columns.items():
        for page in np.flatnonzero(columns.owned | columns.pins.astype(np.uint64)).tolist():
            for epoch in {int(columns.owned[page]), int(columns.pinned[page])} - {0}:
                address = PageAddress(key, 1, space, page, epoch)
                stretch = stretch_of([address])
                if not columns.shared and held_checks.may_write(columns, stretch):
                    count += 1
                    assert holder.owns(address), address
                    assert not rig.api.moves.busy.has(space, page), address
                if held_checks.is_pinned(columns, stretch):
                    assert holder.pinned(address) is not None, address
                    assert rig.spaces[space].is_current(page, epoch)
    return count


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_library_never_believes_that_it_holds_more_than_it_does(tmp_path, seed):
    served = Served(tmp_path / "api.sock")
    served.rig.net.bytes = defaultdict(str)
    await served.server.start()
    api = MemPoolApi(
        served.server.path, P, seed=SEED, block_tokens=4, pool_socket=tmp_path / "nothing" / "pool.sock"
    )
    other = MemPoolApi(served.server.path, D, seed=SEED, block_tokens=4)
    await api.connect()
    await other.connect()
    world = Random(served, api, seed)
    mine = random.Random(seed)
    tasks: set[asyncio.Task] = set()

    async def attempt(call) -> None:
        with suppress(ClusterError):
            await call()

    async def theirs() -> None:
        """Another caller copies from what it may, into pages of the first one's instance."""
        sources = await other.alloc_mem(1, "hbm", D)
        targets = world.some(1) if mine.random() < 0.5 else await other.alloc_mem(1, "dram", P)
        await other.transfer(P, sources, targets)

    writable = 0
    for _ in range(STEPS):
        served.rig.hold = mine.random() < 0.6
        tasks.add(asyncio.create_task(attempt(world.step)))
        if mine.random() < 0.3 and world.seen:
            tasks.add(asyncio.create_task(attempt(theirs)))
        for _ in range(mine.randint(0, 6)):
            await asyncio.sleep(0.0005)
            writable += check(api.direct.held, served)
        if tasks and mine.random() < 0.1:
            mine.choice(sorted(tasks, key=id)).cancel()
        if mine.random() < 0.4:
            world.end_copies()
        writable += check(api.direct.held, served)
        tasks = {task for task in tasks if not task.done()}
    served.rig.hold = False
    world.end_copies()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    check(api.direct.held, served)
    assert writable > 50, "it would copy something"
    assert instance_key(P) in {key for key, _ in api.direct.held._columns}
    api.close()
    other.close()
    served.server.close()
