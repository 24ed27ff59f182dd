"""A trace, its lengths scaled down, through the real cluster on CPU: token hit rate against the infinite-cache bound.

    make measure NAME=cluster-trace-replay ARGS="--trace mooncake_synthetic_trace.jsonl [--memories 2,0.5,0.1]
        [--resume FILE]"                                            writes results/cluster-trace-replay.json

`quire up` with two colocated workers (vLLM, the demo model), each with pages of its own, policy cost: the topology of
bench_trace_replay.py. Every SHARE-th session of the trace with all its turns, in the order and at the times of the
trace, so many times faster that it takes --seconds; prompts and outputs are 1/SCALE as long, so that a block of the
trace is a block of the engines. What would not fit into the model's context is left out, in the bound too. Memory 1
means that both workers together have room for the distinct tokens of what is sent. For each memory a cluster of its
own. A hit is a prompt token that was not computed, by the receipts.
In full, and with other policies, the trace goes through the simulator: bench_trace_replay.py.
"""

import argparse
import shlex
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.bench_trace_replay import WHERE
from loadtest.locality_cluster import Arm, LocalityCluster, Start
from loadtest.outcomes import SOURCES, Outcome
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.simulator.request import InfiniteCache, from_workload, infinite_cache
from loadtest.workloads.request import Request, content_id, scaled
from loadtest.workloads.stats import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from loadtest.workloads.trace_files import TraceError, read

NAME = "cluster-trace-replay"
CLAIM = (
    "On the real cluster on CPU a trace in Mooncake's format, its lengths scaled down, hits within 2 points of an "
    "infinite cache where memory allows, and less with less memory, gradually, down to a tenth."
)
ARM = Arm("cost", "cost", {})
SCALE = 16
BLOCK_TOKENS = TRACE_BLOCK_TOKENS // SCALE  # of engines on CPU
KV_BYTES_PER_TOKEN = 3072  # of the demo model
CONTEXT_TOKENS = 4096
NUM_WORKERS = 2
LEAST_TOKENS = CONTEXT_TOKENS + CONTEXT_TOKENS // 16  # an engine has room for its longest request
MEMORIES = (2.0, 0.5, 0.1)


def metrics_from_samples(samples: Samples) -> Metrics:
    """Hit rates in percent of prompt tokens; the gap, in points, is of the largest memory."""
    most = max(row["memory"] for row in samples)
    out: Metrics = {"infinite_cache_hit_percent": samples[0]["bound_percent"]}
    for row in samples:
        name = f"memory_{row['memory']:g}".replace(".", "_")
        hit = hit_percent(row)
        out[f"{name}_hit_percent"] = hit
        out[f"{name}_ttft_p50_ms"] = quantile(row["ttft_ms"], 0.5)
        out[f"{name}_ttft_p99_ms"] = quantile(row["ttft_ms"], 0.99)
        if row["memory"] == most:
            out["hit_rate_gap_points"] = row["bound_percent"] - hit
    out["failed_requests"] = float(sum(row["failed"] for row in samples))
    return out


def hit_percent(row: dict[str, Any] | Any) -> float:
    """Of the prompt tokens of a run, those that nobody computed."""
    total = sum(row["sources"].values())
    return 100 * (1 - row["sources"].get("computed", 0) / total)


def part_of(requests: Sequence[Request], share: int, seconds: float) -> list[Request]:
    """Every share-th session, shorter and faster; nobody needs more than the model's context."""
    found = [
        request
        for request in scaled(requests, 1 / SCALE)
        if zlib.crc32(request.session.encode()) % share == 0
        and request.prompt_tokens + request.output_tokens < CONTEXT_TOKENS
    ]
    if not found:
        raise TraceError(f"none of its sessions is left: take more than one in {share}")
    first_ms = found[0].arrival_ms
    speed = max(1.0, (found[-1].arrival_ms - first_ms) / (1000 * seconds))
    return [replace(request, arrival_ms=(request.arrival_ms - first_ms) / speed) for request in found]


