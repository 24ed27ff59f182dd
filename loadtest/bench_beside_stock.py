"""Quire's colocated instances and as many plain vLLM servers, at the same time on one host; then they change GPUs.

    python -m loadtest.bench_beside_stock [--instances 2] [--rounds 2] [--point-s 40] [--rates loogle=24 ...]
        [--resume FILE] [--commit HEAD] [--out FOLDER] [--worker KEY=JSON] [--set KEY=VALUE]   -> h200-beside-stock.json

A host's speed changes by more than what is to be seen: the same engine in two runs of one hour had mean TTFTs of 37.6
and 44.5 ms. So both sides begin every point together, each with a process of its own that asks, and in every second
round each has the other's GPUs. The same requests at the same times; workloads, rates, engines' settings and plain vLLM
as in bench_disaggregation.py (8B shape, random weights, a GPU an instance; our policy `cost`). A call without the time
for a whole round leaves it to the next one with the same --resume.

Ratios are ours over plain vLLM's of the same round, their median over rounds; below 1 we are faster. --device cpu tries
the script with the demo model: there both sides want the same cores at the same times, and its ratios mean nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_disaggregation import (
    GPU_CLUSTER,
    GPU_WORKER,
    SLO_MS,
    THINK_MS,
    WARM_S,
    row_of,
    servers_of,
    workload,
)
from loadtest.disaggregation_metrics import hit_ratio
from loadtest.disaggregation_plan import COLOCATED, STOCK, Layout, Point
from loadtest.processes import DIE_WITH_PARENT
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.workloads.catalogue import WORKLOADS

NAME = "h200-beside-stock"
CLAIM = (
    "Quire's colocated instances beside as many plain vLLM servers at the same time on one host, GPUs changed between "
    "rounds: first tokens and answers take no longer, gateway, mempool and placing included."
)
QUIRE = "quire"
SIDES = (QUIRE, STOCK)
RATES = {"cuda": ("loogle=24", "sharegpt=16", "react=12"), "cpu": ("loogle=1",)}
COMPARED = ("ttft_mean", "ttft_p99", "tpot_mean", "jct_mean", "jct_p99")
READY, SAMPLE = "ready", "sample "


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of each workload our figures over plain vLLM's of the same round, the median of rounds; both sides' means."""
    out: Metrics = {}
    for name in dict.fromkeys(row["workload"] for row in samples):
        rows = [row for row in samples if row["workload"] == name]
        rounds = [
            {row["side"]: row for row in rows if row["round"] == number}
            for number in sorted({row["round"] for row in rows})
        ]
        both = [found for found in rounds if set(found) == set(SIDES)]
        for metric in COMPARED:
            pairs = [(_of(found[QUIRE], metric), _of(found[STOCK], metric)) for found in both]
            if not pairs:
                continue
            out[f"{name}_{metric}_ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
            out[f"{name}_{metric}_worst_ratio"] = max(mine / theirs for mine, theirs in pairs)
            for side, values in zip(SIDES, zip(*pairs, strict=True), strict=True):
                out[f"{name}_{side}_{metric}_ms"] = statistics.median(values)
        for side in SIDES:
            out[f"{name}_{side}_hit_ratio"] = hit_ratio([row for row in rows if row["side"] == side])
    out["failed_requests"] = float(sum(row["failed"] for row in samples))
    return out


def _of(row: Mapping[str, Any], metric: str) -> float:
    name, _, what = metric.rpartition("_")
    values = [value for value in row[f"{name}_ms"] if value > 0]
    return quantile(values, 0.99) if what == "p99" else sum(values) / len(values)


# -- one side, in a process of its own --------------------------------------------------------------------


def layout_of(options: argparse.Namespace) -> Layout:
    """Its engines."""
    return Layout(
        options.side, 0, options.instances, arms={options.side: COLOCATED}, is_stock=options.side == STOCK
    )


def serve_side(options: argparse.Namespace) -> int:
    """Start it, say so, then measure the point that a line of stdin names; its sample is a line of stdout."""
    layout = layout_of(options)
    points = [Point(layout.name, name, float(rate), options.round + 1) for name, rate in rates_of(options)]
    with tempfile.TemporaryDirectory(prefix=f"quire-{options.side}-") as options.folder:
        begin_s = time.monotonic()
        with servers_of(options, layout, points[0]) as servers:
            servers.run(workload(options, points[0], 20.0, WARM_S, "warm"), is_measured=False)
            start_s = round(time.monotonic() - begin_s, 1)
            print(READY, flush=True)
            for line in sys.stdin:
                point = points[int(line)]
                requests = workload(options, point, point.rate * options.instances, options.point_s)
                outcomes = servers.run(requests, real_history=WORKLOADS[point.workload].real_history)
                row = row_of(options, layout, point, outcomes) | {"start_s": start_s}
                print(SAMPLE + json.dumps(row), flush=True)
    return 0


# -- both -------------------------------------------------------------------------------------------------


class Side:
    """A process of one side. Leaving the context ends it with its servers. Raises: RuntimeError when it ended."""

    def __init__(self, side: str, argv: Sequence[str], gpus: str, number: int) -> None:
        words = ["-m", "loadtest.bench_beside_stock", *argv, "--side", side, "--round", str(number)]
        env = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})  # noqa: TID251
        self.side = side
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(DIE_WITH_PARENT), str(os.getpid()), sys.executable, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env,
        )  # fmt: skip

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self, number: int) -> None:
        """Begin this point."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def hear(self, begins: str) -> str:
        """The rest of its next line that begins so; others are shown."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begins):
                return line.removeprefix(begins).strip()
            print(f"  {self.side}: {line.rstrip()}", flush=True)
        raise RuntimeError(f"{self.side} ended with {self._process.wait()}")


