"""The mempool's mover on real GPUs: `python -m tests.gpu.mover_on_gpus` checks every direction and prints rates.

One or two GPUs. Spaces: two on GPU 0, one on GPU 1 and one over both GPUs (two ranks) where there are two, two in host
memory. Every page of a space has a pattern of its own, and after a way's first copy every byte of the target space is
compared. Rates are from copy() to on_done, event loop included. Under a minute; it ends with an error when a byte is
wrong.
"""

import argparse
import asyncio
import os
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from services.mempool.memory import PoolMemory
from services.mempool.mover import CopyDone, Mover
from services.mempool.mover_regions import HostRegion, RankRegion, SlabRegion
from services.mempool.slabs import DeviceSlabs
from shared.ids import Epoch
from shared.kernels.copy_pages.host_memory import move, view
from shared.transfer.cuda_window import load_driver

MIB = 1 << 20
SETS = ((64, 8 * MIB), (512, 2 * MIB))
SPARE = 16  # pages that a copy leaves alone
REPEATS = 9
TIMEOUT_MS = 20_000
PIN_S = 10.0  # at most, for page-locking
HOST, HOST2, FIRST, SECOND, OTHER, BOTH, HOST_TWO = range(1, 8)
NAMES = {
    HOST: "host", HOST2: "host B", FIRST: "gpu 0", SECOND: "gpu 0 B", OTHER: "gpu 1", BOTH: "gpu 0+1",
    HOST_TWO: "host x2",
}  # fmt: skip


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """A driver call that has to succeed."""
    status, *results = getattr(driver, name)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{name}: {status.name}")
    return results[0] if results else None


def gpus(driver: Any) -> list[str]:
    """Devices as the mempool names them; at most two."""
    count = min(2, int(call(driver, "cuDeviceGetCount")))
    found = [call(driver, "cuDeviceGetUuid", call(driver, "cuDeviceGet", number)) for number in range(count)]
    return [f"cuda:{bytes(uuid.bytes).hex()}" for uuid in found]


