"""Do weights hold where there is too little for all? Tenants weighted 4:2:1, two gateways, two engines, 3x overload.

    make measure NAME=fair-shares        writes results/fair-shares.json; some four minutes on two cores

Real processes on CPU: Redis, coordinator, scheduler, mempool, two colocated workers with the demo model and
`local_policy = "cfs"`, two gateways. First a closed loop measures what they can do. Then each tenant alone sends as
much as that, evenly and open loop, through both gateways: together three times what is possible, the lightest tenant
seven times its share. Requests that are refused (503) are not sent again. Tokens, prompts' too, are counted as they
reach the client; shares are those of every window of 30 s behind the warm-up.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.fair_tenants import Crowd, Tally, Tenant
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result
from shared.testing.cluster import Cluster

NAME = "fair-shares"
CLAIM = (
    "Three tenants weighted 4:2:1 at three times what two engines can do, through two gateways: in every window of "
    "30 s each gets its share of the tokens within 5% (AQUA 7)."
)
TENANTS = (Tenant("gold", 4.0), Tenant("silver", 2.0), Tenant("bronze", 1.0))
WINDOW_S = 30
OVERLOAD = 3.0
SLOTS = 8  # of each engine
PLACES_PER_SLOT = 16  # what waits in an engine outlasts MAX_LATE_S without anybody who brings more
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
MAX_LATE_S = WINDOW_S / 10  # that a request may go out behind its time: every window still asks for too much


def metrics_from_samples(samples: Samples) -> Metrics:
    """Errors are of a tenant's share in a window, relative to what its weight says."""
    seconds = [row for row in samples if row["kind"] == "second"]
    weights = next(row["weights"] for row in samples if row["kind"] == "tenants")
    run = next(row for row in samples if row["kind"] == "run")
    errors = share_errors(seconds, weights)
    total = {name: sum(row["tokens"][name] for row in seconds) for name in weights}
    offered = sum(run["ended"].values()) + sum(run["shed"].values()) + run["open"]
    out = {
        "worst_share_error_ratio": max(max(window.values()) for window in errors),
        "windows_count": float(len(errors)),
        "served_tokens_per_s": sum(total.values()) / len(seconds),
        "overload_ratio": run["offered_per_s"] / run["capacity_per_s"],
        "shed_ratio": sum(run["shed"].values()) / offered,
        "failed_requests": float(sum(run["failed"].values())),
    }
    for name in weights:
        out[f"{name}_share_ratio"] = total[name] / sum(total.values())
        out[f"{name}_worst_share_error_ratio"] = max(window[name] for window in errors)
    return out


def share_errors(
    seconds: Sequence[Any], weights: dict[str, float], window_s: int = WINDOW_S
) -> list[dict[str, float]]:
    """By tenant, for each window of consecutive rows. Raises: ValueError when there is no whole window."""
    if len(seconds) < window_s:
        raise ValueError(f"{len(seconds)} seconds hold no window of {window_s}")
    out = []
    for first in range(len(seconds) - window_s + 1):
        rows = seconds[first : first + window_s]
        tokens = {name: sum(row["tokens"][name] for row in rows) for name in weights}
        whole = max(1, sum(tokens.values()))
        fair = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        out.append({name: abs(tokens[name] / whole / fair[name] - 1.0) for name in weights})
    return out


def cluster(log_dir: Path, model_dir: str, slots: int) -> Cluster:
    """The processes."""
    gateway = [
        "--api-keys", ",".join(f"{one.key}:{one.name}" for one in TENANTS),
        "--tenant-weights", ",".join(f"{one.name}={one.weight:g}" for one in TENANTS), "--trace-sample-ratio", "0",
    ]  # fmt: skip
    worker = [
        "--local-policy", "cfs", "--max-num-seqs", str(slots), "--max-model-len", "512", "--threads", "1",
        "--dtype", "float32", "--kv-cache-bytes", str(64 << 20),
        "--trace-sample-ratio", "0",
    ]  # fmt: skip
    flags = {
        "gateway": gateway,
        "worker": worker,
        "scheduler": ["--trace-sample-ratio", "0", "--overload-factor", str(PLACES_PER_SLOT)],
    }
    return Cluster(
        model_dir, log_dir=log_dir, engine="vllm", num_prefill=0, num_decode=2, num_gateways=2, flags=flags
    )


async def measure(args: argparse.Namespace, urls: Sequence[str], model: str) -> tuple[float, Tally]:
    """(requests/s that the cluster can do, the overloaded run)."""
    names = [one.name for one in TENANTS]
    crowd = Crowd(urls, model, TENANTS, PROMPT_TOKENS, OUTPUT_TOKENS)
    try:
        await crowd.closed_loop(args.slots, args.warm_s)
        found = await crowd.closed_loop(args.slots, args.capacity_s)
        tokens = sum(found.tokens.values())
        capacity = tokens / args.capacity_s / (PROMPT_TOKENS + OUTPUT_TOKENS)
        print(f"  {capacity:.2f} requests/s are possible", flush=True)
        rate = OVERLOAD * capacity / len(names)
        tally = await crowd.open_loop(
            dict(zip(names, [rate] * len(names), strict=True)), args.warm_s + args.seconds
        )
        return capacity, tally
    finally:
        crowd.close()


def samples_of(args: argparse.Namespace, capacity: float, tally: Tally) -> list[dict[str, Any]]:
    """Rows of the result file."""
    names = [one.name for one in TENANTS]
    rate = OVERLOAD * capacity / len(names)
    sent = len(names) * int(rate * (args.warm_s + args.seconds))
    done = sum((tally.ended + tally.shed + tally.failed).values())
    run = {
        "kind": "run", "capacity_per_s": round(capacity, 4), "offered_per_s": round(rate * len(names), 4),
        "ended": {name: tally.ended[name] for name in names}, "shed": {name: tally.shed[name] for name in names},
        "failed": {name: tally.failed[name] for name in names}, "open": sent - done,
        "late_s": round(tally.late_s, 4),
    }  # fmt: skip
    weights = {"kind": "tenants", "weights": {one.name: one.weight for one in TENANTS}}
    return [weights, run, *tally.rows(names, int(args.warm_s), int(args.warm_s + args.seconds))]


def main(argv: Sequence[str]) -> int:
    """Measure and write. Exit status 1: requests failed, or the client was late."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="behind the warm-up")
    parser.add_argument("--warm-s", type=float, default=20.0)
    parser.add_argument("--capacity-s", type=float, default=20.0)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--model-dir", default=str(ROOT / "deploy" / "models" / "quire-demo"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="quire-fair-") as folder:
        with cluster(Path(folder), args.model_dir, args.slots) as running:
            capacity, tally = asyncio.run(measure(args, running.urls, running.model_name))
        samples = samples_of(args, capacity, tally)
    metrics = metrics_from_samples(samples)
    for name in sorted(metrics):
        print(f"  {name:32} {metrics[name]:.4f}")
    if metrics["failed_requests"] or tally.late_s > MAX_LATE_S:
        print(f"  no result: {dict(tally.failed)} failed, the client was up to {tally.late_s:.2f} s late")
        return 1
    path = write_result(
        NAME, claim=CLAIM, command=f"python -m loadtest.bench_fair_shares {' '.join(argv)}".strip(),
        settings={
            "slots": args.slots, "places_per_slot": PLACES_PER_SLOT, "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS, "warm_s": args.warm_s, "seconds": args.seconds, "window_s": WINDOW_S,
            "model": Path(args.model_dir).name,
        },
        metrics=metrics, samples=samples, folder=args.out, commit=args.commit,
    )  # fmt: skip
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