def gpus_of(options: argparse.Namespace, number: int) -> dict[str, str]:
    """Of each side, as CUDA_VISIBLE_DEVICES; they change with every round."""
    if options.device != "cuda":
        return dict.fromkeys(SIDES, "")
    parts = [range(first, first + options.instances) for first in (0, options.instances)]
    named = [",".join(map(str, part)) for part in parts]
    return dict(zip(SIDES, named if number % 2 == 0 else named[::-1], strict=True))


def measure_round(options: argparse.Namespace, argv: Sequence[str], progress: Progress, number: int) -> None:
    """Both sides start together, and begin every point together."""
    gpus = gpus_of(options, number)
    with Side(QUIRE, argv, gpus[QUIRE], number) as ours, Side(STOCK, argv, gpus[STOCK], number) as theirs:
        for side in (ours, theirs):
            side.hear(READY)
        for at, (name, _) in enumerate(rates_of(options)):
            if all(progress.has(round=number, side=side, workload=name) for side in SIDES):
                continue
            for side in (ours, theirs):
                side.tell(at)
            rows = [json.loads(side.hear(SAMPLE)) for side in (ours, theirs)]
            for row, side in zip(rows, SIDES, strict=True):
                progress.add({**row, "side": side, "round": number, "on": gpus[side]})


def said(row: dict[str, Any]) -> str:
    """A line of a sample."""
    times = ", ".join(
        f"{name} {_of(row, f'{name}_mean'):.1f}/{_of(row, f'{name}_p99'):.1f}"
        for name in ("ttft", "tpot", "jct")
    )
    return (
        f"round {row['round']}, {row['workload']} {row['rate']:g}/s, {row['side']} on {row['on'] or 'CPU'}: "
        f"{row['requests']} asked, {row['failed']} failed, {times} ms (mean/P99), {hit_ratio([row]):.0%} hits"
    )


# -- the command ------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options, with what the functions of bench_disaggregation want to know."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=2, help="of each side")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--point-s", type=float, default=40.0, help="of arrivals")
    parser.add_argument(
        "--rates", action="append", default=[], metavar="WORKLOAD=RATE", help="of an instance"
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument(
        "--model-dir", default="", help="default: 8B shape, random weights; on CPU the demo model"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--think-ms", type=float, default=THINK_MS, help="between turns, mean")
    parser.add_argument("--cache-bytes", type=int, default=0, help="of each instance; 0: the device's")
    parser.add_argument("--max-lag-ms", type=float, default=100.0)
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin no round that would end later")
    parser.add_argument("--resume", type=Path, help="JSON lines of finished points")
    parser.add_argument("--set", action="append", default=[], help="cluster setting, KEY=VALUE")
    parser.add_argument("--worker", action="append", default=[], help="worker setting, KEY=JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # one side's process
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.engine, options.gpus = "vllm", options.instances
    options.slo_ttft_ms, options.slo_tpot_ms = SLO_MS[options.device]
    if options.device == "cuda":
        options.worker, options.set = [*GPU_WORKER, *options.worker], [*GPU_CLUSTER, *options.set]
    options.rates = options.rates or list(RATES[options.device])
    if unknown := {name for name, _ in rates_of(options)} - set(WORKLOADS):
        parser.error(f"no workloads {sorted(unknown)}; there are {', '.join(WORKLOADS)}")
    return options


def rates_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(workload, rate of an instance) of each point."""
    return [(name, rate) for name, _, rate in (word.partition("=") for word in options.rates)]


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed, 3 when rounds are left."""
    options = parse(argv)
    if options.side:
        return serve_side(options)
    progress, end_s, longest_s = Progress(options.resume, said), time.monotonic() + options.budget_s, 0.0
    is_whole = True
    for number in range(options.rounds):
        if sum(row["round"] == number for row in progress.samples) >= len(SIDES) * len(options.rates):
            continue
        begin_s = time.monotonic()
        if begin_s + longest_s > end_s:
            is_whole = False
            break
        measure_round(options, argv, progress, number)
        longest_s = max(longest_s, time.monotonic() - begin_s)
    samples = progress.samples
    if not samples:
        print("there was no time for any round")
        return 3
    metrics = metrics_from_samples(samples)
    for key, value in metrics.items():
        print(f"{key:45} {value:10.3f}")
    settings = {
        "device": options.device, "instances": options.instances, "rates_of_an_instance": options.rates,
        "point_s": options.point_s, "think_ms": options.think_ms, "scale": options.scale, "cluster": options.set,
        "worker": options.worker, "cache_bytes": options.cache_bytes,
        "model": options.model_dir or ("8B shape" if options.device == "cuda" else "quire-demo"),
    }  # fmt: skip
    command = "python -m loadtest.bench_beside_stock " + " ".join(argv)
    path = write_result(
        NAME, claim=CLAIM, command=command, settings=settings, metrics=metrics, samples=samples,
        folder=options.out, commit=options.commit,
    )  # fmt: skip
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    if not is_whole:
        return 3
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
