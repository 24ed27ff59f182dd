"""A mover over fake GPUs, with spaces of random pages in memory that a test can see."""

import asyncio
import os
from contextlib import ExitStack, contextmanager

import numpy as np

from services.mempool import mover_self_test
from services.mempool.memory import PoolMemory
from services.mempool.mover import Mover
from services.mempool.mover_regions import HostRegion, SlabRegion
from shared.ids import Epoch
from tests.support.fake_mover_gpus import PAGE_BYTES, FakeGpus, FakeSlabs
from tests.support.fake_vmm_driver import GRANULARITY_BYTES

NUM, PER_SLAB = 24, 4


class HostSpace:
    def __init__(self, number, num_ranks, page_bytes=PAGE_BYTES):
        self.memory = PoolMemory(NUM, page_bytes, Epoch(1), num_ranks)
        self.num_ranks, self.page_bytes = num_ranks, page_bytes
        content = np.random.default_rng(number).integers(0, 256, num_ranks * NUM * page_bytes, np.uint8)
        os.pwrite(self.memory.page_fd, content.tobytes(), 0)
        size = NUM * page_bytes
        self.regions = [HostRegion(self.memory.page_fd, r * size, page_bytes, NUM) for r in range(num_ranks)]

    def pages(self):
        raw = os.pread(self.memory.page_fd, self.num_ranks * NUM * self.page_bytes, 0)
        return np.frombuffer(raw, np.uint8).reshape(self.num_ranks, NUM, self.page_bytes)

    def close(self):
        self.memory.close()


class GpuSpace:
    def __init__(self, number, devices, slabs_per_page=0):
        """`slabs_per_page` 0: several pages in a slab; otherwise pages of so many slabs."""
        per_slab, per_page = (1, slabs_per_page) if slabs_per_page else (PER_SLAB, 1)
        self.page_bytes = slabs_per_page * GRANULARITY_BYTES or PAGE_BYTES
        size = per_slab * self.page_bytes // per_page
        self.slabs = [FakeSlabs(NUM * per_page // per_slab, size) for _ in devices]
        random = np.random.default_rng(number)
        for slabs in self.slabs:
            slabs.write(random.integers(0, 256, NUM * self.page_bytes, np.uint8).tobytes())
        self.regions = [
            SlabRegion(FakeGpus.device(device), slabs, self.page_bytes, NUM, per_slab, per_page)
            for device, slabs in zip(devices, self.slabs, strict=True)
        ]

    def pages(self):
        raw = b"".join(slabs.read() for slabs in self.slabs)
        return np.frombuffer(raw, np.uint8).reshape(len(self.slabs), NUM, self.page_bytes)

    def close(self):
        for slabs in self.slabs:
            slabs.close()


class Rig:
    def __init__(self, gpus=None, **how):
        self.gpus = gpus or FakeGpus()
        self.settled = []
        self.spaces = {}
        self.next_copy = 1
        self.mover = Mover(
            lambda space, pages: self.settled.append((space, pages)), open_gpu=self.gpus.open, **how
        )

    def add(self, number, devices, *how):
        """`devices`: of each rank; a number of ranks for host memory."""
        made = (GpuSpace if isinstance(devices, tuple) else HostSpace)(number, devices, *how)
        self.spaces[number] = made
        self.mover.add_space(number, made.regions)

    async def copy(self, source, target, pairs=((3, 20), (4, 21), (5, 2), (23, 0)), timeout_ms=60_000):
        """Pairs of pages; checks that these and only these arrived, when the copy ended well."""
        before, there = self.spaces[target].pages().copy(), self.spaces[source].pages().copy()
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        future = asyncio.get_running_loop().create_future()
        self.mover.copy(self.next_copy, target, targets, [(source, sources)], timeout_ms, future.set_result)
        self.next_copy += 1
        done = await future
        if done.ok:
            size = min(before.shape[2], there.shape[2])
            before[:, targets, :size] = there[:, sources, :size]
            assert np.array_equal(self.spaces[target].pages(), before)
            assert done.num_bytes == len(pairs) * size * len(before)
        return done

    async def pinned(self):
        """Until all host memory is page-locked."""
        wanted = sum(
            each.num_ranks * NUM * each.page_bytes
            for each in self.spaces.values()
            if isinstance(each, HostSpace)
        )
        await until(lambda: self.mover.status()["pinned_bytes"] == wanted)

    def close(self):
        self.gpus.run()
        idle = self.mover.close()
        for space in self.spaces.values():
            space.close()
        return idle


async def until(condition, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the condition is another thread's state
            await asyncio.sleep(0.002)


@contextmanager
def movers(monkeypatch):
    """A function that makes rigs, all of which end with the block; their self-tests take pages of any size."""
    monkeypatch.setattr(mover_self_test, "MIN_PAGE_BYTES", 1)
    with ExitStack() as stack:

        def make(*args, **how):
            it = Rig(*args, **how)
            stack.callback(it.close)
            return it

        yield make
