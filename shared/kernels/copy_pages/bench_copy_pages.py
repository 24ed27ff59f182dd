"""Rates of every way of copying, beside one plain copy of the same bytes.

    python -m shared.kernels.copy_pages.bench_copy_pages [--device 0]

Without a GPU it measures the CPU's provider. The result file of this kernel is made by loadtest/bench_swap.py.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from shared.kernels.copy_pages.calibrate import SIZES, Arena, measure, scattered, timed_us
from shared.kernels.copy_pages.copies import Copies, CopyUnavailable, Direction
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.driver import CudaDriver
from shared.kernels.copy_pages.plan import Choice, Method
from shared.kernels.copy_pages.recording_driver import RecordingDriver

PLAIN_BYTES = 64 << 20


def bench_cuda(device: int) -> None:
    """The cost table, and the roofline: one plain copy each way."""
    driver = CudaDriver(device)
    table = measure(driver)
    host, pages = driver.allocate_host(PLAIN_BYTES), driver.allocate_device(PLAIN_BYTES)
    stream = driver.create_stream()
    copier = CudaCopier(driver)
    ends = {Direction.HOST_TO_DEVICE: (host, pages), Direction.DEVICE_TO_HOST: (pages, host)}
    for direction, (source, target) in ends.items():
        copies = Copies.of([source], [target], PLAIN_BYTES)
        best_us = min(timed_us(copier, copies, direction, stream, Choice(Method.LOOP))[0] for _ in range(5))
        print(
            f"{direction}: one plain copy of 64 MiB {best_us:.0f} us, {PLAIN_BYTES / best_us / 1e3:.1f} GB/s"
        )
    copier.close()
    driver.destroy_stream(stream)
    driver.free_device(pages)
    driver.free_host(host)
    driver.close()
    print(table.render())


def bench_cpu(threads: int) -> None:
    """Scattered copies by memmove."""
    owner = RecordingDriver()
    half = 64 << 20
    base = owner.allocate_host(2 * half)
    copier = CpuCopier(threads=threads)
    for size in SIZES:
        copies = scattered(Arena(base, base + half, half), size, min(2048, half // size))
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            copier.submit(copies).wait()
            times.append((time.perf_counter() - begin) * 1e6)
        rate = copies.num_bytes / min(times) / 1e3
        print(
            f"{size >> 10:6} KiB x {len(copies):4}: {min(times):8.0f} us {rate:6.1f} GB/s, {threads} threads"
        )
    copier.close()


def main(argv: Sequence[str]) -> int:
    """Measure what is here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        bench_cuda(options.device)
    except CopyUnavailable as error:
        print(f"{error.message}: measuring the CPU's provider")
        for threads in (0, 2):
            bench_cpu(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
