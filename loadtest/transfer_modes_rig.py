"""What bench_transfer_modes.py moves pages with: the mempool's own mover between two spaces, and a clock that computes.

Spaces are host memory, or one GPU each; pages have the 8B shape (32 layers). By layer, the computing engine is played
by a thread that says one layer after the other to be written, at the pace at which the real one computes them.
"""

import asyncio
import mmap
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from services.mempool.memory import PoolMemory
from services.mempool.mover import CopyDone, Mover
from services.mempool.mover_layers import Feed, Gate, LayerMemory
from services.mempool.mover_regions import HostRegion, RankRegion, SlabRegion
from services.mempool.slabs import DeviceSlabs
from shared.ids import Epoch
from shared.kv.layer_words import MEMORY_BYTES, layer_word
from shared.kv.transfer_mode import TransferMode
from shared.transfer.cuda_window import load_driver
from shared.vmm.words import Words

NUM_LAYERS = 32
TOKEN_BYTES = 2 * 8 * 128 * 2  # of a layer: K and V, 8 heads of 128, 16 bits
LEAD_S = 0.02  # between the announcement of a step and its first layer
TIMEOUT_MS = 20_000
SOURCE, TARGET = 1, 2


@dataclass(frozen=True, slots=True)
class Movement:
    """One prompt's blocks. All from the moment at which its last layer was computed, in ms; `parts`: transfers."""

    exposed_ms: float  # until the last byte was there; the answer to whoever asked included
    after_first_ms: float  # since the first layer was computed
    parts: int
    num_bytes: int


class ModesRig:
    """Two spaces of `num_pages` blocks of `block_tokens`, and the mover between them. `async with`."""

    def __init__(self, device: str, num_pages: int, block_tokens: int) -> None:
        self.num_pages = num_pages
        self.layer_bytes = TOKEN_BYTES * block_tokens
        self.page_bytes = NUM_LAYERS * self.layer_bytes
        self._device = device
        self._kept: list[Any] = []
        self._copies = 0
        self._mover: Mover | None = None
        self._memory = LayerMemory()
        fd = self._memory.take_fd()
        self._words = Words(mmap.mmap(fd, MEMORY_BYTES), 1)
        os.close(fd)
        self._step = 0

    async def __aenter__(self) -> "ModesRig":
        self._mover = Mover(lambda _space, _pages: None)
        for number in (SOURCE, TARGET):
            self._mover.add_space(number, [self._region(number)])
        until_s = time.monotonic() + 60
        while not all(self._mover.is_mapped(number) for number in (SOURCE, TARGET)):
            failure = self._mover.failure(SOURCE) or self._mover.failure(TARGET)
            if failure is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the spaces are not mapped: {failure}")
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._mover is not None
        self._mover.close()
        for each in self._kept:
            each.close()

    def _region(self, number: int) -> RankRegion:
        if self._device == "cpu":
            memory = PoolMemory(self.num_pages, self.page_bytes, Epoch(1))
            os.posix_fallocate(memory.page_fd, 0, self.num_pages * self.page_bytes)
            self._kept.append(memory)
            return HostRegion(memory.page_fd, 0, self.page_bytes, self.num_pages)
        driver = load_driver()
        uuid = _call(driver, "cuDeviceGetUuid", _call(driver, "cuDeviceGet", number - 1))
        device = f"cuda:{bytes(uuid.bytes).hex()}"
        slabs = DeviceSlabs(device, self.num_pages, self.page_bytes)
        self._kept.append(slabs)
        return SlabRegion(device, slabs, self.page_bytes, self.num_pages, 1)

    async def move(self, mode: TransferMode, num_blocks: int, layer_ms: float) -> Movement:
        """Blocks of one prompt whose layers take `layer_ms` each to compute. Raises: RuntimeError when it fails."""
        self._step += 1
        begun = threading.Event()
        finished_s: list[float] = []
        loop = asyncio.get_running_loop()
        computed = loop.create_future()

        def compute() -> None:
            begun.wait()
            first_s = time.perf_counter() + LEAD_S
            for layer in range(1, NUM_LAYERS + 1):
                _sleep_until(first_s + layer * layer_ms / 1e3)
                self._words.store(0, layer_word(self._step, layer))
            finished_s.extend((first_s + layer_ms / 1e3, time.perf_counter()))
            loop.call_soon_threadsafe(computed.set_result, None)

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        if mode is TransferMode.BY_LAYER:
            copy = self._copy(
                num_blocks, Feed(NUM_LAYERS, self.layer_bytes, Gate([self._memory], self._step))
            )
            begun.set()
            await computed
        else:
            begun.set()
            await computed
            feed = Feed(NUM_LAYERS, self.layer_bytes) if mode is TransferMode.BY_REQUEST else None
            copy = self._copy(num_blocks, feed)
        done, at_s = await copy
        thread.join()
        if not done.ok:
            raise RuntimeError(f"{mode}: {done.code}: {done.reason}")
        return Movement(
            (at_s - finished_s[1]) * 1e3, (at_s - finished_s[0]) * 1e3, len(done.sent) or 1, done.num_bytes
        )

    def _copy(self, num_blocks: int, feed: Feed | None) -> "asyncio.Future[tuple[CopyDone, float]]":
        assert self._mover is not None
        self._copies += 1
        future: asyncio.Future[tuple[CopyDone, float]] = asyncio.get_running_loop().create_future()
        pages = random.Random(1).sample(range(self.num_pages), num_blocks)  # scattered at both ends
        self._mover.copy(
            self._copies, TARGET, pages[::-1], [(SOURCE, pages)], TIMEOUT_MS,
            lambda done: future.set_result((done, time.perf_counter())), feed,
        )  # fmt: skip
        return future


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    status, *results = getattr(driver, name)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{name}: {status.name}")
    return results[0] if results else None
