"""AQUA's Figure 8 in the simulator, beside what two H200s did: bursts in order of arrival and in fair slices.

    make measure NAME=simulated-burst        writes results/simulated-burst.json; less than a minute on one core

The requests, memory, slots and rules of bench_burst.py (25 prompts at the stable rate, then twice that for a minute;
then the stable rate alone) go through the gateway's and the scheduler's cores and one engine. Steps cost what the cost
model of an H200 says (results/cost-model.json), swap space what was measured of it (simulator/local.py). `measured`
rows are those of results/h200x2-burst.json, read and not run. Same seeds, same figures.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from loadtest import burst_plan
from loadtest.burst_expected import BLOCK_TOKENS, prices_of, rules_of, stable_of
from loadtest.burst_plan import BURST, DRAM, FACTORS, FCFS, PEER, STABLE, SYSTEMS, Point
from loadtest.profiler.requests import WARM
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, load_result, quantile, write_result
from loadtest.simulator.cluster import simulate
from loadtest.simulator.local import DRAM_GB_PER_S, PEER_GB_PER_S, SWAP_BYTES, WAIT_MS, Local
from loadtest.simulator.request import from_workload
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.task import EngineLimits
from services.gateway.core.request_flow import Limits
from services.scheduler.core.limits import PlacementLimits

NAME = "simulated-burst"
CLAIM = (
    "Simulated, a burst of twice the stable rate for a minute has its first tokens more than ten times sooner at P90 "
    "in fair slices on a peer's pages than in order of arrival, and computes nothing twice; without contention nothing "
    "differs. The gain is within 10% of what two H200s had, fair slices complete up to a tenth late, with a P90 of "
    "TTFT a quarter to a third too low; order of arrival is simulated a fifth to a quarter too fast. Slices "
    "that reckon with the rate at which pages were seen to move, as they do by default, do as well."
)
WORKLOAD, MEASURED = "sharegpt", "h200x2-burst"
AS_MEASURED = "as_measured"  # kind of samples
ALWAYS_PAYS_GB_PER_S = 1e6  # that slices reckon with, as on the GPUs
DEADLINE_MS = 100_000_000  # of a request: the burst's last one is waited for


def metrics_from_samples(samples: Samples) -> Metrics:
    """Simulated and measured alike, all seeds together; ratios are medians over the seeds.

    `as_measured_...`: slices that reckon with the rate at which pages were seen to move, as a worker's do by default.
    """
    out: Metrics = {}
    in_order = [
        row for row in samples if (row["kind"], row["system"], row["load"]) == ("simulated", FCFS, BURST)
    ]
    by_rate = [row for row in samples if row["kind"] == AS_MEASURED]
    if by_rate:
        out |= {f"{AS_MEASURED}_{name}": value for name, value in _ratios([*in_order, *by_rate]).items()}
    for kind, head in (("simulated", ""), ("measured", "measured_")):
        rows = [row for row in samples if row["kind"] == kind]
        bursts = [row for row in rows if row["load"] == BURST]
        for system in SYSTEMS:
            mine = [row for row in bursts if row["system"] == system]
            ttft = [value for row in mine for value in row["ttft_ms"]]
            out[f"{head}{system}_ttft_p50_ms"] = quantile(ttft, 0.5)
            out[f"{head}{system}_ttft_p90_ms"] = quantile(ttft, 0.9)
            out[f"{head}{system}_rct_mean_ms"] = fmean(v for row in mine for v in row["rct_ms"])
            if system != FCFS or not head:  # GPUs count it of fair slices alone
                out[f"{head}{system}_recomputed_tokens"] = fmean(row["recomputed_tokens"] for row in mine)
            out[f"{head}{system}_swapped_out_gb"] = fmean(row["swapped_out_bytes"] for row in mine) / 1e9
        out |= {f"{head}{name}": value for name, value in _ratios(bursts).items()}
        stable = {(row["system"], row["seed"]): fmean(row["rct_ms"]) for row in rows if row["load"] == STABLE}
        seeds = sorted({seed for _, seed in stable})
        out[f"{head}uncontended_ratio"] = median(stable[PEER, seed] / stable[FCFS, seed] for seed in seeds)
    names = ("ttft_p90_gain", "dram_ttft_p90_gain", "rct", "dram_rct")
    out |= {f"{n}_of_measured_ratio": out[f"{n}_ratio"] / out[f"measured_{n}_ratio"] for n in names}
    for system in SYSTEMS:
        for figure in ("ttft_p90", "rct_mean"):
            both = (out[f"{head}{system}_{figure}_ms"] for head in ("", "measured_"))
            out[f"{system}_{figure}_of_measured_ratio"] = next(both) / next(both)
    out["failed_requests"] = float(sum(row["failed"] for row in samples))
    return out


def _ratios(bursts: Sequence[Mapping[str, Any]]) -> Metrics:
    found = {(row["system"], row["seed"]): row for row in bursts}
    seeds = sorted({seed for _, seed in found})
    out: Metrics = {"seeds_count": float(len(seeds))}
    for system, head in ((PEER, ""), (DRAM, "dram_")):
        gains = [
            quantile(found[FCFS, seed]["ttft_ms"], 0.9) / quantile(found[system, seed]["ttft_ms"], 0.9)
            for seed in seeds
        ]
        out[f"{head}ttft_p90_gain_ratio"], out[f"{head}worst_ttft_p90_gain_ratio"] = median(gains), min(gains)
        out[f"{head}rct_ratio"] = median(
            fmean(found[system, seed]["rct_ms"]) / fmean(found[FCFS, seed]["rct_ms"]) for seed in seeds
        )
    return out


def local_of(system: str, counted_gb_per_s: float = ALWAYS_PAYS_GB_PER_S) -> Local:
    """Of the engine. Lent pages first, then host memory; without a lender host memory alone. counted_gb_per_s: 0: as
    measured."""
    if system == FCFS:
        return Local()
    peer_bytes = SWAP_BYTES if system == PEER else 0
    return Local("cfs", rules_of({}), peer_bytes=peer_bytes, counted_gb_per_s=counted_gb_per_s)


def simulated(
    system: str, load: str, seed: int, options: argparse.Namespace, kind: str = "simulated"
) -> dict[str, Any]:
    """One run's sample."""
    stable, plan = stable_of(WORKLOAD), burst_plan.DEFAULTS["cuda"]
    prices = prices_of(options.steps, plan["slots"])
    asked = burst_plan.requests(
        Point(WORKLOAD, load, FCFS, seed), burst_plan.lengths(WORKLOAD, plan["scale"], plan["context_tokens"]),
        stable.rate_per_s, factor=FACTORS[WORKLOAD], burst_s=options.burst_s, stable_s=options.stable_s,
    )  # fmt: skip
    spec = ClusterSpec(
        roles_of(0, 0, 1),
        block_tokens=BLOCK_TOKENS,
        memory_tokens=stable.pool_bytes // prices.kv_bytes_per_token,
        limits=EngineLimits(plan["slots"], plan["chunk_tokens"], BLOCK_TOKENS),
        local=local_of(system, 0.0 if kind == AS_MEASURED else ALWAYS_PAYS_GB_PER_S),
        placement=PlacementLimits(max_prefill_tokens=1 << 40),  # nothing is shed
        flow=Limits(request_deadline_ms=DEADLINE_MS),
    )
    found = simulate(spec, prices, from_workload(asked, BLOCK_TOKENS))
    counted = found.outcomes[WARM:] if load == BURST else found.outcomes  # of the burst alone
    return {
        "kind": kind, "system": system, "load": load, "seed": seed,
        "failed": sum(not one.ok for one in found.outcomes),
        "ttft_ms": [round(one.ttft_ms, 1) for one in counted],
        "rct_ms": [round(one.jct_ms, 1) for one in found.outcomes],
        "recomputed_tokens": found.turns.num_recomputed_tokens,
        "parked": found.turns.num_parked,
        "swapped_out_bytes": found.turns.swapped_out_bytes,
        "seconds": round(found.end_ms / 1e3, 2),
    }  # fmt: skip


