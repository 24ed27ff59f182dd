"""Does disaggregation pay: MemServe's Figure 8. Prefill and decode apart against as many colocated instances.

    python -m loadtest.bench_disaggregation --gpus 2|4 [--point-s 60] [--budget-s S] [--resume FILE] [--out FOLDER]
        [--commit HEAD] [--worker enforce_eager=true]                              -> h200-disaggregation.json

--gpus 2: 1P1D against 2 colocated; 4: 1P2D and 2P1D against 3 colocated; pairs with PD-Caching-3, and PD-Basic (nothing
kept). Colocated: vLLM's prefix caching and chunked prefill, on the same mempool, gateway and scheduler. Policy `cost`
in all; `auto` leaves it the choice between a pair and one instance. 8B shape, random weights, a GPU an instance.
Workloads as in MemServe 8.2, open loop, later turns with the real answers; rates are of each instance, as in the paper.
The same requests at the same times for every arm, in tokens of its own. Goodput: of requests within both limits (SLO).

--resume FILE keeps finished points: call it again to go on. --budget-s: layouts share the time evenly, and each begins
with the same points (disaggregation_plan.py). --quick: 12 s a point, no result file. Points at the knee (the highest
rate at which 90% keep the SLO) are repeated with --knee-seeds. A result file keeps its points of other numbers of GPUs.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench_locality import sample_of
from loadtest.disaggregation_plan import LAYOUTS, RATES, Layout, Point, allowance_s, knee, points
from loadtest.locality_cluster import LocalityCluster, Start
from loadtest.outcomes import Outcome
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.reports.summary import bootstrap, nearest_rank
from loadtest.results import Metrics, Samples, load_result, quantile, write_result
from loadtest.workloads.catalogue import WORKLOADS, Options, build
from loadtest.workloads.request import Request, salted, scaled

NAME = "h200-disaggregation"
CLAIM = (
    "Prefill and decode on GPUs of their own, with caching, against as many colocated instances of vLLM with prefix "
    "caching and chunked prefill: where the P99 of the job's time falls, and where it does not (MemServe Figure 8)."
)
SLO_MS = {"cuda": (500.0, 25.0), "cpu": (2_000.0, 100.0)}  # time to first token, time per output token
GPU_WORKER, GPU_CLUSTER = ("max_num_seqs=256",), ("gateway_processes=2",)
CONTEXT_TOKENS = 8_000
THINK_MS = 1_000.0
WARM_S = 4.0
DRAIN_S = 4.0  # what a point takes beyond its arrivals, as far as a plan can know
RESAMPLES = 200
SHOWN = (
    "ttft_p99_vs_colocated_ratio", "jct_p99_vs_colocated_ratio", "jct_p99_vs_basic_ratio", "auto_disaggregated_ratio",
    "_count", "_wins_ratio", "_loses_ratio",
)  # fmt: skip
COMPARED = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "jct_mean", "jct_p99")


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of each point, with 95% intervals from its requests; arms over colocated, and over themselves without caching."""
    out: Metrics = {}
    rows = sorted((s for s in samples if s["kind"] == "point"), key=_point_key)
    for key, some in groupby(rows, key=_point_key):
        found = list(some)
        head = _head(*key)
        out |= {f"{head}_{name}": value for name, value in _of_point(found).items()}
    for gpus, workload, rate, arm in dict.fromkeys(_point_key(row) for row in rows):
        for other, word in (("colocated", "colocated"), (f"{arm}_basic", "basic")):
            mine, theirs = _head(gpus, workload, rate, arm), _head(gpus, workload, rate, other)
            if arm == other or f"{theirs}_jct_mean_ms" not in out:
                continue
            for name in COMPARED:
                if below := out[f"{theirs}_{name}_ms"]:
                    out[f"{mine}_{name}_vs_{word}_ratio"] = out[f"{mine}_{name}_ms"] / below
    out |= _verdict(out)
    out["failed_requests"] = float(sum(row["failed"] for row in rows))
    return out


def _point_key(row: Mapping[str, Any]) -> tuple[int, str, float, str]:
    return row["gpus"], row["workload"], row["rate"], row["arm"]


def _head(gpus: int, workload: str, rate: float, arm: str) -> str:
    return f"gpus{gpus}_{workload}_rate{rate:g}_{arm}".replace(".", "_")


