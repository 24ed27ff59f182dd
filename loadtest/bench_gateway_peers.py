"""The gateway with everything on beside other projects' routers, in one run.

    python -m loadtest.bench_gateway_peers [--quick] [--model-dir FOLDER] [--seed N] [--out FOLDER] [--commit HEAD]

writes loadtest/results/gateway-peers.json (not with --quick). What bench_gateway.py measures of CPU and added TTFT, of:
Quire with one engine stage, plain and with tracing of every request; no proxy; and vllm-router, sglang-router and smg,
each with round_robin and cache_aware, before one engine that answers at once. A router that is not installed is left
out, with a sentence (bench_prompt_tree.py says how they are). All get the rate of Quire's plain arm, or half of their
own where that is less.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest import systems, tree_peers
from loadtest.bench_gateway import MESSAGE_BYTES, STEP_MS, Bench, measure_proxy
from loadtest.bench_gateway import metrics_from_samples as metrics_of_direct
from loadtest.processes import Fleet, StartFailed
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from loadtest.systems import System, Unavailable
from shared.cpus import usable_cpus

NAME = "gateway-peers"
CLAIM = (
    "Quire's gateway, with prompts tokenized and placed by their caches, and with every request traced, beside routers "
    "that place by cached text: CPU of a request, and time that it adds to the first token at one rate for all."
)
SERVICES = ("gateway", "decode", "scheduler", "coordinator", "redis")
REQUESTS = 3_000
TTFT_S = 15
ROUTER_WEIGHT = 4.0  # they take so much less CPU a request that the clock's ticks would show


def metrics_from_samples(samples: Samples) -> Metrics:
    """Those of bench_gateway.py for each system, its name before them."""
    out: Metrics = {}
    for name in dict.fromkeys(s["system"] for s in samples):
        mine = [{**s, "system": "direct"} for s in samples if s["system"] == name]
        found = metrics_of_direct(mine)
        out |= {f"{name}_{key.removeprefix('direct_')}": value for key, value in found.items()}
    return out


async def measure_quire(bench: Bench, model_dir: Path, trace_dir: Path | None, rate_per_s: float) -> float:
    """One stage behind the gateway, TTFT at no more than this rate; the rate that it was."""
    label = "quire_traced" if trace_dir is not None else "quire_one_stage"
    solo = systems.start_quire(
        bench.fleet, model_dir, prefix=f"{label}-", step_ms=0, one_stage=True, trace_dir=trace_dir
    )
    solo = System(label, solo.base_url, solo.model, solo.process, solo.bearer)
    await bench.requests_closed(solo, count=REQUESTS, runs=3, num_bytes=MESSAGE_BYTES, series="closed_loop")
    await bench.ttft(
        solo, rate_per_s=min(rate_per_s, bench.closed_rate(solo) / 2), seconds=TTFT_S, find_peak=True
    )
    for service in SERVICES:
        bench.fleet.stop(f"{label}-{service}")
    return next(s["rate_per_s"] for s in bench.samples if (s["system"], s["series"]) == (label, "ttft"))


async def run(options: argparse.Namespace, folder: Path) -> Bench:
    """Every arm; what cannot run is named and left out."""
    model_dir = Path(options.model_dir)
    with Fleet(folder) as fleet:
        bench = Bench(fleet, 0.1 if options.quick else 1.0, options.seed)
        bench.rng = random.Random(options.seed)
        rate = await measure_quire(bench, model_dir, None, float("inf"))
        await measure_quire(bench, model_dir, folder / "traces", rate)
        upstream = systems.start_upstream(fleet, name="upstream", step_ms=STEP_MS)
        await bench.ttft(upstream, rate_per_s=rate, seconds=TTFT_S)
        for kind in tree_peers.ROUTERS:
            for policy in tree_peers.POLICIES:
                try:
                    found = await asyncio.to_thread(
                        tree_peers.start_router, fleet, kind, policy, [upstream.base_url]
                    )
                except (Unavailable, StartFailed) as error:
                    print(f"  skipped: {kind} {policy}: {str(error)[:200]}", flush=True)
                    continue
                router = System(f"{kind}_{policy}", found.base_url, found.model, found.process)
                try:
                    await measure_proxy(bench, router, router, weight=ROUTER_WEIGHT, rate_per_s=rate)
                except RuntimeError as error:  # its other figures stay
                    print(f"  {kind} {policy}: {error}", flush=True)
                fleet.stop(router.process)
    return bench


def main(argv: Sequence[str]) -> int:
    """Measure and print; exit status 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-dir", default=str(ROOT / "deploy" / "models" / "quire-demo"))
    parser.add_argument("--quick", action="store_true", help="a tenth of the load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="of a copy without a repository")
    options = parser.parse_args(argv)
    begin_load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as folder:
        bench = asyncio.run(run(options, Path(folder)))
    metrics = metrics_from_samples(bench.samples)
    print(*(f"{key:60} {metrics[key]:12.2f}" for key in sorted(metrics)), sep="\n")
    if not options.quick:
        words = [] if options.seed == 1 else ["--seed", str(options.seed)]
        path = write_result(
            NAME,
            claim=CLAIM,
            command=" ".join(["python -m loadtest.bench_gateway_peers", *words]),
            settings={
                "requests": REQUESTS, "ttft_seconds": TTFT_S, "message_bytes": MESSAGE_BYTES, "step_ms": STEP_MS,
                "seed": options.seed, "routers": tree_peers.versions(), "usable_cpus": usable_cpus(),
                "load_average_before": round(begin_load, 2), "machine_was_shared": begin_load > 0.5,
            },
            metrics=metrics,
            samples=bench.samples,
            folder=options.out,
            commit=options.commit,
        )  # fmt: skip
        print(path)
    return int(any(s.get("failed") for s in bench.samples))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
