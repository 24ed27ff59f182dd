"""Does disaggregation pay: MemServe's Figure 8. Prefill and decode apart against as many colocated instances.

    python -m loadtest.bench_disaggregation --gpus 2|4 [--point-s 60] [--budget-s S] [--resume FILE] [--out FOLDER]
        [--arms A,B] [--commit HEAD] [--worker K=V]                                 -> h200-disaggregation.json

--gpus 2: 1P1D against 2 colocated; 4: 1P2D and 2P1D against 3 colocated; pairs with PD-Caching-3, and PD-Basic (nothing
kept). `colocated`: our engines on the same mempool, gateway and scheduler, policy `cost` as in all; `auto` leaves it
the choice between a pair and one instance. `stock`: as many plain vLLM servers with vLLM's defaults, each with its
prefix cache and chunked prefill, sessions in turn (stock_servers.py). 8B shape, random weights, a GPU an instance.
Workloads as in MemServe 8.2, open loop, later turns with the real answers; rates are of each instance, as in the paper.
The same requests at the same times for every arm, in tokens of its own. Goodput: of requests within both limits (SLO).

A call measures whole groups (a workload and a rate in 1p1d, colocated and stock), as many as --budget-s is enough for;
then pairs without caching, then `auto` (disaggregation_plan.py). Engines start once a call and layout. --resume FILE
keeps finished points: call it again to go on. Engines take 105 to 135 s to be ready and warm, a ShareGPT point 100 to
120 s, as later turns go on after the arrivals: ShareGPT at 16/s of each instance in all three is 11 minutes, or a call
of 5 for each of `--layouts 1p1d`, `colocated` and `stock`, with a second workload in the time that is left.
--quick: 12 s a point, no result file. Points at the knee (the highest rate at which 90% keep the SLO) are repeated with
--knee-seeds, from a start of their own. A result file keeps its points that a call did not measure.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.bench_locality import sample_of
from loadtest.disaggregation_metrics import hit_ratio, metrics_from_samples, within_slo
from loadtest.disaggregation_plan import (
    LAYOUTS,
    RATES,
    Group,
    Layout,
    Point,
    Rates,
    by_layout,
    groups,
    knee,
    num_fitting,
)
from loadtest.locality_cluster import LocalityCluster, Start
from loadtest.outcomes import Outcome
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, gpu_names, load_result, quantile, write_result
from loadtest.stock_servers import StockServers
from loadtest.workloads.catalogue import WORKLOADS, Options, build
from loadtest.workloads.request import Request, salted, scaled

NAME = "h200-disaggregation"
CLAIM = (
    "Prefill and decode on GPUs of their own, with caching, against as many colocated instances (ours, and plain vLLM) "
    "with prefix caching and chunked prefill: where the P99 of the job's time falls, and where not (MemServe Figure 8)."
)
SLO_MS = {"cuda": (500.0, 25.0), "cpu": (2_000.0, 100.0)}  # time to first token, time per output token
GPU_WORKER, GPU_CLUSTER = ("max_num_seqs=256",), ("gateway_processes=2",)
CONTEXT_TOKENS = 8_000
THINK_MS = 1_000.0
KEY = ("gpus", "arm", "workload", "rate", "seed")  # of a sample: two of one file differ in it
WARM_S = 4.0
START_S = {"cuda": 135.0, "cpu": 45.0}  # of a layout's engines, until one was seen
DRAIN_S = {"sharegpt": 58.0, "react": 30.0}  # what a point takes beyond its arrivals, until one was seen
SHORT_DRAIN_S = 4.0  # of other workloads
SHOWN = (
    "ttft_p99_vs_colocated_ratio", "jct_p99_vs_colocated_ratio", "ttft_p99_vs_stock_ratio", "jct_p99_vs_stock_ratio",
    "jct_p99_vs_basic_ratio", "auto_disaggregated_ratio", "_count", "_wins_ratio", "_loses_ratio",
    "_wins_vs_stock_ratio", "_loses_vs_stock_ratio",
)  # fmt: skip


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
        "cards": sorted(set(gpu_names())),  # points of one file may have been measured on several machines
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
    within = within_slo(row)
    return (
        f"{row['workload']} {row['rate']:g}/s an instance, {row['arm']}, seed {row['seed']}: {row['requests']} asked, "
        f"{row['failed']} failed, {', '.join(times)} ms (mean/P99), {sum(within) / len(within):.0%} in the SLO,"
        f" {hit_ratio([row]):.0%} hits, {row['disaggregated']} by pairs"
    )


def is_done(progress: Progress, options: argparse.Namespace, point: Point) -> bool:
    """Whether there is a sample of it."""
    return progress.has(kind="point", gpus=options.gpus, **asdict(point)) is not None


def is_asked(options: argparse.Namespace, point: Point) -> bool:
    """Whether --arms names its arm, or none."""
    return not options.arms or point.arm in options.arms


def point_s(options: argparse.Namespace, progress: Progress, point: Point) -> float:
    """Seconds that a point takes: as the longest of its workload did, else as far as one can know."""
    rows = (row for row in progress.samples if row["workload"] == point.workload)
    seen_s = [row["seconds"] - row["point_s"] for row in rows if row["gpus"] == options.gpus]
    drain_s = max(seen_s, default=DRAIN_S.get(point.workload, SHORT_DRAIN_S))
    return options.point_s + max(drain_s, SHORT_DRAIN_S)


def servers_of(options: argparse.Namespace, layout: Layout, first: Point) -> LocalityCluster | StockServers:
    """Not started yet; placing by the arm of `first`."""
    start = Start(
        options.device, options.engine, options.model_dir, options.cache_bytes, options.set, options.worker
    )
    folder = Path(options.folder)
    if layout.is_stock:
        return StockServers(folder, start, layout.num_instances, max_lag_ms=options.max_lag_ms)
    flags, arm = start.flags(folder, layout.words), layout.arm(first.arm)
    return LocalityCluster(folder / "home", flags, start.sections(), arm, max_lag_ms=options.max_lag_ms)


def measure_layout(
    options: argparse.Namespace, layout: Layout, left: Sequence[Point], progress: Progress, end_s: float
) -> None:
    """Start its engines and run its points until end_s."""
    begin_s = time.monotonic()
    with servers_of(options, layout, left[0]) as servers:
        rate = max(point.rate for point in left) * layout.num_instances
        servers.run(workload(options, left[0], min(rate, 20.0), WARM_S, "warm"), is_measured=False)
        start_s = round(time.monotonic() - begin_s, 1)
        print(f"{layout.name}: ready and warm after {start_s:.0f} s", flush=True)
        for point in left:
            if time.monotonic() + point_s(options, progress, point) > end_s:
                print(f"  {layout.name}: the time is up", flush=True)
                return
            servers.use(layout.arm(point.arm))
            requests = workload(options, point, point.rate * layout.num_instances, options.point_s)
            outcomes = servers.run(requests, real_history=WORKLOADS[point.workload].real_history)
            progress.add({**row_of(options, layout, point, outcomes), "start_s": start_s})


def rounds(options: argparse.Namespace, progress: Progress) -> Iterator[list[Group]]:
    """What is left to measure: every point once, then the knees again with other seeds."""
    layouts = [one for one in LAYOUTS[options.gpus] if not options.layouts or one.name in options.layouts]
    if options.engine == "mock":  # there is no mock of plain vLLM
        layouts = [one for one in layouts if not one.is_stock]
    yield _left(options, progress, layouts, options.rates, [options.seed])
    knees = {}
    for name in options.rates if options.knee_seeds else ():
        rows = [s for s in progress.samples if (s["gpus"], s["workload"]) == (options.gpus, name)]
        rows = [row for row in rows if row["seed"] == options.seed and not row["arm"].endswith("_auto")]
        shares: dict[float, float] = {}
        for row in rows:
            within = within_slo(row)
            shares[row["rate"]] = max(shares.get(row["rate"], 0.0), sum(within) / len(within))
        if (rate := knee(shares)) is not None:
            knees[name] = (rate,)
    yield _left(options, progress, layouts, knees, options.knee_seeds)


def _left(
    options: argparse.Namespace,
    progress: Progress,
    layouts: Sequence[Layout],
    rates: Rates,
    seeds: Sequence[int],
) -> list[Group]:
    found = (
        [one for one in group if is_asked(options, one[1]) and not is_done(progress, options, one[1])]
        for group in groups(layouts, rates, seeds)
    )
    return [group for group in found if group]


def measure(options: argparse.Namespace, progress: Progress) -> bool:
    """All that is not there yet, until the time is up. False: points are left.

    As many whole groups as fit, layout by layout; the last goes on with its points of other groups, which a later call
    need not start it for.
    """
    end_s = time.monotonic() + options.budget_s

    def one_s(point: Point) -> float:
        return point_s(options, progress, point)

    for left in rounds(options, progress):
        seen_s = [row.get("start_s", 0.0) for row in progress.samples if row["gpus"] == options.gpus]
        start_s = max(seen_s, default=0.0) or START_S[options.device]
        num = num_fitting(left, end_s - time.monotonic(), start_s, one_s)
        later = {layout.name: some for layout, some in by_layout(left[num:])}
        chosen = by_layout(left[:num])
        for number, (layout, some) in enumerate(chosen, 1):
            if time.monotonic() + start_s + one_s(some[0]) > end_s:
                return False
            more = later.get(layout.name, []) if number == len(chosen) else []
            measure_layout(options, layout, [*some, *more], progress, end_s)
        if num < len(left):  # knees come when every point is there
            break
    return not any(rounds(options, progress))


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
    parser.add_argument(
        "--arms", default="", help="of the layouts' arms these, e.g. 1p1d,colocated: without auto"
    )
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
    options.arms = [word for word in options.arms.split(",") if word]
    if unknown := set(options.arms) - {arm for one in LAYOUTS[options.gpus] for arm in one.arms}:
        parser.error(f"no arms {sorted(unknown)} with {options.gpus} GPUs")
    given = dict(word.split("=", 1) for word in options.rates)
    if unknown := set(given) - set(WORKLOADS):
        parser.error(f"no workloads {sorted(unknown)}; there are {', '.join(WORKLOADS)}")
    chosen = {name: [float(n) for n in text.split(",")] for name, text in given.items()}
    options.rates = chosen or dict(RATES[options.device])
    return options


def kept(path: Path, measured: Samples) -> list[dict[str, Any]]:
    """What the result file of before has of other points, each with the commit that it was measured at."""
    if not path.is_file():
        return []
    before = load_result(path)
    mine = {tuple(row[name] for name in KEY) for row in measured}
    rows = [row for row in before["samples"] if tuple(row[name] for name in KEY) not in mine]
    return [{"commit": before["commit"][:7], **row} for row in rows]


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