class Rig:
    """A mover and its spaces, for one size of pages."""

    def __init__(self, devices: list[str], num_pages: int, page_bytes: int, **how: Any) -> None:
        self.driver = load_driver()
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.settled: list[tuple[int, tuple[int, ...]]] = []
        self.mover = Mover(lambda space, pages: self.settled.append((space, pages)), **how)
        self.pins = bool(how.get("pin_host"))
        self.pinned_s = 0.0
        self.devices: dict[int, list[str]] = {
            HOST: [""],
            HOST2: [""],
            FIRST: [devices[0]],
            SECOND: [devices[0]],
        }
        if len(devices) > 1:
            self.devices |= {OTHER: [devices[1]], BOTH: devices, HOST_TWO: ["", ""]}
        self.kept: list[Any] = []
        self.next_copy = 0
        self.holds: dict[
            tuple[int, int, int], tuple[int, int, int]
        ] = {}  # (space, rank, page) -> whose pattern
        self.words = np.arange(page_bytes // 4, dtype=np.uint32)
        self.wanted, self.found = (
            np.empty_like(self.words),
            np.empty_like(self.words),
        )  # used again for every page

    async def open(self, numbers: list[int]) -> float:
        """Make, map and fill these spaces; seconds that mapping took."""
        regions = {number: self._make(number) for number in numbers}
        begun_s = time.monotonic()
        for number in numbers:
            self.mover.add_space(number, regions[number])
        while not all(self.mover.is_mapped(number) for number in numbers):
            for number in numbers:
                if (failure := self.mover.failure(number)) is not None:
                    raise failure
            await asyncio.sleep(0.001)
        took_s = time.monotonic() - begun_s
        hosts = sum(len(self.devices[number]) for number in numbers if not self.devices[number][0])
        wanted = hosts * self.num_pages * self.page_bytes if self.pins else 0
        while self.mover.status()["pinned_bytes"] < wanted and time.monotonic() < begun_s + PIN_S:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.pinned_s = time.monotonic() - begun_s
        for number in numbers:
            for rank in range(len(self.devices[number])):
                for page in range(self.num_pages):
                    self.write(number, rank, page)
        return took_s

    def _make(self, number: int) -> list[RankRegion]:
        devices, size = self.devices[number], self.num_pages * self.page_bytes
        if not devices[0]:
            memory = PoolMemory(self.num_pages, self.page_bytes, Epoch(1), len(devices))
            self.kept.append(memory)
            return [
                HostRegion(memory.page_fd, rank * size, self.page_bytes, self.num_pages)
                for rank in range(len(devices))
            ]
        slabs = [DeviceSlabs(device, self.num_pages, self.page_bytes) for device in devices]
        self.kept += slabs
        return [
            SlabRegion(device, each, self.page_bytes, self.num_pages, 1)
            for device, each in zip(devices, slabs, strict=True)
        ]

    def address(self, number: int, rank: int, page: int) -> int:
        """Of a page, in this process."""
        region = self.mover._mapper._spaces[number].ranks[rank].region
        return region.address + page * self.page_bytes

    def pattern(self, number: int, rank: int, page: int) -> np.ndarray:
        """uint32: what the page holds, another one for every page of a space."""
        number, rank, page = self.holds.get((number, rank, page), (number, rank, page))
        salt = (number * 8 + rank) * 0x01000193 + page * 0x9E3779B1
        return np.add(self.words, np.uint32(salt & 0xFFFFFFFF), out=self.wanted)

    def write(self, number: int, rank: int, page: int) -> None:
        """The page's own pattern."""
        pattern, address = self.pattern(number, rank, page), self.address(number, rank, page)
        if self.devices[number][rank]:
            self._enter(number, rank)
            call(self.driver, "cuMemcpyHtoD", address, pattern.ctypes.data, self.page_bytes)
        else:
            move(*(np.array([value], np.uint64) for value in (address, pattern.ctypes.data, self.page_bytes)))

    def read(self, number: int, rank: int, page: int) -> np.ndarray:
        """uint32, as it is now."""
        address = self.address(number, rank, page)
        if not self.devices[number][rank]:
            return view(address, self.page_bytes).view(np.uint32)
        self._enter(number, rank)
        call(self.driver, "cuMemcpyDtoH", self.found.ctypes.data, address, self.page_bytes)
        return self.found

    def _enter(self, number: int, rank: int) -> None:
        gpu = self.mover._mapper._spaces[number].ranks[rank].gpu
        assert gpu is not None
        gpu.copy.make_current()

    def copy(
        self, source: int, target: int, sources: list[int], targets: list[int]
    ) -> "asyncio.Future[CopyDone]":
        """One copy on its way."""
        self.next_copy += 1
        future: asyncio.Future[CopyDone] = asyncio.get_running_loop().create_future()
        self.mover.copy(self.next_copy, target, targets, [(source, sources)], TIMEOUT_MS, future.set_result)
        return future

    async def timed(
        self, source: int, target: int, parts: list[tuple[list[int], list[int]]]
    ) -> tuple[str, float]:
        """Path and seconds of these copies, all at once."""
        begun_s = time.perf_counter()
        ended = await asyncio.gather(*(self.copy(source, target, *part) for part in parts))
        took_s = time.perf_counter() - begun_s
        for done in ended:
            if not done.ok:
                raise RuntimeError(f"{NAMES[source]} to {NAMES[target]}: {done}")
        return ended[0].path, took_s

    def check(self, number: int) -> None:
        """Every byte of a space."""
        for rank in range(len(self.devices[number])):
            for page in range(self.num_pages):
                if not np.array_equal(self.read(number, rank, page), self.pattern(number, rank, page)):
                    raise RuntimeError(f"{NAMES[number]}: page {page} of rank {rank} is wrong")

    async def measure(self, source: int, target: int, num: int) -> tuple[str, float, float, float, float]:
        """Path; GB/s at the median, at best, of eight copies at once; ms of a single page."""
        random = np.random.default_rng((source, target))
        sources = random.permutation(self.num_pages)[:num].tolist()
        targets = random.permutation(self.num_pages)[:num].tolist()
        whole = [(sources, targets)]
        path, _ = await self.timed(source, target, whole)
        ranks = len(self.devices[target])
        for rank in range(ranks):
            found = [self.holds.get((source, rank, page), (source, rank, page)) for page in sources]
            self.holds |= {(target, rank, page): one for page, one in zip(targets, found, strict=True)}
        self.check(target)
        taken = [(await self.timed(source, target, whole))[1] for _ in range(REPEATS)]
        eighths = [(sources[part::8], targets[part::8]) for part in range(min(8, num))]
        at_once = [(await self.timed(source, target, eighths))[1] for _ in range(REPEATS)]
        first = [(sources[:1], targets[:1])]
        single = [(await self.timed(source, target, first))[1] for _ in range(REPEATS)]
        size = num * self.page_bytes * ranks
        middle, best, together = (
            size / seconds / 1e9 for seconds in (median(taken), min(taken), median(at_once))
        )
        return path, middle, best, together, median(single) * 1e3

    def close(self) -> None:
        """Raises: RuntimeError when something is still being written."""
        if not self.mover.close():
            raise RuntimeError("copies were still running at the end")
        for each in self.kept:
            each.close()


async def every_way(devices: list[str], num: int, page_bytes: int) -> list[str]:
    """Rows of the table for one size of pages."""
    rows: list[str] = []
    fds = len(os.listdir("/proc/self/fd"))
    rig = Rig(devices, num + SPARE, page_bytes, pin_host=True, huge_pages=True)
    took_s = await rig.open(list(rig.devices))
    opened = len(os.listdir("/proc/self/fd")) - fds
    ways = [(HOST, HOST2), (HOST, FIRST), (FIRST, HOST), (FIRST, SECOND)]
    if OTHER in rig.devices:
        ways += [
            (FIRST, OTHER),
            (OTHER, FIRST),
            (HOST, OTHER),
            (OTHER, HOST),
            (HOST_TWO, BOTH),
            (BOTH, HOST_TWO),
        ]
    label = f"{num} x {page_bytes // MIB} MiB"
    for source, target in ways:
        rows.append(row(label, source, target, await rig.measure(source, target, num)))
    times = f"mapped in {took_s:.2f} s, page-locked after {rig.pinned_s:.2f} s"
    rows.append(f"{label}: {len(rig.devices)} spaces, {times}, {opened} descriptors more")
    pairs = rig.mover.status()["pairs"]
    rows.append(f"{label}: self-test GB/s {[round(rate, 1) for rate in pairs.values()]}")
    rig.close()
    return rows


async def other_paths(devices: list[str], num: int, page_bytes: int) -> list[str]:
    """Host memory that is not page-locked; GPUs that are not let into each other's pages."""
    rows: list[str] = []
    label = f"{num} x {page_bytes // MIB} MiB"
    rig = Rig(devices, num + SPARE, page_bytes, pin_host=False)
    rig.mover._mapper._let_in = lambda mapped, gpu: None  # as if they could not
    numbers = [HOST, FIRST, *([OTHER] if OTHER in rig.devices else [])]
    await rig.open(numbers)
    ways = [(HOST, FIRST), (FIRST, HOST), *([(FIRST, OTHER), (OTHER, FIRST)] if OTHER in rig.devices else [])]
    for source, target in ways:
        found = await rig.measure(source, target, num)
        rows.append(row(label, source, target, found, "not locked" if HOST in (source, target) else "apart"))
    rig.close()
    return rows


def row(
    label: str, source: int, target: int, found: tuple[str, float, float, float, float], note: str = ""
) -> str:
    """One line."""
    path, middle, best, at_once, single_ms = found
    way = f"{NAMES[source]} -> {NAMES[target]}"
    text = f"{label:12} {way:20} {path:9} {middle:8.1f} {best:8.1f} {at_once:8.1f} {single_ms:10.3f}  {note}"
    print(text, flush=True)
    return text


async def run(sets: list[tuple[int, int]]) -> list[str]:
    """Everything; the rows."""
    devices = gpus(load_driver())
    rows: list[str] = []
    for num, page_bytes in sets:
        rows += await every_way(devices, num, page_bytes)
    return rows + await other_paths(devices, *sets[0])


def main() -> int:
    """The table last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few small copies: to see that all of it runs")
    options = parser.parse_args()
    sets = [(8, 2 * MIB), (4, 2 * MIB)] if options.small else list(SETS)
    begun_s = time.monotonic()
    rows = asyncio.run(run(sets))
    print(
        "\n--- mover: GB/s (median, best, as eight copies at once), ms of one page; every byte compared ---"
    )
    print("\n".join(rows))
    print(f"done in {time.monotonic() - begun_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
