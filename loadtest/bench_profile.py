"""AQUA's profiles in the simulator: which rates 8B models keep on three GPUs, what is free there, what bursts need.

    make measure NAME=simulated-profile      writes results/simulated-profile.json; some two minutes on one core

An H200 has measured costs (results/cost-model.json), an H100 and an A100 those of their data sheets. `tight` cases have
KV memory for 1.3 times what the case before them holds at its stable rate. Same seed, same figures.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from loadtest import burst_plan
from loadtest.profiler.core.profile import BURSTS, CHUNK_TOKENS, Profile, Settings, Slo
from loadtest.profiler.core.search import SearchLimits
from loadtest.profiler.requests import SHAREGPT, Lengths, of_workload
from loadtest.profiler.runner import Profiler
from loadtest.profiler.simulated import SimulatedRunner, machine_of
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from loadtest.simulator.hardware import MODELS
from loadtest.simulator.prices import kv_bytes_per_token

NAME = "simulated-profile"
CLAIM = (
    "Simulated, an 8B model that keeps the SLO on an H200 lends more than 10 GB. With KV memory for 1.3 times its "
    "stable rate's, bursts need swap space where a step takes 8,192 tokens, and none where it takes 512: there it is "
    "the chunk that bounds them."
)
CONTEXT_TOKENS = 8_192
HEADROOM = 1.3  # of the tight cases' memory
MODEL = "llama-8b"


@dataclass(frozen=True, slots=True)
class Case:
    """ttft_share: of the requests that must keep 1 s; the paper names none. chunk_tokens: of a step."""

    name: str
    gpu: str
    ttft_share: float = 0.9
    chunk_tokens: int = CHUNK_TOKENS
    bursts: tuple[float, ...] = ()
    is_tight: bool = False
    workload: str = SHAREGPT


CASES = (
    Case("h200", "h200"),
    Case("h200_tight", "h200", bursts=BURSTS, is_tight=True),
    Case("h200_chunk8192", "h200", chunk_tokens=8_192),
    Case("h200_chunk8192_tight", "h200", chunk_tokens=8_192, bursts=BURSTS, is_tight=True),
    Case("h100", "h100"),
    Case("h100_median", "h100", ttft_share=0.5),
    Case("a100", "a100"),
    Case("a100_median", "a100", ttft_share=0.5),
    Case("h200_chunk8192_arxiv", "h200", chunk_tokens=8_192, workload="arxiv"),
)


def metrics_from_samples(samples: Samples) -> Metrics:
    """By case: the stable rate, free memory there, the need of bursts."""
    out: Metrics = {}
    for row in samples:
        name = row["case"]
        out[f"{name}_stable_requests_per_s"] = row["stable_rate_per_s"]
        out[f"{name}_peak_kv_gb"] = row["peak_kv_bytes"] / 1e9
        out[f"{name}_free_gb"] = row["free_bytes"] / 1e9
        for factor, count in row["swap_bytes"].items():
            out[f"{name}_swap_{factor.replace('.', '_')}x_gb"] = count / 1e9
    out["runs_count"] = float(sum(len(row["runs"]) for row in samples))
    return out


def lengths_of(case: Case, seed: int) -> Lengths:
    """arXiv-like ones are the burst's own (burst_plan.py)."""
    if case.workload == SHAREGPT:
        return of_workload(SHAREGPT, seed=seed, context_tokens=CONTEXT_TOKENS)
    return burst_plan.lengths(case.workload, 1.0, CONTEXT_TOKENS)


def profile_of(case: Case, options: argparse.Namespace, memory_tokens: int) -> Profile:
    """Args: memory_tokens: 0: what the data sheet leaves."""
    settings = Settings(
        slo=Slo(ttft_share=case.ttft_share),
        bursts=case.bursts,
        chunk_tokens=case.chunk_tokens,
        burst_s=options.burst_s,
        seconds=options.seconds,
        least_requests=options.requests,
        seed=options.seed,
        lengths=case.workload,
    )
    found = machine_of(case.gpu, MODEL, 1, chunk_tokens=settings.chunk_tokens)
    found = replace(found, memory_tokens=memory_tokens or found.memory_tokens)
    runner = SimulatedRunner(found, model=MODEL, tp=1, chunk_tokens=settings.chunk_tokens)
    lengths = lengths_of(case, options.seed)
    return Profiler(
        runner,
        lengths,
        settings,
        SearchLimits(most=options.max_rate),
        tell=lambda text: print(f"  {text}", flush=True),
    ).profile()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases."""
    samples: list[dict[str, Any]] = []
    tokens = 0
    for case in CASES[2:4] if options.quick else CASES:
        begin = time.monotonic()
        memory = round(tokens * HEADROOM) if case.is_tight else 0
        found = profile_of(case, options, memory)
        tokens = round(found.peak_kv_bytes / kv_bytes_per_token(MODELS[MODEL]))
        row = {
            key: value
            for key, value in msgspec.to_builtins(found).items()
            if key not in ("machine", "batches")
        }
        samples.append({"case": case.name, **row})
        print(
            f"{case.name}: {found.stable_rate_per_s:g}/s, {found.free_bytes / 1e9:.1f} GB free, {found.role} "
            f"({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
    return samples


def main(argv: Sequence[str]) -> int:
    """Simulate and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals of a run, at least")
    parser.add_argument("--requests", type=int, default=150, help="of a run, at least")
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--max-rate", type=float, default=64.0)
    parser.add_argument("--quick", action="store_true", help="two cases alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    samples = measure(options)
    metrics = metrics_from_samples(samples)
    path = write_result(
        NAME,
        claim=CLAIM,
        command="python -m loadtest.bench_profile " + " ".join(argv),
        settings={"model": MODEL, "seed": options.seed, "context_tokens": CONTEXT_TOKENS, "seconds": options.seconds,
                  "least_requests": options.requests, "tight_headroom": HEADROOM},
        metrics=metrics,
        samples=samples,
        folder=options.out,
    )  # fmt: skip
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:40} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
