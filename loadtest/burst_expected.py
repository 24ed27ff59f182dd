"""What bench_burst.py should find, from a model: `python -m loadtest.burst_expected [--workloads sharegpt,arxiv]`.

The burst's own requests, pool, slots and rules (burst_plan.py), the cost model that was measured on an H200, and the
policy's real core (burst_fair.py). `eager`: every step launches its kernels one by one, as the bench has it; `graphs`:
steps of decodes alone do not. Swap space at --peer-gb-per-s and --dram-gb-per-s. Nothing is written.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import msgspec

from loadtest import burst_plan
from loadtest.burst_fair import FairEngine
from loadtest.burst_model import ArrivalEngine, Counts, Job, Link, Machine, jobs_of
from loadtest.burst_plan import BURST, DRAM, FACTORS, FCFS, HEADROOM, PEER, Point, Stable
from loadtest.profiler.requests import WARM
from loadtest.registry import RESULTS
from loadtest.results import load_result, quantile
from loadtest.simulator.hardware import with_slots
from loadtest.simulator.prices import ModelPrices
from shared.fair.rules import FairRules
from shared.fair.slices import FairSlices
from shared.wire.cost import CostCoefficients

BLOCK_TOKENS = 32  # of an engine's page
# no profile has it: the simulator keeps a first token under 0.4 s at this rate, and holds so many bytes


def prices_of(steps: str, slots: int) -> ModelPrices:
    """Of an H200 and the 8B shape, as measured, for so many requests at once. Raises: StopIteration without a
    measurement."""
    rows = load_result(RESULTS / "cost-model.json")["samples"]
    found = next(
        row["coefficients"]
        for row in rows
        if (row.get("part"), row.get("profile"), row.get("device"), row.get("tp")) == ("model", -1, "h200", 1)
    )
    coefficients = with_slots(msgspec.convert(found, CostCoefficients), slots)
    if steps == "eager":
        coefficients = msgspec.structs.replace(coefficients, graph_tokens=0)
    return ModelPrices(coefficients)


def rules_of(changes: dict[str, float]) -> FairRules:
    """Those of the bench on GPUs, with these changes."""
    plan = burst_plan.DEFAULTS["cuda"]
    names = ("slice_steps", "quantum_tokens", "patience_slices", "spread_ms")
    return replace(FairRules(**{name: plan[name] for name in names}), **changes)


def stable_of(workload: str) -> Stable:
    """What the bench took for it on GPUs. Raises: OSError; StopIteration for others."""
    rows = load_result(RESULTS / "h200x2-burst.json")["samples"]
    row = next(row for row in rows if (row["kind"], row["workload"]) == ("stable", workload))
    return Stable(workload, row["rate_per_s"], row["peak_kv_bytes"], row["source"])


def said(jobs: Sequence[Job], counts: Counts) -> dict[str, float]:
    """Of one run: over the burst's arrivals, and over all."""
    ttft = [job.ttft_ms for job in jobs[WARM:]]
    tpot = [(job.end_ms - job.first_ms) / max(1, job.output_tokens - 1) for job in jobs]
    return {
        "ttft_p50_ms": quantile(ttft, 0.5), "ttft_p90_ms": quantile(ttft, 0.9), "ttft_max_ms": max(ttft),
        "rct_ms": fmean(job.rct_ms for job in jobs), "tpot_ms": fmean(tpot),
        "gap_s": max(job.longest_gap_ms for job in jobs) / 1e3, "parked": counts.parked,
        "preempted": counts.preempted, "out_gb": counts.out_bytes / 1e9,
        "again": counts.recomputed_tokens,
    }  # fmt: skip


def run(system: str, options: argparse.Namespace, workload: str, steps: str, seed: int) -> dict[str, float]:
    """One system under one seed's burst."""
    stable, plan = stable_of(workload), burst_plan.DEFAULTS["cuda"]
    prices = prices_of(steps, plan["slots"])
    pairs = burst_plan.lengths(workload, plan["scale"], plan["context_tokens"])
    asked = burst_plan.requests(
        Point(workload, BURST, FCFS, seed), pairs, stable.rate_per_s, factor=FACTORS[workload],
        burst_s=options.burst_s, stable_s=0.0,
    )  # fmt: skip
    pages = int(stable.peak_kv_bytes * HEADROOM) // (BLOCK_TOKENS * prices.kv_bytes_per_token)
    gb_per_s = {PEER: options.peer_gb_per_s, DRAM: options.dram_gb_per_s}.get(system, 0.0)
    link = Link(gb_per_s * 1e9, options.link_ms) if gb_per_s else None
    machine = Machine(prices, pages, BLOCK_TOKENS, plan["slots"], plan["chunk_tokens"], link)
    jobs = jobs_of(asked)
    engine = (
        ArrivalEngine(machine) if link is None else FairEngine(machine, FairSlices(rules_of(options.rules)))
    )
    return said(jobs, engine.run(jobs))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="sharegpt")
    parser.add_argument("--systems", default=f"{FCFS},{DRAM},{PEER}")
    parser.add_argument("--steps", default="eager,graphs")
    parser.add_argument("--seeds", default=burst_plan.DEFAULTS["cuda"]["seeds"])
    parser.add_argument("--burst-s", type=float, default=burst_plan.DEFAULTS["cuda"]["burst_s"])
    parser.add_argument("--peer-gb-per-s", type=float, default=150.0)
    parser.add_argument("--dram-gb-per-s", type=float, default=50.0)
    parser.add_argument("--link-ms", type=float, default=3.0, help="of a swap, besides its bytes")
    parser.add_argument("--rule", action="append", default=[], metavar="FIELD=NUMBER", help="of FairRules")
    options = parser.parse_args(argv)
    pairs = [one.partition("=") for one in options.rule]
    options.rules = {key: float(value) if "." in value else int(value) for key, _, value in pairs}
    return options


def main(argv: Sequence[str]) -> int:
    """A line a run; ratios against the order of arrival."""
    options = parse(argv)
    for workload in options.workloads.split(","):
        for steps in options.steps.split(","):
            for seed in map(int, options.seeds.split(",")):
                arrival: dict[str, float] = {}
                for system in options.systems.split(","):
                    found = run(system, options, workload, steps, seed)
                    arrival = arrival or found
                    ratios = (
                        f"  gain {arrival['ttft_p90_ms'] / found['ttft_p90_ms']:.1f}"
                        f"  rct {found['rct_ms'] / arrival['rct_ms']:.3f}"
                    )
                    words = " ".join(f"{key} {value:.6g}" for key, value in found.items())
                    print(f"{workload} {steps} seed {seed} {system:9}{ratios}  {words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
