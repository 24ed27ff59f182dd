"""Sums of pages on a real GPU: `python -m tests.gpu.page_sums_on_gpu [--small]` compares them and prints rates.

Pages of a window as the mempool maps it, of one and of four allocations, get random bytes; the sum of each must be that
of its bytes, and another one after one of them has changed. Ends with an error where that is not so.
"""

import argparse
import sys
import time
from statistics import median

import numpy as np
import xxhash

from services.mempool.gpu_page_sums import GpuPages
from services.mempool.mover_gpu import Gpu, SlabWindow, open_gpu
from services.mempool.mover_regions import SlabRegion
from services.mempool.page_sums import short
from services.mempool.slabs import DeviceSlabs
from shared.transfer.cuda_window import load_driver
from tests.gpu.mover_on_gpus import gpus

MIB = 1 << 20


def put(gpu: Gpu, address: int, data: np.ndarray, slab_bytes: int) -> None:
    """Bytes into the GPU's memory, one copy an allocation."""
    stream, event = gpu.copy.create_stream(), gpu.copy.create_event()
    for at in range(0, data.nbytes, slab_bytes):
        gpu.copy.copy(address + at, int(data.ctypes.data) + at, min(slab_bytes, data.nbytes - at), stream)
    gpu.copy.record(event, stream)
    while not gpu.copy.passed(event):
        time.sleep(1e-4)
    gpu.copy.destroy_event(event)
    gpu.copy.destroy_stream(stream)


def check(gpu: Gpu, page_bytes: int, slabs_per_page: int, num_pages: int) -> str:
    """A line of the table. Raises: AssertionError."""
    slabs = DeviceSlabs(gpu.device, num_pages * slabs_per_page, page_bytes // slabs_per_page)
    region = SlabRegion(gpu.device, slabs, page_bytes, num_pages, 1, slabs_per_page)
    window = SlabWindow(gpu, region, lambda: False)
    pages = GpuPages([window], page_bytes)
    chance, block_bytes, took_s = np.random.default_rng(1), page_bytes - 100, []
    for page in range(num_pages):
        data = chance.integers(0, 256, page_bytes, dtype=np.uint8)
        put(gpu, window.address + page * page_bytes, data, window.slab_bytes)
        begun_s = time.perf_counter()
        found = pages.sum(page, block_bytes)
        took_s.append(time.perf_counter() - begun_s)
        assert found == short(xxhash.xxh3_64_intdigest(data[:block_bytes])), f"page {page}: another sum"
        data[int(chance.integers(block_bytes))] ^= 1
        put(gpu, window.address + page * page_bytes, data, window.slab_bytes)
        assert pages.sum(page, block_bytes) != found, f"page {page}: a byte changed, the sum did not"
    pages.close()
    window.close()
    slabs.close()
    took = median(took_s[1:])
    rate = block_bytes / took / 1e9
    return f"{page_bytes >> 20:4} MiB of {slabs_per_page}: {took * 1e3:7.3f} ms a page, {rate:6.2f} GB/s"


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few pages: for a driver without hardware")
    num_pages = 4 if parser.parse_args(argv).small else 40
    gpu = open_gpu(gpus(load_driver())[0])
    lines = [check(gpu, size * MIB, parts, num_pages) for size, parts in ((2, 1), (8, 1), (8, 4))]
    gpu.close()
    print("--- sums of pages on a GPU", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
