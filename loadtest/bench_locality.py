"""Does locality pay: MemServe's Figure 15. Three prefill and one decode instance, documents with questions, shared.

    python -m loadtest.bench_locality [--quick] [--device cuda] [--out FOLDER] [--commit HEAD]     -> locality.json

80 LooGLE-like sessions (250 requests, 1K-token documents), 1, 2 and 4 times. Each policy gets the same requests at the
same times, at 70% of what `session` can take at that share ratio: requests/s of a run that sends all at once, over the
first 90% of its answers. Requests are sent open-loop, a session's in causal order. Caches are equally large for all and
are full of other runs' tokens: engines stay, every run has tokens of its own, and only the scheduler changes.
As in the paper, `session`, `least_load` and `prompt_tree` use what the chosen instance itself holds; `session_fetch` is
`session` with pages pulled from whoever has them; `cost` decides that by equation 2. Every instance has pages of its
own, on CPU too.

--device cuda: 8B shape, random weights, one GPU an instance. --simulate h200: in the simulator, in a minute, into
simulated-locality.json. --resume FILE keeps finished runs: call it again to go on.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.locality_cluster import GPU_CACHE_BYTES, Arm, LocalityCluster, Start
from loadtest.locality_simulated import SimulatedCluster
from loadtest.open_loop import lag_p99_ms
from loadtest.outcomes import SOURCES, Outcome
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.workloads.catalogue import Options, build
from loadtest.workloads.request import Request, salted, scaled

NAME = "locality"
CLAIM = (
    "Placing requests by where their prefixes are cached lowers the P99 of TTFT against placing them by session: to "
    "0.41 of it at share ratio 2 on four H200s (MemServe Figure 15)."
)
SIMULATED_CLAIM = (
    "In the simulator, with costs of an H200's data sheet, the policies have the same order in hits and in the P99 of "
    "TTFT at share ratio 2 as MemServe's Figure 15: by prompt tree and by cost before by session."
)
ARMS = {
    one.name: one
    for one in (
        Arm("session", "session", {"kv_fetch": "never"}),
        Arm("least_load", "least_load", {"kv_fetch": "never"}),
        Arm("prompt_tree", "prompt_tree", {"kv_fetch": "never"}),
        Arm("session_fetch", "session", {"kv_fetch": "always"}),
        Arm("cost", "cost", {"kv_fetch": "auto"}),
    )
}
LOAD_SHARE = 0.7
SATURATING_RATE = 20_000.0
THINK_REQUESTS = 16
CAPACITY_SHARE = 0.9  # of the answers: what the last, lonely sessions do is no throughput
WARM_REQUESTS = 12
KV_BYTES_PER_TOKEN = 128 << 10  # of the 8B shape


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians over seeds, by arm and share ratio; ratios to `session` are of runs with the same requests."""
    out: Metrics = {}
    runs = [s for s in samples if s["kind"] == "run"]
    for row in samples:
        if row["kind"] == "capacity":
            out[f"share{row['ratio']}_session_capacity_requests_per_s"] = row["capacity_per_s"]
    p99 = {(s["arm"], s["ratio"], s["seed"]): quantile(s["ttft_ms"], 0.99) for s in runs}
    for arm, ratio in sorted({(s["arm"], s["ratio"]) for s in runs}):
        mine = [s for s in runs if (s["arm"], s["ratio"]) == (arm, ratio)]
        head = f"share{ratio}_{arm}"
        out[f"{head}_ttft_p99_ms"] = quantile([quantile(s["ttft_ms"], 0.99) for s in mine], 0.5)
        out[f"{head}_ttft_p50_ms"] = quantile([quantile(s["ttft_ms"], 0.5) for s in mine], 0.5)
        out[f"{head}_hit_ratio"] = quantile([hit_ratio(s) for s in mine], 0.5)
        pairs = [
            p99[arm, ratio, s["seed"]] / p99["session", ratio, s["seed"]]
            for s in mine
            if ("session", ratio, s["seed"]) in p99
        ]
        if arm != "session" and pairs:
            out[f"{head}_p99_ttft_vs_session_ratio"] = quantile(pairs, 0.5)
    for arm in ("cost", "prompt_tree"):
        if (key := f"share2_{arm}_p99_ttft_vs_session_ratio") in out:
            out["p99_ttft_vs_session_ratio"] = out[key]
            break
    out["failed_requests"] = float(sum(s["failed"] for s in runs))
    return out


