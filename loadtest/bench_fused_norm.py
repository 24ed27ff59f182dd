"""The fused all-reduce + RMSNorm beside NCCL, vLLM's custom all-reduce and torch's symmetric memory, each with a norm.

    python -m loadtest.bench_fused_norm [--worlds 2 4 8] [--budget-s 500]  writes loadtest/results/h200-fused-norm.json

Groups of 2, 4 and 8 GPUs of one host, as many as there are; hidden 8192 in bf16, 1 to 32K tokens; without multicast.
The kernel's times are of 2 to 32 SMs and of all, without dispatch to a rival. A group that fails or takes too long
says so and leaves the sizes that it came to. shared/kernels/allreduce_rmsnorm/bench_allreduce_rmsnorm.py takes times.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, machine, write_result

NAME = "h200-fused-norm"
CLAIM = (
    "Without multicast, one launch of all-reduce, residual add and RMSNorm is at least 1.10 times as fast as the best "
    "of NCCL, vLLM's custom all-reduce and torch's symmetric memory with a fused norm, from 8 MB up on 4 and 8 H200s; "
    "at 64 MB it moves 60% of what the links could with all SMs and 55% with 16."
)
WORLDS = (2, 4, 8)
BAR_WORLDS = (4, 8)
LINK_GB_PER_S = 450.0  # NVLink 4 of an H200, each direction
LARGE_BYTES, SHARE_BYTES = 8 << 20, 64 << 20
FEW_SMS = 16
START_S = 60.0  # processes, NCCL, compilation
MODULE = "shared.kernels.allreduce_rmsnorm.bench_allreduce_rmsnorm"
OURS = "ours"
WAYS = ("one_shot/", "two_shot/")  # of the fused kernel, in samples' `who`


def limit_us(world: int, num_bytes: int) -> float:
    """Two-shot over the links alone: 2(n-1)/n of the bytes out of each GPU, as many in at once."""
    return 2 * (world - 1) / world * num_bytes / (LINK_GB_PER_S * 1e3)


def metrics_from_samples(samples: Samples) -> Metrics:
    """Gains are the best rival's median over that of run(); shares of the link limit are the kernel's fastest way's.

    `min_` over sizes and groups: of 4 and 8 GPUs from 8 MB up, and of all. A group that did not run adds nothing.
    """
    ours: dict[tuple[int, int], float] = {}
    rivals: dict[tuple[int, int], float] = {}
    ways: dict[tuple[int, int, int], float] = {}
    for row in samples:
        key, us = (row["world"], row["bytes"]), median(row["us"])
        if row["who"] == OURS:
            ours[key] = us
        elif row["who"].startswith(WAYS):
            way = (*key, row["sms"])
            ways[way] = min(us, ways.get(way, us))
        else:
            rivals[key] = min(us, rivals.get(key, us))
    gains = {key: rivals[key] / us for key, us in ours.items() if key in rivals}
    found: Metrics = {}

    def put(name: str, values: Sequence[float]) -> None:
        if values:
            found[name] = min(values)

    put(
        "min_gain_8mb_up_ratio",
        [g for (n, size), g in gains.items() if n in BAR_WORLDS and size >= LARGE_BYTES],
    )
    put("min_gain_any_ratio", list(gains.values()))
    for sms, name in ((FEW_SMS, "speed_at_16_sms"), (0, "limit_share_64mb")):
        shares = {
            n: limit_us(n, size) / us
            for (n, size, of), us in ways.items()
            if size == SHARE_BYTES and of == sms
        }
        put(f"{name}_ratio", [share for n, share in shares.items() if n in BAR_WORLDS])
        for n, share in shares.items():
            found[f"{name}_tp{n}_ratio"] = share
    for n in sorted({n for n, _ in gains}):
        put(
            f"min_gain_8mb_up_tp{n}_ratio",
            [g for (of, size), g in gains.items() if of == n and size >= LARGE_BYTES],
        )
        put(f"gain_64mb_tp{n}_ratio", [g for key, g in gains.items() if key == (n, SHARE_BYTES)])
    return found


def measure_group(world: int, budget_s: float, more: Sequence[str]) -> dict[str, Any] | None:
    """What one group found, the sizes that it came to; None when it found nothing. Its processes are gone then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        flags = ["--world", str(world), "--json", str(path), "--budget-s", str(budget_s), *more]
        command = [sys.executable, "-m", MODULE, *flags]
        child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            status = child.wait(budget_s + START_S)
        except subprocess.TimeoutExpired:
            status = "too late"
        finally:
            end_group(child)
        if status != 0:
            print(f"world {world}: cut off ({status})", flush=True)
        return json.loads(path.read_text()) if path.exists() else None


def end_group(child: subprocess.Popen[bytes]) -> None:
    """The process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main(argv: Sequence[str]) -> int:
    """Measure every group, write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="*", default=list(WORLDS))
    parser.add_argument(
        "--budget-s", type=float, default=500.0, help="of all groups together, their starts included"
    )
    parser.add_argument(
        "--flashinfer", action="store_true", help="FlashInfer's fused kernel too: compiled for minutes"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="where there is no repository")
    options = parser.parse_args(argv)
    num_gpus = len(machine().get("gpu", []))
    worlds = [world for world in options.worlds if world <= num_gpus]
    if not worlds:
        print(f"not measured: {num_gpus} GPUs here")
        return 2
    until = time.monotonic() + options.budget_s
    samples: list[dict[str, Any]] = []
    notes: dict[str, Any] = {}
    for i, world in enumerate(worlds):
        left_s = (until - time.monotonic()) / (len(worlds) - i)
        found = measure_group(world, left_s - START_S, ["--flashinfer"] if options.flashinfer else [])
        if found is not None:
            samples += found["samples"]
            notes |= {f"tp{world}": found["notes"], "torch": found["torch"]}
    if not samples:
        return 1
    metrics = metrics_from_samples(samples)
    path = write_result(
        NAME,
        claim=CLAIM,
        command=shlex.join(["python", "-m", "loadtest.bench_fused_norm", *argv]),
        settings={
            "worlds": worlds,
            "num_gpus": num_gpus,
            "link_gb_per_s": LINK_GB_PER_S,
            "multicast": False,
            **notes,
        },
        metrics=metrics,
        samples=samples,
        folder=options.out,
        commit=options.commit,
    )
    print(f"{path}:")
    for name, value in sorted(metrics.items()):
        print(f"  {name} {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