def measured(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The same runs on GPUs. Raises: OSError."""
    out = []
    for row in load_result(RESULTS / f"{MEASURED}.json")["samples"]:
        if row.get("kind") != "point" or row["workload"] != WORKLOAD or row["seed"] not in seeds:
            continue
        pairs = zip(row["at_ms"], row["ttft_ms"], strict=True)
        begin_ms = row["burst_from_ms"] if row["load"] == BURST else 0.0
        out.append({
            "kind": "measured", "system": row["system"], "load": row["load"], "seed": row["seed"],
            "failed": row["failed"], "ttft_ms": [ttft for at, ttft in pairs if at >= begin_ms],
            "rct_ms": row["rct_ms"],
            "recomputed_tokens": row["counts"].get("num_recomputed_tokens", 0),
            "parked": row["counts"].get("fair_times_parked", 0),
            "swapped_out_bytes": row["counts"].get("swapped_out_bytes", 0),
            "seconds": row["seconds"],
        })  # fmt: skip
    return out


def main(argv: Sequence[str]) -> int:
    """Simulate and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default=burst_plan.DEFAULTS["cuda"]["seeds"])
    parser.add_argument("--burst-s", type=float, default=burst_plan.DEFAULTS["cuda"]["burst_s"])
    parser.add_argument("--stable-s", type=float, default=burst_plan.DEFAULTS["cuda"]["stable_s"])
    parser.add_argument("--steps", choices=("graphs", "eager"), default="graphs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = [(system, load, seed) for seed in seeds for load in (BURST, STABLE) for system in SYSTEMS]
    samples = [simulated(*run, options) for run in runs] + measured(seeds)
    samples += [
        simulated(system, BURST, seed, options, AS_MEASURED) for seed in seeds for system in (PEER, DRAM)
    ]
    metrics = metrics_from_samples(samples)
    path = write_result(
        NAME,
        claim=CLAIM,
        command="python -m loadtest.bench_burst_simulated " + " ".join(argv),
        settings={
            "workload": WORKLOAD, "seeds": seeds, "burst_s": options.burst_s, "stable_s": options.stable_s,
            "steps": options.steps, "rate_per_s": stable_of(WORKLOAD).rate_per_s, "swap_bytes": SWAP_BYTES,
            "peer_gb_per_s": PEER_GB_PER_S, "dram_gb_per_s": DRAM_GB_PER_S, "wait_ms": WAIT_MS,
            "measured": MEASURED,
        },
        metrics=metrics,
        samples=samples,
        folder=options.out,
    )  # fmt: skip
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:44} {value:12.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