def hit_ratio(sample: dict[str, Any] | Any) -> float:
    """Prompt tokens that were not computed."""
    total = sum(sample["sources"].values())
    return 1 - sample["sources"].get("computed", 0) / total if total else 0.0


def workload(
    options: argparse.Namespace, ratio: int, seed: int, rate_per_s: float, *salt: object
) -> list[Request]:
    """The same requests at the same times for every arm, in tokens that only this run has."""
    found = build(
        "loogle",
        Options(
            seed=seed,
            rate_per_s=rate_per_s,
            num_sessions=options.sessions,
            share_ratio=ratio,
            document_tokens=options.document_tokens,
            think_ms=THINK_REQUESTS * 1000 / rate_per_s,
        ),
    )
    if options.scale != 1.0:
        found = scaled(found, options.scale)
    return salted(found, ratio, seed, *salt)


def sample_of(outcomes: Sequence[Outcome], **head: Any) -> dict[str, Any]:
    """What the result file keeps of a run. Raises: RuntimeError when nothing was answered."""
    good = [one for one in outcomes if one.ok]
    if not good:
        raise RuntimeError(f"no request was answered: {outcomes[0].error}")
    placed: dict[str, int] = {}
    for one in good:
        name = one.instances[0] if one.instances else ""
        placed[name] = placed.get(name, 0) + 1
    return {
        **head,
        "failed": len(outcomes) - len(good),
        "requests": len(outcomes),
        "ttft_ms": [round(one.ttft_ms, 1) for one in good],
        "jct_mean_ms": round(sum(one.jct_ms for one in good) / len(good), 1),
        "sources": {name: n for name in SOURCES if (n := sum(one.sources.get(name, 0) for one in good))},
        "placed": dict(sorted(placed.items())),
        "disaggregated": sum(one.placement == "disaggregated" for one in good),
        "lag_p99_ms": round(lag_p99_ms(outcomes), 2),
        "seconds": round(max(one.ended_ms for one in good) / 1000, 2),
    }


def capacity_per_s(outcomes: Sequence[Outcome]) -> float:
    """Answers/s of a run that sent all at once."""
    ends = sorted(one.ended_ms for one in outcomes if one.ok)
    if not ends:
        raise RuntimeError(f"no request was answered: {outcomes[0].error}")
    taken = max(1, int(len(ends) * CAPACITY_SHARE))
    return round(taken / (ends[taken - 1] / 1000), 3)


def said(sample: dict[str, Any]) -> dict[str, Any]:
    """A line of a run, without what is long."""
    long = ("ttft_ms", "sources")
    shown = {key: value for key, value in sample.items() if key not in long}
    if "ttft_ms" in sample:
        shown |= {"p50": quantile(sample["ttft_ms"], 0.5), "p99": quantile(sample["ttft_ms"], 0.99)}
        shown["hit"] = round(hit_ratio(sample), 3)
    return shown


