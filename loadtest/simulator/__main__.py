"""Replay a trace through a simulated cluster and print what comes of it.

    python -m loadtest.simulator --trace FILE --instances 8 --policy prompt_tree --gpu h200 --model llama-8b
    python -m loadtest.simulator --trace FILE --split 6:2 --policy cost --out run.jsonl
    python -m loadtest.simulator --trace FILE --local-policy cfs --fair-for bursts --swap-peer-gb 0

Trace files: Mooncake's JSONL with hash ids, or CSV of lengths (loadtest/workloads/trace_files.py).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from loadtest.option_checks import check_numbers
from loadtest.outcomes import Run, write_run
from loadtest.reports.summary import Slo
from loadtest.simulator.cluster import simulate
from loadtest.simulator.hardware import GPUS, MODELS, Machine, from_data_sheet, from_file
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.local import add_local_options, local_of
from loadtest.simulator.records import Summary, summarize
from loadtest.simulator.request import SimRequest, from_workload, infinite_cache
from loadtest.simulator.spec import ClusterSpec, Simulated, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.workloads.stats import BLOCK_TOKENS
from loadtest.workloads.trace_files import TraceError, read
from services.scheduler.core.policies import PolicyName
from shared.errors import ClusterError

LEAST = {
    "limit": 0, "rate": 0, "instances": 1, "tp": 0, "memory_tokens": 0, "dram_tokens": 0, "instances_per_host": 1,
    "peer_gb_per_s": 0, "max_running": 1, "noise": 0,
}  # fmt: skip
ABOVE_0 = ("speed", "remote_gb_per_s", "slo_ttft_ms", "slo_tpot_ms")


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    out = argparse.ArgumentParser(
        prog="python -m loadtest.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--trace", type=Path, required=True)
    out.add_argument("--limit", type=int, default=0, help="requests, the first ones; 0: all")
    out.add_argument("--speed", type=float, default=1.0, help="times the trace's rate")
    out.add_argument("--rate", type=float, default=0.0, help="requests/s, for a CSV of lengths without times")
    out.add_argument("--instances", type=int, default=8, help="colocated ones, unless --split says otherwise")
    out.add_argument("--split", default="", help="prefill:decode or prefill:decode:colocated")
    out.add_argument("--policy", choices=get_args(PolicyName), default="cost")
    add_machine_options(out)
    out.add_argument("--dram-tokens", type=int, default=0, help="KV in host memory behind each instance")
    out.add_argument("--instances-per-host", type=int, default=1)
    out.add_argument(
        "--peer-gb-per-s", type=float, default=200.0,
        help="between instances of a host; 0: both use the same pages",
    )  # fmt: skip
    out.add_argument("--remote-gb-per-s", type=float, default=20.0, help="between hosts; above 0")
    out.add_argument("--max-running", type=int, default=256)
    add_local_options(out)
    out.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    out.add_argument("--slo-tpot-ms", type=float, default=100.0)
    out.add_argument("--noise", type=float, default=0.0, help="relative deviation of step times")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--out", type=Path, help="the run as loadtest/report.py reads it")
    out.add_argument("--json", action="store_true", help="the summary as JSON")
    return out


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Whose costs: shared with the benches."""
    parser.add_argument("--gpu", default="h200", help=f"{', '.join(GPUS)}: costs from the data sheet")
    parser.add_argument(
        "--model", default="llama-8b", help=f"{', '.join(MODELS)}, or a folder with a config.json"
    )
    parser.add_argument("--tp", type=int, default=0, help="0: as --cost was calibrated, 1 without it")
    parser.add_argument(
        "--cost",
        type=Path,
        help="coefficients as JSON instead of the data sheet's, or a cost-model result file",
    )
    parser.add_argument("--memory-tokens", type=int, default=0, help="KV of each instance; 0: what fits")


def machine_of(options: argparse.Namespace) -> Machine:
    """Raises: SettingsError."""
    if options.cost is not None:
        return from_file(
            options.cost, memory_tokens=options.memory_tokens, tp=options.tp, gpu=options.gpu,
            model=options.model,
        )  # fmt: skip
    return from_data_sheet(options.gpu, options.model, tp=options.tp or 1)


