"""A trace in full through the simulated cluster: token hit rate against the infinite-cache bound, by memory and policy.

    make measure NAME=trace-replay ARGS="--trace mooncake_synthetic_trace.jsonl"      writes results/trace-replay.json

The trace is Mooncake's synthetic one (github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0), or any other
of its format; it is no part of this repository. Memory 1 means that all instances together hold as many tokens as the
trace has distinct ones: an infinite cache would need no more. A hit is a prompt token that is not computed, wherever
its KV came from. Instances are hosts of their own; costs are of a GPU's data sheet, so hit rates are what is claimed
here, not times. Sessions are inferred: who repeats more than a block of somebody's prompt continues that session.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from loadtest.simulator.blocks import ROOT as BEGINNING
from loadtest.simulator.blocks import BlockStore, tokens_of
from loadtest.simulator.cluster import simulate
from loadtest.simulator.hardware import Machine, from_data_sheet
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.records import summarize
from loadtest.simulator.request import SimRequest, from_workload, infinite_cache
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.workloads.stats import BLOCK_TOKENS
from loadtest.workloads.trace_files import TraceError, read
from services.scheduler.core.policies import PolicyName

NAME = "trace-replay"
CLAIM = (
    "With memory for the trace's distinct tokens in all, the cluster's token hit rate under the default policy is "
    "within 2 points of what an infinite cache would hit, and it shrinks gradually with memory down to a tenth."
)
WHERE = "a trace in Mooncake's format: github.com/kvcache-ai/Mooncake, FAST25-release/traces/synthetic_trace.jsonl"
POLICIES: tuple[PolicyName, ...] = ("cost", "prompt_tree", "session", "least_load")
MEMORIES = (2.0, 1.0, 0.5, 0.25, 0.1)
INSTANCES = 8
REMOTE_GB_PER_S = 20.0
GPU, MODEL = "h200", "llama-8b"


def metrics_from_samples(samples: Samples) -> Metrics:
    """Hit rates in percent of prompt tokens; the gap in points."""
    bound = next(row["bound_percent"] for row in samples)
    hit = {(row["policy"], row["memory"]): row["hit_percent"] for row in samples}
    out: Metrics = {"infinite_cache_hit_percent": bound, "hit_rate_gap_points": bound - hit["cost", 1.0]}
    for (policy, memory), percent in hit.items():
        out[f"{policy}_memory_{memory:g}_hit_percent".replace(".", "_")] = percent
    for row in samples:
        out[f"one_lru_memory_{row['memory']:g}_hit_percent".replace(".", "_")] = row["one_lru_percent"]
    out["ttft_p99_vs_least_load_ratio"] = _p99(samples, "cost") / _p99(samples, "least_load")
    out["ttft_p99_vs_session_ratio"] = _p99(samples, "cost") / _p99(samples, "session")
    out["simulation_s"] = max(row["took_s"] for row in samples)
    return out


def _p99(samples: Samples, policy: str) -> float:
    return next(row["ttft_p99_ms"] for row in samples if row["policy"] == policy and row["memory"] == 1.0)


def one_lru_percent(requests: Sequence[SimRequest], tokens: int) -> float:
    """What one cache of so many tokens that all requests share would hit, and no copy were held twice."""
    store = BlockStore(BLOCK_TOKENS, tokens, 0, *[lambda blocks: None] * 3)
    hits = total = 0
    for request in requests:
        found = store.match(request.blocks)
        store.pin(found)
        cached, total = tokens_of(found), total + request.prompt_tokens
        hits += cached
        parent = found[-1].block_hash if found else BEGINNING
        rest = request.blocks[len(found) :]
        if rest and store.reserve(request.prompt_tokens - cached):
            store.unpin(store.seal(parent, rest, request.prompt_tokens - cached))
        store.unpin(found)
    return 100 * hits / total


def replay(
    requests: Sequence[SimRequest], machine: Machine, policy: PolicyName, tokens: int
) -> dict[str, Any]:
    """One sample. Args: tokens: of memory of each instance."""
    spec = ClusterSpec(
        roles_of(0, 0, INSTANCES),
        block_tokens=BLOCK_TOKENS,
        memory_tokens=tokens,
        policy=policy,
        remote=gb_per_s(REMOTE_GB_PER_S),
    )
    begin = time.perf_counter()
    done = simulate(spec, machine.prices, requests)
    took_s = time.perf_counter() - begin
    found = summarize(done.outcomes)
    row: dict[str, Any] = {
        "policy": policy,
        "memory_tokens": tokens,
        "hit_percent": round(100 * found.hit_ratio, 4),
        "failed": found.num_failed,
        "preempted": done.num_preempted,
        "evicted": done.num_evicted,
        "took_s": round(took_s, 2),
        "events": done.num_events,
    }
    row |= {f"{name}_percent": round(100 * share, 4) for name, share in found.tokens_ratio.items() if share}
    return row | {f"{name}_ms": round(ms, 3) for name, ms in found.times_ms.items()}


def measure(
    requests: Sequence[SimRequest], memories: Sequence[float], policies: Sequence[PolicyName]
) -> list[dict]:
    """Every policy with every memory. Raises: SettingsError."""
    machine = from_data_sheet(GPU, MODEL)
    bound = infinite_cache(requests, BLOCK_TOKENS)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    samples = []
    for memory in memories:
        tokens = max(round(memory * bound.footprint_tokens / INSTANCES), longest)
        shared = round(one_lru_percent(requests, tokens * INSTANCES), 4)
        for policy in policies:
            row = replay(requests, machine, policy, tokens)
            head = {
                "memory": memory,
                "bound_percent": round(100 * bound.hit_ratio, 4),
                "one_lru_percent": shared,
            }
            samples.append(head | row)
            bounds = f"one LRU {shared:.1f}%, infinite {100 * bound.hit_ratio:.1f}%"
            print(f"memory {memory:g} {policy:12} hits {row['hit_percent']:.1f}%, {bounds}, "
                  f"TTFT p99 {row['ttft_p99_ms']:.0f} ms, in {row['took_s']} s", flush=True)  # fmt: skip
    return samples


def main(argv: Sequence[str]) -> int:
    """0; 2 without a trace, or with one that cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--limit", type=int, default=0, help="requests; 0: all; otherwise writes no result file"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.trace is None:
        print(f"error: --trace FILE is missing: {WHERE}", file=sys.stderr)
        return 2
    try:
        requests = from_workload(read(options.trace, limit=options.limit), BLOCK_TOKENS)
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    samples = measure(requests, MEMORIES, POLICIES)
    metrics = metrics_from_samples(samples)
    if not options.limit:
        shown = shlex.join(["python", "-m", "loadtest.bench_trace_replay", "--trace", options.trace.name])
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shown,
            settings={
                "trace": options.trace.name,
                "requests": len(requests),
                "instances": INSTANCES,
                "costs": f"{MODEL} on {GPU}, data sheet, uncalibrated",
                "remote_gb_per_s": REMOTE_GB_PER_S,
            },
            metrics=metrics,
            samples=samples,
            folder=options.out,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:40} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
