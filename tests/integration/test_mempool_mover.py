"""Copies of pages between spaces of one mempool: real memory, real threads, host memory only."""

import asyncio
import os
import threading

import numpy as np
import pytest

from services.mempool.memory import PoolMemory
from services.mempool.mover import Mover, MoverBusy, MoverClosed
from services.mempool.mover_regions import HostRegion
from shared.ids import Epoch
from shared.kernels.copy_pages.copies import CopyFailed
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.transfer.errors import TransferRefused
from shared.transfer.reslice import KvEnd

PAGE, NUM, RANKS = 12_345, 48, 2  # the second rank's pages begin inside a page of the kernel's


class Rig:
    """A mover, spaces that hold numbers of their own everywhere, and what it said."""

    def __init__(self, **how):
        self.settled = []
        self.done = {}
        self.memories = {}
        self.mover = Mover(lambda space, pages: self.settled.append((space, pages)), **how)

    def make(self, number, *, num_ranks=RANKS, page_bytes=PAGE):
        memory = PoolMemory(NUM, page_bytes, Epoch(1), num_ranks)
        content = np.random.default_rng(number).integers(0, 256, num_ranks * NUM * page_bytes, np.uint8)
        os.pwrite(memory.page_fd, content.tobytes(), 0)
        self.memories[number] = memory
        return [
            HostRegion(memory.page_fd, rank * NUM * page_bytes, page_bytes, NUM) for rank in range(num_ranks)
        ]

    def add(self, number, end=None, **how):
        self.mover.add_space(number, self.make(number, **how), end)

    def pages(self, number):
        """uint8 [ranks, pages, page_bytes], as it is now."""
        memory = self.memories[number]
        raw = os.pread(memory.page_fd, memory.num_ranks * NUM * memory.page_bytes, 0)
        return np.frombuffer(raw, np.uint8).reshape(memory.num_ranks, NUM, memory.page_bytes)

    def copy(self, copy_id, target, targets, parts, timeout_ms=5000):
        """A future of the copy's CopyDone; a second on_done of one copy fails the test."""
        future = asyncio.get_running_loop().create_future()
        self.mover.copy(copy_id, target, targets, parts, timeout_ms, future.set_result)
        return future

    def close(self, timeout_s=5.0):
        idle = self.mover.close(timeout_s)
        for memory in self.memories.values():
            memory.close()
        return idle


@pytest.fixture
async def rig():
    made = []

    def make(**how):
        made.append(Rig(**how))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_pages_of_two_spaces_arrive_on_every_rank_and_nothing_else_changes(rig):
    it = rig()
    for number in (1, 2, 3):
        it.add(number)
    before = {number: it.pages(number).copy() for number in (1, 2, 3)}
    done = await it.copy(7, 3, [40, 1, 2, 9], [(1, [5, 47]), (2, [0, 9])])
    assert done.ok, done
    assert (done.copy_id, done.num_bytes, done.path) == (7, 4 * RANKS * PAGE, "shm")
    want = before[3]
    want[:, [40, 1]], want[:, [2, 9]] = before[1][:, [5, 47]], before[2][:, [0, 9]]
    assert np.array_equal(it.pages(3), want)
    for number in (1, 2):
        assert np.array_equal(it.pages(number), before[number])
    assert it.mover.status()["paths"]["shm"]["copies"] == 1
