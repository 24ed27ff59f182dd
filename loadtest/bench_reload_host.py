"""What the host adds to a reload of 100K tokens from a peer GPU, on a machine without GPUs.

    python -m loadtest.bench_reload_host [--quick]      writes loadtest/results/reload-host.json

A mempool's core, its mover's thread and its page streams are real (reload_host_rig.py); the driver is a model whose
copies take as long as NVLink's and whose calls take as long as CUDA's. 1,564 blocks of 8 MiB, from the call that wants
them to its answer. `2x`, `3x`: each call of the core takes two and three times its time, as on hosts whose cores are
that much slower than the one that measures. Left out: the worker, the engine and the messages between them.
"""

import argparse
import asyncio
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.registry import RESULTS
from loadtest.reload_host_rig import LANES, PAGE_BYTES, Reload, TimedDriver
from loadtest.results import Metrics, Samples, quantile, write_result
from services.mempool.mover_thread import PullThread
from shared.transfer.page_stream import PageStream

NAME = "reload-host"
CLAIM = (
    "A reload of 1,564 blocks, 13.1 GB, from a peer GPU takes at most 1.3 times what its copies take where the "
    "mempool's loop is half as fast as on this machine's cores."
)
BYTES_PER_S = 395e9  # of plain copies between two H200s (h200x2-context-reload.json)
CALL_US, PAGE_US = 1.0, 0.8  # of a driver's call, and of a page in a batch (decision 0039)
SLOWER = (1.0, 2.0, 3.0)


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians over rounds."""
    out: Metrics = {"copies_ms": quantile([row["copies_ms"] for row in samples], 0.5)}
    for slower in sorted({row["slower"] for row in samples}):
        rows = [row for row in samples if row["slower"] == slower]
        name = f"reload_{slower:g}x"
        out[f"{name}_ms"] = quantile([row["reload_ms"] for row in rows], 0.5)
        out[f"{name}_worst_ms"] = max(row["reload_ms"] for row in rows)
        out[f"{name}_first_copy_ms"] = quantile([row["first_copy_ms"] for row in rows], 0.5)
        out[f"{name}_of_copies_ratio"] = out[f"{name}_ms"] / out["copies_ms"]
        out[f"{name}_driver_calls_count"] = quantile([row["driver_calls"] for row in rows], 0.5)
    return out


def measure(num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    """A sample per round and factor, the factors taking turns; the first round warms up."""
    driver = TimedDriver(BYTES_PER_S, CALL_US, PAGE_US)
    stream = PageStream(driver, lanes=LANES, keeps_context=True)  # type: ignore[arg-type]
    thread = PullThread()
    samples: list[dict[str, Any]] = []
    try:
        for number in range(rounds + 1):
            for slower in SLOWER:
                reload = Reload(num_blocks, thread, stream, slower)
                gc.collect()
                gc.freeze()  # as the mempool does; what is there is not walked again
                calls = driver.num_calls
                took_s = asyncio.run(reload.run())
                gc.unfreeze()
                row = {
                    "slower": slower, "round": number, "reload_ms": round(took_s * 1e3, 3),
                    "first_copy_ms": round(reload.first_copy_s * 1e3, 3),
                    "copies_ms": round(reload.bytes_moved / BYTES_PER_S * 1e3, 3),
                    "driver_calls": driver.num_calls - calls,
                }  # fmt: skip
                if number:
                    samples.append(row)
                    print(f"  {row}", flush=True)
    finally:
        thread.close()
        stream.close()
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of 256 blocks; writes no result file"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    num_blocks, rounds = (256, 2) if options.quick else (1_564, 12)
    samples = measure(num_blocks, rounds)
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_reload_host", *argv]),
            settings={
                "blocks": num_blocks,
                "page_bytes": PAGE_BYTES,
                "rounds": rounds,
                "bytes_per_s": BYTES_PER_S,
                "call_us": CALL_US,
                "page_us": PAGE_US,
            },
            metrics=metrics,
            samples=samples,
            folder=options.out,
        )
        print(f"wrote {path.name}")
    for key, value in sorted(metrics.items()):
        print(f"{key:36} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
