"""A page on GPUs has the sum of its bytes, rank by rank, however many allocations and copies it takes."""

import asyncio
import ctypes
import random
from types import SimpleNamespace

import pytest
import xxhash

from services.mempool import gpu_page_sums
from services.mempool.gpu_page_sums import GpuPages
from services.mempool.page_sums import PageSums, Piece, short
from shared.errors import ResourceError

SLAB, PAGE = 4096, 3 * 4096


class Driver:
    """Device memory is this process's; no copy may cross the end of a slab."""

    def __init__(self) -> None:
        self.held: dict[int, object] = {}
        self.copies: list[int] = []
        self.stands_still = False

    def make_current(self) -> None: ...

    def allocate_host(self, num_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.held[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free_host(self, address: int) -> None:
        del self.held[address]

    def create_stream(self) -> int:
        return 1

    def create_event(self) -> int:
        return 2

    def destroy_stream(self, stream: int) -> None: ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def passed(self, event: int) -> bool:
        return not self.stands_still

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.copies.append(num_bytes)
        ctypes.memmove(target, source, num_bytes)


@pytest.fixture
def rig():
    driver = Driver()
    gpu = SimpleNamespace(device="cuda:a", copy=driver)
    ranks = [ctypes.create_string_buffer(random.Random(r).randbytes(4 * PAGE), 4 * PAGE) for r in range(2)]
    windows = [SimpleNamespace(gpu=gpu, slab_bytes=SLAB, address=ctypes.addressof(rank)) for rank in ranks]
    return SimpleNamespace(driver=driver, ranks=ranks, pages=GpuPages(windows, PAGE))


@pytest.mark.parametrize("num_bytes", [1, SLAB, SLAB + 1, PAGE])
@pytest.mark.parametrize("staging", [1000, 1 << 20])
def test_every_byte_of_the_block_counts_and_none_besides(rig, num_bytes, staging, monkeypatch):
    monkeypatch.setattr(gpu_page_sums, "STAGING_BYTES", staging)
    expected = b"".join(rank.raw[2 * PAGE : 2 * PAGE + num_bytes] for rank in rig.ranks)
    assert rig.pages.sum(2, num_bytes) == short(xxhash.xxh3_64_intdigest(expected))
    assert max(rig.driver.copies) <= min(SLAB, staging)
    assert sum(rig.driver.copies) == 2 * num_bytes
    rig.pages.close()
    assert rig.driver.held == {}


async def test_of_a_page_that_does_not_come_nothing_is_known(rig, monkeypatch):
    monkeypatch.setattr(gpu_page_sums, "LIMIT_S", 0.01)
    rig.driver.stands_still = True
    with pytest.raises(ResourceError, match="takes more than"):
        rig.pages.sum(0, 10)
    sums = PageSums(lambda space: rig.pages)
    answer = asyncio.get_running_loop().create_future()
    sums.sums([Piece(0, 0, 10)], answer.set_result)
    assert await answer == [0]
    sums.close()