def sample_of(
    memory: float, tokens: int, bound: InfiniteCache, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What the result file keeps of a run. Raises: RuntimeError when nothing was answered."""
    good = [one for one in outcomes if one.ok]
    if not good:
        raise RuntimeError(f"no request was answered: {outcomes[0].error}")
    return {
        "memory": memory,
        "memory_tokens": tokens,
        "bound_percent": round(100 * bound.hit_ratio, 4),
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "sources": {name: n for name in SOURCES if (n := sum(one.sources.get(name, 0) for one in good))},
        "ttft_ms": [round(one.ttft_ms, 1) for one in good],
        "seconds": round(max(one.ended_ms for one in good) / 1000, 2),
    }


def replay(requests: Sequence[Request], tokens: int, options: argparse.Namespace) -> list[Outcome]:
    """Through a cluster of its own. Args: tokens: that each worker has room for."""
    words = ["--topology", "colocated", "--decode", str(NUM_WORKERS)]
    start = Start("cpu", options.engine, cache_bytes=tokens * KV_BYTES_PER_TOKEN)
    with tempfile.TemporaryDirectory(prefix="quire-trace-") as folder:
        flags = start.flags(Path(folder), words)
        with LocalityCluster(
            Path(folder) / "home", flags, start.sections(), ARM, max_lag_ms=250.0
        ) as cluster:
            warm = [Request(n, 100.0 * n, f"warm-{n}", 0, requests[0].prompt[:1], 4) for n in range(4)]
            cluster.run([_other_tokens(one) for one in warm], is_measured=False)
            return cluster.run(requests)


def _other_tokens(request: Request) -> Request:
    """The same lengths, tokens of its own."""
    parts = [
        replace(part, content=content_id("warm", request.request_id))  # type: ignore[call-arg]
        for part in request.prompt
    ]
    return replace(request, prompt=tuple(parts))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--share", type=int, default=8, help="one session in so many")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the arrivals take")
    parser.add_argument("--memories", default=",".join(f"{one:g}" for one in MEMORIES))
    parser.add_argument("--engine", default="vllm", choices=("vllm", "mock"))
    parser.add_argument("--resume", type=Path, help="JSON lines of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.memories = [float(word) for word in options.memories.split(",")]
    return options


def main(argv: Sequence[str]) -> int:
    """0; 1 when a request failed; 2 without a trace, or with one that cannot be read; 3 when memories are left."""
    options = parse(argv)
    if options.trace is None:
        print(f"error: --trace FILE is missing: {WHERE}", file=sys.stderr)
        return 2
    try:
        requests = part_of(read(options.trace), options.share, options.seconds)
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bound = infinite_cache(from_workload(requests, BLOCK_TOKENS), BLOCK_TOKENS)
    print(
        f"{len(requests)} requests, {bound.prompt_tokens} prompt tokens, infinite cache {bound.hit_ratio:.1%}"
    )
    progress = Progress(options.resume, lambda row: f"memory {row['memory']:g}: hits {hit_percent(row):.1f}%")
    for memory in options.memories:
        if progress.has(memory=memory) is None:
            tokens = max(round(memory * bound.footprint_tokens / NUM_WORKERS), LEAST_TOKENS)
            progress.add(sample_of(memory, tokens, bound, replay(requests, tokens, options)))
    metrics = metrics_from_samples(progress.samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:40} {value:10.3f}")
    if {row["memory"] for row in progress.samples} < set(MEMORIES):
        return 3
    shown = [word if Path(word) != options.trace else options.trace.name for word in argv]
    path = write_result(
        NAME,
        claim=CLAIM,
        command=shlex.join(["python", "-m", "loadtest.bench_trace_cluster", *shown]),
        settings={
            "trace": options.trace.name,
            "requests": len(requests),
            "session_share": options.share,
            "scale": SCALE,
            "seconds": options.seconds,
            "colocated": NUM_WORKERS,
            "engine": options.engine,
            "model": "quire-demo",
        },
        metrics=metrics,
        samples=progress.samples,
        folder=options.out,
        commit=options.commit,
    )
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