def _of_point(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    """All seeds of it together."""
    out: Metrics = {}
    for metric in ("ttft", "tpot", "jct"):
        values = np.array([v for row in rows for v in row[f"{metric}_ms"]])
        some = values[values > 0] if (values > 0).any() else values
        for name, level in (("mean", None), ("p99", 0.99)):
            found = bootstrap(some, lambda v, at=level: _statistic(v, at), resamples=RESAMPLES)
            out |= {
                f"{metric}_{name}_ms": found.value,
                f"{metric}_{name}_low_ms": found.low,
                f"{metric}_{name}_high_ms": found.high,
            }
    met = np.array([one for row in rows for one in _kept(row)], dtype=float)
    found = bootstrap(met, lambda v: v.mean(axis=-1), resamples=RESAMPLES)
    offered = rows[0]["rate_per_s"]
    out |= {
        "goodput_requests_per_s": found.value * offered,
        "goodput_low_requests_per_s": found.low * offered,
        "goodput_high_requests_per_s": found.high * offered,
        "slo_ratio": found.value,
        "disaggregated_ratio": sum(row["disaggregated"] for row in rows) / max(1, len(met)),
        "hit_ratio": _hit_ratio(rows),
    }
    return out


def _statistic(values: np.ndarray, level: float | None) -> np.ndarray:
    return values.mean(axis=-1) if level is None else nearest_rank(values, level)


def _kept(row: Mapping[str, Any]) -> list[bool]:
    """Of each request, whether it kept the SLO; those that failed did not."""
    ttft_ms, tpot_ms = row["slo_ms"]
    pairs = zip(row["ttft_ms"], row["tpot_ms"], strict=True)
    return [a <= ttft_ms and b <= tpot_ms for a, b in pairs] + [False] * row["failed"]


def _hit_ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    total = sum(sum(row["sources"].values()) for row in rows)
    return 1 - sum(row["sources"].get("computed", 0) for row in rows) / total if total else 0.0


def _verdict(metrics: Metrics) -> Metrics:
    """At how many points disaggregation has the lower P99 of JCT: its interval below colocated's, or above; and what
    `auto` does there: the mean share of requests that it hands off."""
    wins = losses = compared = 0
    handed_off: dict[str, list[float]] = {"wins": [], "loses": []}
    for key in metrics:
        if not key.endswith("_jct_p99_vs_colocated_ratio") or "_basic_" in key or "_auto_" in key:
            continue
        mine = key.removesuffix("_jct_p99_vs_colocated_ratio")
        theirs = f"{mine.rpartition('_')[0]}_colocated"
        compared += 1
        is_win = metrics[f"{mine}_jct_p99_high_ms"] < metrics[f"{theirs}_jct_p99_low_ms"]
        is_loss = metrics[f"{mine}_jct_p99_low_ms"] > metrics[f"{theirs}_jct_p99_high_ms"]
        wins, losses = wins + is_win, losses + is_loss
        share = metrics.get(f"{mine}_auto_disaggregated_ratio")
        if share is not None and (is_win or is_loss):
            handed_off["wins" if is_win else "loses"].append(share)
    if not compared:
        return {}
    counts = {"compared_points": compared, "disaggregation_wins": wins, "disaggregation_loses": losses}
    out = {f"{name}_count": float(count) for name, count in counts.items()}
    for name, shares in handed_off.items():
        if shares:
            out[f"auto_hands_off_where_it_{name}_ratio"] = sum(shares) / len(shares)
    return out


# -- measuring ------------------------------------------------------------------------------------------


def workload(
    options: argparse.Namespace, point: Point, rate_per_s: float, seconds: float, *salt: object
) -> list[Request]:
    """The same requests at the same times for every arm, in tokens that only this run has."""
    takes = WORKLOADS[point.workload].takes
    more: dict[str, Any] = {"think_ms": options.think_ms}
    if "context_tokens" in takes:
        more["context_tokens"] = CONTEXT_TOKENS
    if "num_sessions" in takes:  # as many as the run has arrivals for
        more["num_sessions"] = max(8, round(rate_per_s * seconds / 2))
    asked = Options(seed=point.seed, rate_per_s=rate_per_s, seconds=seconds, **more)
    found = build(point.workload, asked)
    if options.scale != 1.0:
        found = scaled(found, options.scale)
    return salted(found, point.arm, point.rate, point.seed, *salt)


def row_of(
    options: argparse.Namespace, layout: Layout, point: Point, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """A point's sample. Raises: RuntimeError when nothing was answered."""
    good = [one for one in outcomes if one.ok]
    head = {
        "kind": "point", "gpus": options.gpus, "arm": point.arm, "workload": point.workload, "rate": point.rate,
        "seed": point.seed, "rate_per_s": point.rate * layout.num_instances, "point_s": options.point_s,
        "slo_ms": [options.slo_ttft_ms, options.slo_tpot_ms],
    }  # fmt: skip
    return {
        **sample_of(outcomes, **head),
        "tpot_ms": [round(one.tpot_ms, 2) for one in good],
        "jct_ms": [round(one.jct_ms, 1) for one in good],
    }


def said(row: dict[str, Any]) -> str:
    """A line of a point."""
    times = [
        f"{name} {sum(row[f'{name}_ms']) / len(row[f'{name}_ms']):.1f}/{quantile(row[f'{name}_ms'], 0.99):.1f}"
        for name in ("ttft", "tpot", "jct")
    ]
    within = _kept(row)
    return (
        f"{row['workload']} {row['rate']:g}/s an instance, {row['arm']}, seed {row['seed']}: {row['requests']} asked, "
        f"{row['failed']} failed, {', '.join(times)} ms (mean/P99), {sum(within) / len(within):.0%} in the SLO,"
        f" {_hit_ratio([row]):.0%} hits, {row['disaggregated']} by pairs"
    )


def is_done(progress: Progress, options: argparse.Namespace, point: Point) -> bool:
    """Whether there is a sample of it."""
    key = {"arm": point.arm, "workload": point.workload, "rate": point.rate, "seed": point.seed}
    return progress.has(kind="point", gpus=options.gpus, **key) is not None


def measure_layout(
    options: argparse.Namespace, layout: Layout, left: Sequence[Point], progress: Progress, end_s: float
) -> None:
    """Start its engines and run its points until end_s."""
    begin_s = time.monotonic()
    arms = {name: layout.arm(name) for name in layout.arms}
    start = Start(
        options.device, options.engine, options.model_dir, options.cache_bytes, options.set, options.worker
    )
    folder = Path(options.folder)
    flags = start.flags(folder, layout.words)
    first = arms[left[0].arm]
    with LocalityCluster(
        folder / "home", flags, start.sections(), first, max_lag_ms=options.max_lag_ms
    ) as cluster:
        print(f"{layout.name}: ready after {time.monotonic() - begin_s:.0f} s", flush=True)
        rate = max(point.rate for point in left) * layout.num_instances
        warm = workload(options, left[0], min(rate, 20.0), WARM_S, "warm")
        cluster.run(warm, is_measured=False)
        for point in left:
            if time.monotonic() + options.point_s + DRAIN_S > end_s:
                print(f"  {layout.name}: its share of the time is up", flush=True)
                return
            cluster.use(arms[point.arm])
            requests = workload(options, point, point.rate * layout.num_instances, options.point_s)
            real = WORKLOADS[point.workload].real_history
            progress.add(row_of(options, layout, point, cluster.run(requests, real_history=real)))


def rounds(options: argparse.Namespace, progress: Progress) -> Iterator[list[tuple[Layout, list[Point]]]]:
    """What is left to measure, by layout: every point once, then the knees again with other seeds."""
    layouts = [one for one in LAYOUTS[options.gpus] if not options.layouts or one.name in options.layouts]
    yield _left(options, progress, layouts, options.rates, [options.seed])
    knees = {}
    for name in options.rates if options.knee_seeds else ():
        rows = [s for s in progress.samples if (s["gpus"], s["workload"]) == (options.gpus, name)]
        rows = [row for row in rows if row["seed"] == options.seed and not row["arm"].endswith("_auto")]
        shares: dict[float, float] = {}
        for row in rows:
            within = _kept(row)
            shares[row["rate"]] = max(shares.get(row["rate"], 0.0), sum(within) / len(within))
        if (rate := knee(shares)) is not None:
            knees[name] = (rate,)
    yield _left(options, progress, layouts, knees, options.knee_seeds)


def _left(
    options: argparse.Namespace,
    progress: Progress,
    layouts: Sequence[Layout],
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
) -> list[tuple[Layout, list[Point]]]:
    found = [
        (one, [p for p in points(one, rates, seeds) if not is_done(progress, options, p)]) for one in layouts
    ]
    return [(layout, some) for layout, some in found if some]


def measure(options: argparse.Namespace, progress: Progress) -> bool:
    """All that is not there yet, until the time is up. False: points are left."""
    end_s = time.monotonic() + options.budget_s
    for todo in rounds(options, progress):
        for number, (layout, left) in enumerate(todo):
            now_s = time.monotonic()
            own_s = allowance_s(end_s - now_s, len(todo) - number)
            if own_s < options.point_s:
                return False
            measure_layout(options, layout, left, progress, now_s + own_s)
    return not any(any(todo) for todo in rounds(options, progress))


# -- the command ----------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options; --quick and --device change the defaults of others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short points, no seeds; writes no result file")
    parser.add_argument("--gpus", type=int, default=2, choices=sorted(LAYOUTS))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--engine", default="vllm", choices=("vllm", "mock"))
    parser.add_argument("--mock", action="store_true", help="mock engines on CPU: tries the script alone")
    parser.add_argument(
        "--model-dir", default="", help="default: 8B shape, random weights; on CPU the demo model"
    )
    parser.add_argument("--layouts", default="", help="of the GPUs' layouts these, e.g. 1p1d,colocated")
    parser.add_argument("--rates", action="append", default=[], metavar="WORKLOAD=A,B", help="of an instance")
    parser.add_argument("--point-s", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--knee-seeds", default="2,3")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--think-ms", type=float, default=THINK_MS, help="between turns, mean")
    parser.add_argument("--slo-ttft-ms", type=float, default=0.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=0.0)
    parser.add_argument("--cache-bytes", type=int, default=0, help="of each instance; 0: the device's")
    parser.add_argument("--max-lag-ms", type=float, default=100.0)
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing that would end later")
    parser.add_argument("--resume", type=Path, help="JSON lines of finished points")
    parser.add_argument("--set", action="append", default=[], help="cluster setting, KEY=VALUE")
    parser.add_argument("--worker", action="append", default=[], help="worker setting, KEY=JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if options.mock:
        options.device, options.engine = "cpu", "mock"
    if options.quick:
        options.point_s, options.knee_seeds = min(options.point_s, 12.0), ""
    limits = SLO_MS[options.device]
    options.slo_ttft_ms, options.slo_tpot_ms = (
        options.slo_ttft_ms or limits[0],
        options.slo_tpot_ms or limits[1],
    )
    if options.device == "cuda":
        options.worker, options.set = [*GPU_WORKER, *options.worker], [*GPU_CLUSTER, *options.set]
    options.knee_seeds = [int(word) for word in options.knee_seeds.split(",") if word]
    options.layouts = [word for word in options.layouts.split(",") if word]
    if unknown := set(options.layouts) - {one.name for one in LAYOUTS[options.gpus]}:
        parser.error(f"no layouts {sorted(unknown)} with {options.gpus} GPUs")
    given = dict(word.split("=", 1) for word in options.rates)
    if unknown := set(given) - set(WORKLOADS):
        parser.error(f"no workloads {sorted(unknown)}; there are {', '.join(WORKLOADS)}")
    chosen = {name: [float(n) for n in text.split(",")] for name, text in given.items()}
    options.rates = chosen or dict(RATES[options.device])
    return options


def kept(path: Path, measured: Samples) -> list[dict[str, Any]]:
    """Points of other numbers of GPUs in the result file of before."""
    if not path.is_file():
        return []
    gpus = {row["gpus"] for row in measured}
    return [row for row in load_result(path)["samples"] if row["gpus"] not in gpus]


def write(options: argparse.Namespace, argv: Sequence[str], samples: Samples, metrics: Metrics) -> Path:
    """The result file."""
    settings = {
        "device": options.device, "engine": options.engine, "rates_of_an_instance": options.rates,
        "point_s": options.point_s, "knee_seeds": options.knee_seeds, "scale": options.scale,
        "think_ms": options.think_ms, "slo_ms": [options.slo_ttft_ms, options.slo_tpot_ms],
        "cluster": options.set, "worker": options.worker, "cache_bytes": options.cache_bytes,
        "model": options.model_dir or ("8B shape" if options.device == "cuda" else "quire-demo"),
    }  # fmt: skip
    command = "python -m loadtest.bench_disaggregation " + " ".join(argv)
    return write_result(
        NAME, claim=CLAIM, command=command, settings=settings, metrics=metrics, samples=samples,
        folder=options.out, commit=options.commit,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed, 3 when there are points left."""
    options = parse(argv)
    progress = Progress(options.resume, said)
    with tempfile.TemporaryDirectory(prefix="quire-pd-") as options.folder:
        is_whole = measure(options, progress)
    samples = progress.samples
    if not samples:
        print("there was no time for any point")
        return 3
    if not options.quick:
        samples = kept(options.out / f"{NAME}.json", samples) + samples
    metrics = metrics_from_samples(samples)
    for key, value in metrics.items():
        if key.endswith(SHOWN):
            print(f"{key:70} {value:10.3f}")
    if not options.quick:
        path = write(options, argv, samples, metrics)
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    if not is_whole:
        print("points are left: call again with the same --resume to go on")
        return 3
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
