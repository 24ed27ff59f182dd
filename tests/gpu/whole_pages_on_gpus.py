"""Whole pages from one GPU to another by a kernel and by copy engines: `python -m tests.gpu.whole_pages_on_gpus`.

Every byte is compared, at odd sizes too; then times from call to the last byte, in us: the machine idle, and beside
matrix products without pause on the GPU that copies (`busy`), whose own pace says what the copies cost them.
"""

import argparse
import random
import sys
import threading
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from shared.kernels.copy_pages.driver import CudaDriver
from shared.transfer.page_stream import PageStream

MIB = 1 << 20
ARENA_BYTES = 2048 * MIB
SETS = [(1, 2 * MIB), (32, 2 * MIB), (64, 2 * MIB), (8, 8 * MIB), (64, 8 * MIB)]
ODD = [(1, 16), (3, 48), (5, 65_552), (241, 4096), (7, 2 * MIB + 16), (600, 256 << 10)]
WAYS = [("engines", 0), *((f"kernel {ctas}", ctas) for ctas in (8, 12, 16, 24, 32, 64))]


def columns(count: int, size: int, bases: tuple[int, int]) -> tuple[Any, Any]:
    """Scattered places in both arenas."""
    rng = random.Random(count)
    first, second = (
        np.array(rng.sample(range(ARENA_BYTES // size), count), np.uint64) * np.uint64(size) + np.uint64(base)
        for base in bases
    )
    return first, second


def once(stream: PageStream, froms: Any, tos: Any, size: int) -> float:
    """In us."""
    begin = time.perf_counter()
    ticket = stream.submit(froms, tos, size)
    while not ticket.done():
        pass
    return (time.perf_counter() - begin) * 1e6


class Products:
    """Matrix products on a GPU, without pause, until the block's end."""

    def __init__(self, device: str) -> None:
        self._device, self._stop = device, threading.Event()
        self.count, self._thread = 0, threading.Thread(target=self._run)

    def _run(self) -> None:
        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self._device)
        queued: list[Any] = []
        while not self._stop.is_set():
            torch.mm(a, a)
            queued.append(torch.cuda.Event())
            queued[-1].record()
            if len(queued) > 16:
                while not queued[0].query():
                    time.sleep(1e-4)
                queued.pop(0)
            self.count += 1

    def __enter__(self) -> "Products":
        self._thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def check(stream: PageStream, source: Any, target: Any, count: int, size: int) -> None:
    """Raises: AssertionError."""
    froms, tos = columns(count, size, (source.data_ptr(), target.data_ptr()))
    target.zero_()
    torch.cuda.synchronize(target.device)
    once(stream, froms, tos, size)
    for a, b in zip(froms.tolist(), tos.tolist(), strict=True):
        first, second = a - source.data_ptr(), b - target.data_ptr()
        theirs = target[second : second + size].to(source.device)
        assert torch.equal(source[first : first + size], theirs), (count, size)
    assert int(torch.count_nonzero(target)) <= count * size, "no other byte was written"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    driver, other = CudaDriver(0), CudaDriver(1)
    driver.enable_peer(other)
    source = torch.randint(1, 256, (ARENA_BYTES,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(ARENA_BYTES, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    driver.make_current()
    streams = {
        name: PageStream(driver, lanes=4, min_lane_bytes=8 << 20, ctas=ctas, kernel_bytes=1 << 40)
        for name, ctas in WAYS
    }
    for count, size in ODD:
        for name in ("engines", "kernel 16"):
            check(streams[name], source, target, count, size)
    print("every byte is right")
    bases = source.data_ptr(), target.data_ptr()
    for load in ("idle", "busy"):
        for name, stream in streams.items():
            cells = []
            products = Products("cuda:0") if load == "busy" else None
            if products:
                products.__enter__()
            begun, count_before = time.perf_counter(), products.count if products else 0
            for count, size in SETS:
                froms, tos = columns(count, size, bases)
                us = median(once(stream, froms, tos, size) for _ in range(options.repeats))
                cells.append(f"{us:7.0f} ({count * size / us / 1e3:4.0f})")
            pace = (products.count - count_before) / (time.perf_counter() - begun) if products else 0
            if products:
                products.__exit__()
            print(f"{load} {name:10}", *cells, f"{pace:8.0f} products/s" if products else "")
    print("us (GB/s) of", ", ".join(f"{count} x {size // MIB} MiB" for count, size in SETS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