def measure(
    options: argparse.Namespace, cluster: LocalityCluster | SimulatedCluster, progress: Progress
) -> None:
    """All runs that are not there yet, until the time is up."""
    arms = [ARMS[name] for name in options.arms.split(",")]
    end_s = time.monotonic() + options.budget_s
    warm = workload(options, 1, 999, options.warm_rate, "warm")[:WARM_REQUESTS]
    cluster.use(ARMS["session"])
    cluster.run(warm, is_measured=False)
    for ratio in options.ratios:
        if progress.has(kind="capacity", ratio=ratio) is None:
            cluster.use(ARMS["session"])
            at_once = workload(options, ratio, options.seeds[0], SATURATING_RATE, "capacity")
            found = capacity_per_s(cluster.run(at_once, is_measured=False))
            progress.add({"kind": "capacity", "ratio": ratio, "capacity_per_s": found})
    for turn, seed in enumerate(options.seeds):
        for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
            left = [
                r
                for r in options.ratios
                if progress.has(kind="run", arm=arm.name, ratio=r, seed=seed) is None
            ]
            if not left:
                continue
            cluster.use(arm)
            cluster.run(salted(warm, arm.name, seed), is_measured=False)
            for ratio in left:
                if time.monotonic() > end_s:
                    print("the time is up: call again with the same --resume to go on", flush=True)
                    return
                known = progress.has(kind="capacity", ratio=ratio)
                assert known is not None, "measured above"
                rate = LOAD_SHARE * known["capacity_per_s"]
                outcomes = cluster.run(workload(options, ratio, seed, rate, arm.name))
                head = {
                    "kind": "run",
                    "arm": arm.name,
                    "ratio": ratio,
                    "seed": seed,
                    "rate_per_s": round(rate, 3),
                }
                progress.add(sample_of(outcomes, **head))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options; --quick and --device change the defaults of others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small run an arm; writes no result file")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--engine", default="vllm", choices=("vllm", "mock"))
    parser.add_argument(
        "--simulate", metavar="GPU", default="", help="in the simulator, by that GPU's data sheet"
    )
    parser.add_argument("--cost", type=Path, help="in the simulator, by measured coefficients")
    parser.add_argument(
        "--model-dir", default="", help="default: the demo model; on GPUs an 8B shape, random weights"
    )
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--ratios", default="1,2,4")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--document-tokens", type=int, default=1_000)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument(
        "--cache-bytes", type=int, default=0, help="of each instance; 0: 256 MiB on CPU, 48 GiB on GPUs"
    )
    parser.add_argument("--warm-rate", type=float, default=4.0)
    parser.add_argument("--max-lag-ms", type=float, default=100.0)
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--resume", type=Path, help="JSON lines of finished runs")
    parser.add_argument("--set", action="append", default=[], help="cluster setting, KEY=VALUE")
    parser.add_argument("--worker", action="append", default=[], help="worker setting, KEY=JSON")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if options.quick:
        options.ratios, options.seeds, options.sessions = "2", "1", min(options.sessions, 16)
    options.ratios = [int(word) for word in options.ratios.split(",")]
    options.seeds = [int(word) for word in options.seeds.split(",")]
    if unknown := set(options.arms.split(",")) - set(ARMS):
        parser.error(f"no arms {sorted(unknown)}; there are {', '.join(ARMS)}")
    return options


def cluster_of(options: argparse.Namespace, folder: Path) -> LocalityCluster:
    """Three prefill workers and one decode worker, each with pages of its own."""
    arms = options.arms.split(",")
    first = ARMS["session" if "session" in arms else arms[0]]
    words = ["--topology", "disaggregated", "--prefill", "3", "--decode", "1"]
    start = Start(
        options.device, options.engine, options.model_dir, options.cache_bytes, options.set, options.worker
    )
    flags = start.flags(folder, words)
    return LocalityCluster(folder / "home", flags, start.sections(), first, max_lag_ms=options.max_lag_ms)


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed, 3 when there are runs left."""
    options = parse(argv)
    progress = Progress(options.resume, said)
    name, words = NAME, ""
    if options.simulate or options.cost:
        memory_tokens = (options.cache_bytes or GPU_CACHE_BYTES) // KV_BYTES_PER_TOKEN
        simulated = SimulatedCluster(options.simulate or "h200", "llama-8b", options.cost, memory_tokens)
        name, words = f"simulated-{NAME}", simulated.words
        measure(options, simulated, progress)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="quire-locality-") as folder,
            cluster_of(options, Path(folder)) as cluster,
        ):
            measure(options, cluster, progress)
    metrics = metrics_from_samples(progress.samples)
    for key, value in metrics.items():
        print(f"{key:50} {value:12.3f}")
    runs = sum(s["kind"] == "run" for s in progress.samples)
    wanted = len(options.ratios) * len(options.seeds) * len(options.arms.split(","))
    if runs < wanted:
        print(f"{runs} of {wanted} runs are there")
        return 3
    if not options.quick:
        settings = {
            "device": options.device, "engine": options.engine, "arms": options.arms, "ratios": options.ratios,
            "seeds": options.seeds, "sessions": options.sessions, "document_tokens": options.document_tokens,
            "scale": options.scale, "cache_bytes": options.cache_bytes, "load_share": LOAD_SHARE,
            "cluster": options.set, "worker": options.worker,
            "model": words or options.model_dir or ("8B shape" if options.device == "cuda" else "quire-demo"),
        }  # fmt: skip
        path = write_result(
            name,
            claim=SIMULATED_CLAIM if words else CLAIM,
            command="python -m loadtest.bench_locality " + " ".join(argv),
            settings=settings,
            metrics=metrics,
            samples=progress.samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
