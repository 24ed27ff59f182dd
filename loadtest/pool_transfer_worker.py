"""One of the two workers of bench_pool_transfer.py: a rank with its engine's quota, and a caller of the nine calls.

    python -m loadtest.pool_transfer_worker        commands as in child_commands.py: attach, take, check, transfer ...

It has no model. Pages are attached, mapped and written the way an engine's are; each holds 32-bit words that say which
block it is, so that a reader can tell a page that came from one that did not.
"""

import asyncio
import mmap
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.child_commands import serve
from shared.errors import ClusterError, StaleEpoch
from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.kv.layout import EngineDescription
from shared.mempool.api import MemPoolApi
from shared.mempool.direct_ways import Copied, Way
from shared.mempool.flights import Submit
from shared.mempool.held_pages import AddressList
from shared.mempool.page_quota import PageQuota
from shared.mempool.rank_memory import RankMemory
from shared.wire.mempool_api import InsertFlags, PageAddress, TransferFlags

BLOCK_TOKENS = 64
TIMEOUT_MS = 20_000
FIRST_CONTACT_S = 60.0
MAP_S = 30.0
WARM_UP_S = 0.5


class HostPages:
    """Pages of a memfd."""

    def __init__(self, memory: RankMemory) -> None:
        header = memory.header
        self._page_bytes = header.page_bytes
        self._map = mmap.mmap(memory.fd, header.num_pages * header.page_bytes)
        self.most_fds, self.num_handles = count_fds(), 1

    def fill(self, page: int, word: int) -> None:
        """Every 32-bit word of it."""
        begin = page * self._page_bytes
        np.frombuffer(self._map, np.uint32)[begin // 4 : (begin + self._page_bytes) // 4] = word

    def words(self, page: int) -> set[int]:
        """Some of it: both ends and between them."""
        begin = page * self._page_bytes
        return {
            int.from_bytes(self._map[begin + at : begin + at + 4], "little")
            for at in places(self._page_bytes)
        }


class DevicePages:
    """Slabs of one GPU, mapped writable side by side as an engine's window has them."""

    def __init__(self, memory: RankMemory, ordinal: int) -> None:
        from loadtest.transfer_rig import Gpu
        from shared.transfer.cuda_window import CudaWindow

        self._page_bytes = memory.header.page_bytes
        self._gpu = Gpu(ordinal)
        self._gpu.copy.make_current()
        self.num_handles, slab_bytes = memory.num_slabs, memory.pages_per_slab * self._page_bytes
        self._window = CudaWindow(self._gpu.driver, ordinal, self.num_handles, slab_bytes, writable=True)
        self.most_fds = 0
        for _, fds in memory.slab_fds():
            self.most_fds = max(self.most_fds, count_fds())
            self._window.add(fds)

    def fill(self, page: int, word: int) -> None:
        """Every 32-bit word of it."""
        self._gpu.mark(self._window.address + page * self._page_bytes, self._page_bytes, word)

    def words(self, page: int) -> set[int]:
        """Some of it: both ends and between them."""
        begin = self._window.address + page * self._page_bytes
        return {self._gpu.word(begin + at) for at in places(self._page_bytes)}


def places(page_bytes: int) -> list[int]:
    """Offsets of words that are looked at."""
    return [page_bytes * n // 8 // 4 * 4 for n in range(8)] + [page_bytes - 4]


def count_fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


class Worker:
    """What the commands do."""

    def __init__(self) -> None:
        self._pages: HostPages | DevicePages
        self._held: dict[str, list[PageAddress]] = {}
        self._rng = random.Random(7)

    async def attach(
        self, socket: str, api_socket: str, instance: str, device: str, ordinal: int, capacity: int, page: int
    ) -> dict[str, Any]:
        """The pool makes this worker's pages, and this process maps them. Times of both."""
        self._instance = InstanceId(instance)
        described = EngineDescription(
            model="bench", fingerprint=f"bench-{page}", dtype="bfloat16", layout="cross-layer", backend="none",
            block_tokens=BLOCK_TOKENS, block_bytes=page, num_layers=32,
        )  # fmt: skip
        before = count_fds()
        begin = time.perf_counter()
        self._memory = RankMemory(
            Path(socket), self._instance, described, 0, device=device, capacity_bytes=capacity
        )
        made_s = time.perf_counter() - begin
        self._pages = (
            DevicePages(self._memory, ordinal) if device.startswith("cuda") else HostPages(self._memory)
        )
        attach_s = time.perf_counter() - begin - made_s
        self._memory.stay_attached()
        self._quota = PageQuota(Path(socket), self._instance, described, 1)
        self._quota.attach()
        self._api = MemPoolApi(
            Path(api_socket), self._instance, seed=chain_seed("bench", ""), block_tokens=BLOCK_TOKENS,
            pool_socket=socket,
        )  # fmt: skip
        await self._api.connect()
        return {
            "made_s": round(made_s, 4), "attach_s": round(attach_s, 4), "num_pages": self._memory.header.num_pages,
            "page_bytes": self._memory.header.page_bytes, "handles": self._pages.num_handles,
            "most_fds": self._pages.most_fds - before, "open_fds": count_fds() - before,
        }  # fmt: skip

    async def take(self, num: int) -> dict[str, Any]:
        """`num` scattered pages of this worker, written, named and pinned: the sources of transfers."""
        pages = await self._scattered(num, self._instance)
        for number, address in enumerate(pages):
            self._pages.fill(address.page, number + 1)
        tokens = [self._rng.randrange(1 << 20) for _ in range(num * BLOCK_TOKENS)]
        self._held["sources"] = await self._api.insert(tokens, pages, InsertFlags.PIN)
        return {"pages": [address.page for address in self._held["sources"]]}

    async def take_targets(self, num: int, instance: str) -> dict[str, Any]:
        """`num` scattered pages of the other worker, for what is transferred to it."""
        self._held["targets"] = await self._scattered(num, InstanceId(instance))
        return {"pages": [address.page for address in self._held["targets"]]}

    async def _scattered(self, num: int, instance: InstanceId) -> list[PageAddress]:
        """Every second one or so of twice as many, in no order."""
        every = await self._api.alloc_mem(2 * num, "hbm", instance)
        self._rng.shuffle(every)
        await self._api.free_mem(every[num:])
        return AddressList(every[:num])  # as alloc_mem gives them

    async def wipe(self, pages: list[int]) -> dict[str, Any]:
        """So that what is there later has come."""
        for page in pages:
            self._pages.fill(page, 0)
        return {}

    async def check(self, pages: list[int]) -> dict[str, Any]:
        """Page n holds block n. Raises: RuntimeError."""
        for number, page in enumerate(pages):
            if (found := self._pages.words(page)) != {number + 1}:
                raise RuntimeError(f"page {page} holds {sorted(found)} instead of {number + 1}")
        return {"checked": len(pages)}

    async def transfer(self, instance: str, repeats: int, mediated: bool = False) -> dict[str, Any]:
        """MemPool.transfer of all sources to the targets, again and again. Wall time from call to answer, in us, and
        how many were copied here. First for WARM_UP_S: GPUs, links and cores that were idle run slower for a while.
        `mediated`: as it is with a flag that says nothing about given targets."""
        wall_us: list[float] = []
        flags = TransferFlags.HBM if mediated else TransferFlags.NONE

        async def one() -> None:
            await self._api.transfer(
                InstanceId(instance),
                self._held["sources"],
                self._held["targets"],
                flags,
                timeout_ms=TIMEOUT_MS,
            )

        end = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < end:
            await one()
        before = self._num_direct()
        for _ in range(repeats):
            begin = time.perf_counter()
            await one()
            wall_us.append(round((time.perf_counter() - begin) * 1e6, 1))
        return {"wall_us": wall_us, "direct": self._num_direct() - before}

    async def overhead(self, instance: str, repeats: int) -> dict[str, Any]:
        """transfer() as it is, but that nothing is copied: its checks and this process's other work, in us."""
        assert self._api.direct is not None
        copying: dict[tuple[int, int], Submit] = {}

        def nothing(way: Way) -> Submit:
            copying[id(way.source), id(way.target)] = way.submit
            return lambda sources, targets, size: Copied()

        self._api.direct.ways.copy_by(nothing)
        found = await self.transfer(instance, repeats)
        self._api.direct.ways.copy_by(lambda way: copying[id(way.source), id(way.target)])
        return found

    def _num_direct(self) -> int:
        return self._api.direct.counters["direct"] if self._api.direct is not None else 0

    async def mapped(self, instance: str) -> dict[str, Any]:
        """Behind the first contact: until this process can copy by itself, in seconds, or MAP_S. Returns when nothing
        is compiled any more either: meanwhile checks are numpy's, and threads wait for one another."""
        begin = time.perf_counter()
        held, direct = self._held, self._api.direct
        while direct is not None and not direct.ways.has(held["sources"], held["targets"]):
            if time.perf_counter() - begin > MAP_S:
                print(f"not mapped: {dict(direct.counters)}", file=sys.stderr, flush=True)
                break
            await asyncio.sleep(0.005)
        waited_s = time.perf_counter() - begin
        for thread in threading.enumerate():
            if thread.name == "quire-caller-map":
                thread.join(MAP_S)
        return {"waited_s": round(waited_s, 4), "compiled_s": round(time.perf_counter() - begin, 4)}

    async def first_contact(self, instance: str) -> dict[str, Any]:
        """The first transfer ever: how long until one arrived, and how many failed before it."""
        begin = time.perf_counter()
        for failed in range(10_000):
            last = time.perf_counter()
            try:
                await self._api.transfer(
                    InstanceId(instance), self._held["sources"], self._held["targets"], timeout_ms=TIMEOUT_MS
                )
                now = time.perf_counter()
                return {
                    "waited_s": round(last - begin, 4),
                    "cold_us": round((now - last) * 1e6, 1),
                    "failed": failed,
                }
            except ClusterError as error:
                if time.perf_counter() - begin > FIRST_CONTACT_S:
                    raise
                print(f"first contact: {error.code}: {error.message}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.02)
        raise RuntimeError("not reached")

    async def stale(self, instance: str) -> dict[str, Any]:
        """Sources under another epoch than they have: refused, and nothing arrives. How many were, of how many."""
        refused = 0
        sources = self._held["sources"]
        for number in range(len(sources)):
            address = sources[number]._replace(epoch=sources[number].epoch + 1)
            asked = [*sources[:number], address, *sources[number + 1 :]]
            try:
                await self._api.transfer(
                    InstanceId(instance), asked, self._held["targets"], timeout_ms=TIMEOUT_MS
                )
            except StaleEpoch:
                refused += 1
        return {"asked": len(sources), "refused": refused}

    async def give_up(self) -> dict[str, Any]:
        """Pages and pins of take() and take_targets()."""
        for held in self._held.values():
            await self._api.free_mem(held)
        self._held.clear()
        return {}


def main() -> int:
    """Until the input ends."""
    worker = Worker()
    names = (
        "attach",
        "take",
        "take_targets",
        "wipe",
        "check",
        "transfer",
        "mapped",
        "overhead",
        "first_contact",
        "stale",
        "give_up",
    )
    asyncio.run(serve({name: getattr(worker, name) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
