"""A consumer of lent memory in a process of its own: blocks out of this GPU into a lender's pages and back, always.

    python -m loadtest.producers.lent_traffic --device cuda --socket PATH --api-socket PATH --coordinator-url URL

Commands (child_commands.py): open, borrow, start, mark, stop, fill, to_dram, watch, came_back, give_back. The way is
that of every consumer: leases of the market, taken by the mempool, pages allocated by the nine calls, copies by the
mempool within the lender's budget. `NUM_LOOPS` batches are on their way at once, out and in, so that both directions
are busy. Every batch has bytes of its own; what came back is compared with what left.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from loadtest.child_commands import serve
from shared.aqua.borrower import Borrower
from shared.aqua.local_memory import LocalMemory, mempool_device, open_window
from shared.aqua.own_space import OwnSpace
from shared.errors import ClusterError
from shared.ids import BlockHash, InstanceId
from shared.mempool.api import MemPoolApi
from shared.mempool.client import MempoolClient
from shared.transport.lending_client import LendingClient
from shared.wire.mempool_api import ADDRESS_BYTES, Evacuated, PageAddress

NAME = InstanceId("consumer")
NUM_LOOPS = 4
TIMEOUT_MS = 60_000
TTL_MS = 600_000
WATCH_S = 0.002
MAX_BATCH_PAGES = 64  # of a copy: as many as the mempool moves at once when it brings lent pages home


class Traffic:
    """One consumer. Its methods are the commands."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
        self._client = MempoolClient(options.socket, NAME)
        self._market = LendingClient(options.coordinator_url, patience_ms=TIMEOUT_MS)
        self._api = MemPoolApi(
            options.api_socket,
            NAME,
            seed=BlockHash(bytes(32)),
            block_tokens=1,
            on_evacuated=self._on_evacuated,
        )
        self._out: list[list[PageAddress]] = []  # batches that leave, a loop each
        self._back: list[list[PageAddress]] = []  # what came back of them
        self._lent: list[list[PageAddress]] = []  # batches in lent pages
        self._beside: list[list[PageAddress]] = []  # the page in host memory of each
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._bytes = self._evacuated = self._lost = 0
        self._evacuated_s = 0.0
        self._shift = 0

    def _on_evacuated(self, message: Evacuated) -> None:
        self._evacuated += len(message.addresses) // ADDRESS_BYTES
        self._lost += len(message.lost) // ADDRESS_BYTES
        self._evacuated_s = time.perf_counter()

    async def open(self, page_bytes: int, batch_pages: int) -> dict[str, Any]:
        """Pages here for all loops, mapped and filled."""
        batch_pages = min(batch_pages, MAX_BATCH_PAGES)
        self._batch_pages = batch_pages
        count = 2 * NUM_LOOPS * batch_pages
        device = mempool_device(self._device, NAME)
        self._own = OwnSpace(
            self._options.socket, NAME, device, page_bytes, count * page_bytes, "token-major"
        )
        self._page_bytes = self._own.page_bytes
        self._memory = LocalMemory(open_window(self._own, self._own.num_pages, self._device), self._device)
        await self._api.connect()
        self._client.start()
        if not await self._client.wait_connected(TIMEOUT_MS):
            raise ConnectionError("the mempool does not answer")
        pages = await self._api.alloc_mem(count, "hbm")
        for address in pages:
            self._memory.map(address.page, [address.page])
        batches = [pages[first : first + batch_pages] for first in range(0, count, batch_pages)]
        self._out, self._back = batches[:NUM_LOOPS], batches[NUM_LOOPS:]
        self._words = torch.arange(self._page_bytes // 8, device=self._device)
        for batch in self._out:
            for address in batch:
                self._view(address).copy_(self._words + address.page)
        self._memory.wait()
        return {"page_bytes": self._page_bytes}

    def _view(self, address: PageAddress) -> torch.Tensor:
        return self._memory.view(address.page, self._words.shape, torch.int64)

    async def borrow(self, num_bytes: int) -> dict[str, Any]:
        """Leases of so many bytes together, and their pages. Raises: TimeoutError when nobody lends so much."""
        self._evacuated = self._lost = 0
        self._borrower = Borrower(
            NAME, self._client, self._market, lambda _: None, wanted_bytes=num_bytes,
            min_bytes=self._page_bytes, ttl_ms=TTL_MS, every_ms=20,
        )  # fmt: skip
        self._renewing = asyncio.create_task(self._borrower.run())
        count = num_bytes // self._page_bytes
        batch = self._batch_pages
        end_s = time.monotonic() + TIMEOUT_MS / 1000
        while len(self._lent) * batch < count - batch + 1:
            try:
                found = await self._api.alloc_mem(batch, "leased")
            except ClusterError as error:  # not lent yet
                if time.monotonic() > end_s:
                    held = self._borrower.held_bytes
                    raise TimeoutError(f"{held} of {num_bytes} bytes were borrowed: {error}") from error
                await asyncio.sleep(0.02)
                continue
            self._lent.append(found[:batch])
            self._beside.append(found[batch:])
        return {"lent_bytes": len(self._lent) * batch * self._page_bytes}

    async def start(self) -> dict[str, Any]:
        """Batches go out and come back from now on."""
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._loop(number)) for number in range(NUM_LOOPS)]
        return {}

    async def _loop(self, number: int) -> None:
        mine = self._lent[number::NUM_LOOPS] or self._lent[:1]
        turn = 0
        while not self._is_stopping:
            lent = mine[turn % len(mine)]
            turn += 1
            await self._move(self._out[number], lent)
            await self._move(lent, self._back[number])

    async def _move(self, sources: Sequence[PageAddress], targets: Sequence[PageAddress]) -> None:
        await self._api.transfer(NAME, sources, targets, timeout_ms=TIMEOUT_MS)
        self._bytes += len(sources) * self._page_bytes

    async def mark(self) -> dict[str, Any]:
        """Bytes that have moved so far, out and in."""
        for task in self._tasks:
            if task.done():
                task.result()
        return {"bytes": self._bytes, "at_s": time.perf_counter()}

    async def stop(self) -> dict[str, Any]:
        """No batch moves any more; all that came back is what left. Raises: ValueError when it is not."""
        self._is_stopping = True
        for task in self._tasks:
            await task
        self._tasks = []
        for out, back in zip(self._out, self._back, strict=True):
            self._compare(out, back)
        return {}

    def _compare(self, out: Sequence[PageAddress], back: Sequence[PageAddress]) -> None:
        for left, came in zip(out, back, strict=True):
            if not torch.equal(self._view(left), self._view(came)):
                raise ValueError(f"page {left.page} came back with other bytes")

    async def fill(self, shift: int) -> dict[str, Any]:
        """Every lent page has bytes of a batch: which, changes with `shift`."""
        self._shift = shift
        for number, lent in enumerate(self._lent):
            await self._move(self._out[(number + shift) % NUM_LOOPS], lent)
        return {"pages": sum(map(len, self._lent))}

    async def to_dram(self) -> dict[str, Any]:
        """How fast all lent pages go to host memory: the way of a reclaim, with as many copies at once."""
        began_s = time.perf_counter()
        await asyncio.gather(*map(self._move, self._lent, self._beside))
        took_s = time.perf_counter() - began_s
        return {"bytes": sum(map(len, self._lent)) * self._page_bytes, "seconds": took_s}

    async def watch(self, space: int) -> dict[str, Any]:
        """Until no page of a lender's space is lent: when that was seen, how many its engines have then, the course."""
        course: list[list[float]] = []
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            while True:
                status = await self._client.status()
                now_s = time.perf_counter()
                mine = next((s for s in status.spaces if s.number == space), None) if status else None
                if mine is not None:
                    left = mine.pages_by_state.get("leased", 0)
                    course.append([now_s, left])
                    if not left:
                        free = mine.pages_by_state.get("free", 0)
                        stride = max(1, len(course) // 50)
                        return {"at_s": now_s, "free": free, "course": course[::stride]}
                await asyncio.sleep(WATCH_S)

    async def came_back(self) -> dict[str, Any]:
        """The lender took its pages back: when the last was named, and whether host memory has their bytes."""
        wanted = sum(map(len, self._lent))
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            while self._evacuated + self._lost < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        for number, beside in enumerate(self._beside):
            back = self._back[number % NUM_LOOPS]
            await self._move(beside, back)
            self._compare(self._out[(number + self._shift) % NUM_LOOPS], back)
        return {"pages": self._evacuated, "lost": self._lost, "at_s": self._evacuated_s}

    async def give_back(self) -> dict[str, Any]:
        """Everything that is borrowed, pages in host memory too."""
        self._renewing.cancel()
        await asyncio.wait([self._renewing])
        for batch in (*self._lent, *self._beside):
            await self._api.free_mem(batch)
        self._lent, self._beside = [], []
        await self._borrower.give_back()
        return {}


def main(argv: Sequence[str]) -> int:
    """Until the input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--api-socket", required=True)
    parser.add_argument("--coordinator-url", required=True)
    options = parser.parse_args(argv)

    async def run() -> None:
        traffic = Traffic(options)
        names = (
            "open", "borrow", "start", "mark", "stop", "fill", "to_dram", "watch", "came_back", "give_back",
        )  # fmt: skip
        await serve({name: getattr(traffic, name) for name in names})

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