def roles_from(split: str, instances: int) -> tuple:
    """Raises: ValueError."""
    if not split:
        return roles_of(0, 0, instances)
    counts = [int(part) if part.isdecimal() else -1 for part in split.split(":")]
    if len(counts) not in (2, 3) or min(counts) < 0 or not sum(counts):
        raise ValueError(f"--split {split!r}: expected prefill:decode or prefill:decode:colocated, as in 6:2")
    return roles_of(*counts)


def describe(summary: Summary, done: Simulated, requests: Sequence[SimRequest]) -> str:
    """Text for people."""
    bound = infinite_cache(requests, BLOCK_TOKENS)
    sources = ", ".join(f"{name} {100 * share:.1f}%" for name, share in summary.tokens_ratio.items() if share)
    lines = [
        f"{summary.num_requests} requests, {summary.num_failed} failed, {summary.span_ms / 1000:.0f} s simulated",
        f"prompt tokens: {sources}; an infinite cache would hit {100 * bound.hit_ratio:.1f}%",
    ]
    for name in ("ttft", "tpot", "jct"):
        times = [
            f"{key} {summary.times_ms.get(f'{name}_{key}', 0.0):.1f}" for key in ("mean", "p50", "p90", "p99")
        ]
        lines.append(f"{name.upper():4} ms: {', '.join(times)}")
    lines.append(f"within the SLO: {100 * summary.good_ratio:.1f}%, {summary.goodput_per_s:.2f} requests/s")
    busy = [ms / max(1.0, done.end_ms) for ms in done.busy_ms]
    lines.append(f"engines busy {100 * min(busy):.0f}% to {100 * max(busy):.0f}%, {done.num_preempted} preempted, "
                 f"{done.num_rejected} times rejected, {done.peer_bytes / 1e9:.1f} GB between instances")  # fmt: skip
    turns = done.turns
    lines.append(f"{turns.num_parked} times parked, {turns.swapped_out_bytes / 1e9:.1f} GB to swap space, "
                 f"{turns.num_recomputed_tokens} tokens computed again")  # fmt: skip
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Read, simulate, print. Raises: ClusterError, ValueError."""
    check_numbers(options, LEAST, above_0=ABOVE_0)
    machine = machine_of(options)
    found = read(
        options.trace, speed=options.speed, limit=options.limit, rate_per_s=options.rate, seed=options.seed
    )
    requests = from_workload(found, BLOCK_TOKENS)
    spec = ClusterSpec(
        roles_from(options.split, options.instances),
        block_tokens=BLOCK_TOKENS,
        memory_tokens=options.memory_tokens or machine.memory_tokens,
        dram_tokens=options.dram_tokens,
        policy=options.policy,
        limits=EngineLimits(options.max_running, machine.prices.coefficients.max_batched_tokens),
        local=local_of(options),
        instances_per_host=options.instances_per_host,
        peer=gb_per_s(options.peer_gb_per_s),
        remote=gb_per_s(options.remote_gb_per_s),
        noise=options.noise,
        seed=options.seed,
    )
    begin = time.perf_counter()
    done = simulate(spec, machine.prices, requests)
    took_s = time.perf_counter() - begin
    summary = summarize(done.outcomes, Slo(options.slo_ttft_ms, options.slo_tpot_ms))
    if options.out is not None:
        head = {"name": f"simulated {spec.policy}", "workload": options.trace.name, "server": machine.words}
        write_run(options.out, Run(head, done.outcomes))
    if options.json:
        fields = {name: getattr(summary, name) for name in Summary.__slots__}
        print(json.dumps(fields, indent=2))
        return
    print(f"{machine.words}; {len(spec.roles)} instances, policy {spec.policy}, engines {spec.local.policy}")
    print(describe(summary, done, requests))
    print(
        f"simulated in {took_s:.1f} s: {done.num_events / took_s:,.0f} events/s, {done.num_steps} engine steps"
    )


def main(argv: Sequence[str]) -> int:
    """Exit status: 2 for wrong arguments or files."""
    options = parser().parse_args(argv)
    try:
        run(options)
    except (ClusterError, TraceError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
