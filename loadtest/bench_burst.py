"""A burst beyond an engine's KV memory: order of arrival, fair slices over host memory, over a peer GPU's (AQUA 8, 13).

    python -m loadtest.bench_burst [--resume FILE] [--budget-s S] [--out FOLDER] [--commit HEAD]  -> h200x2-burst.json
    python -m loadtest.bench_burst --device cpu --quick                                  the demo model; no result file

8B shape, random weights, an engine on GPU 0; GPU 1 lends. `stable rate`: a profile's highest rate with TTFT 1 s and P99
of the time between tokens 100 ms; KV memory: 1.3 times what it holds at most there, in bytes in the result. Burst (AQUA
9.3): 25 prompts at the stable rate, then twice (arXiv: three times) the rate for --burst-s, then nothing; all are
waited for. Systems: `fcfs` (vLLM's order), `cfs_dram` and `cfs_peer`: one engine, fair slices, blocks of parked
requests leave for page-locked host memory or for pages that GPU 1 lends; nothing else differs. The same requests at
the same times. `stable`: the stable rate alone, fcfs against cfs_peer.

On two GPUs all engines are up at once, the one in order of arrival on GPU 1, for `stable` another one on GPU 0; they
run one after the other, so the lender is idle. --resume FILE keeps finished points: call it again to go on; --budget-s
begins nothing that would end later. The stable rate: --profile FILE[:CASE], or --rate and --peak-bytes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

from loadtest import burst_plan
from loadtest.burst_plan import BURST, DRAM, FACTORS, FCFS, PEER, STABLE, SYSTEMS, Point, Stable
from loadtest.burst_rig import Engine, Ran, Setup, make_model
from loadtest.open_loop import lag_p99_ms
from loadtest.profiler.requests import WARM
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200x2-burst"
CLAIM = (
    "In a burst of twice the stable rate for a minute, fair slices whose swap space is a peer GPU's memory give first "
    "tokens at least ten times sooner than order of arrival at P90, for at most 15% more of the mean completion time; "
    "time per token is lower than with swap space in host memory; without contention nothing differs (AQUA 9.3)."
)
SLO_MS = {"ttft": 1_000.0, "tbt": 100.0}
WARM_TOKENS = (64, 8)


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of each system all seeds together; ratios are medians over the seeds that both systems have.

    The workload of AQUA's Figure 8 has the plain names, another one its own before them.
    """
    out: Metrics = {}
    rows = [s for s in samples if s["kind"] == "point"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        head = "" if workload == "sharegpt" else f"{workload}_"
        for system in SYSTEMS:
            for load in (BURST, STABLE):
                some = [row for row in mine if (row["system"], row["load"]) == (system, load)]
                if some:
                    out |= {
                        f"{head}{load}_{system}_{name}": value for name, value in _of_system(some).items()
                    }
        out |= {f"{head}{name}": value for name, value in _ratios(mine).items()}
    out["failed_requests"] = float(sum(row["failed"] for row in rows))
    return out


def _of_system(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    ttft = [value for row in rows for value in burst_ttft_ms(row)]
    return {
        "ttft_p50_ms": quantile(ttft, 0.5),
        "ttft_p90_ms": quantile(ttft, 0.9),
        "rct_mean_ms": fmean(value for row in rows for value in row["rct_ms"]),
        "tpot_mean_ms": fmean(value for row in rows for value in row["tpot_ms"]),
        "tbt_p99_ms": max(row["tbt_p99_ms"] for row in rows),
        "swapped_out_gb": sum(row["counts"].get("swapped_out_bytes", 0) for row in rows) / len(rows) / 1e9,
        "recomputed_tokens": sum(row["counts"].get("num_recomputed_tokens", 0) for row in rows) / len(rows),
        "peak_kv_gb": max(row["peak_kv_bytes"] for row in rows) / 1e9,
    }


def burst_ttft_ms(row: Mapping[str, Any]) -> list[float]:
    """Of the requests that arrived in the burst; of all where there was none."""
    found = [
        ttft for at, ttft in zip(row["at_ms"], row["ttft_ms"], strict=True) if at >= row["burst_from_ms"]
    ]
    return found or list(row["ttft_ms"])


def _ratios(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    found = {(row["load"], row["system"], row["seed"]): row for row in rows}

    def of_seeds(load: str, above: str, below: str, value: Any) -> list[float]:
        both = [seed for where, system, seed in found if (where, system) == (load, above)]
        both = [seed for seed in both if (load, below, seed) in found]
        return [value(found[load, above, seed]) / value(found[load, below, seed]) for seed in both]

    def p90(row: Mapping[str, Any]) -> float:
        return quantile(burst_ttft_ms(row), 0.9)

    wanted = {
        "ttft_p90_gain_ratio": of_seeds(BURST, FCFS, PEER, p90),
        "dram_ttft_p90_gain_ratio": of_seeds(BURST, FCFS, DRAM, p90),
        "rct_ratio": of_seeds(BURST, PEER, FCFS, lambda row: fmean(row["rct_ms"])),
        "dram_rct_ratio": of_seeds(BURST, DRAM, FCFS, lambda row: fmean(row["rct_ms"])),
        "tpot_of_dram_ratio": of_seeds(BURST, PEER, DRAM, lambda row: fmean(row["tpot_ms"])),
        "uncontended_ratio": of_seeds(STABLE, PEER, FCFS, lambda row: fmean(row["rct_ms"])),
        "uncontended_ttft_ratio": of_seeds(STABLE, PEER, FCFS, lambda row: fmean(row["ttft_ms"])),
    }
    out = {name: median(values) for name, values in wanted.items() if values}
    if values := wanted["ttft_p90_gain_ratio"]:
        out |= {"worst_ttft_p90_gain_ratio": min(values), "seeds_count": float(len(values))}
    return out


# -- measuring ------------------------------------------------------------------------------------------


def row_of(options: argparse.Namespace, point: Point, stable: Stable, ran: Ran) -> dict[str, Any]:
    """A point's sample. Raises: RuntimeError when nothing was answered."""
    good = [one for one in ran.outcomes if one.ok]
    if not good:
        raise RuntimeError(f"no request was answered: {ran.outcomes[0].error}")
    burst_from_ms = ran.outcomes[WARM - 1].due_ms if point.load == BURST and len(ran.outcomes) > WARM else 0.0
    return {
        "kind": "point", "workload": point.workload, "load": point.load, "system": point.system, "seed": point.seed,
        "rate_per_s": stable.rate_per_s, "factor": options.factors[point.workload], "burst_s": options.burst_s,
        "burst_from_ms": burst_from_ms + 0.001 * (burst_from_ms > 0), "requests": len(ran.outcomes),
        "failed": len(ran.outcomes) - len(good),
        "errors": sorted({one.error[:120] for one in ran.outcomes if one.error})[:3],
        "at_ms": [round(one.due_ms, 1) for one in good],
        "ttft_ms": [round(one.ttft_ms, 1) for one in good],
        "rct_ms": [round(one.jct_ms, 1) for one in good],
        "tpot_ms": [round(one.tpot_ms, 3) for one in good],
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "output_tokens": sum(one.output_tokens for one in good),
        "tbt_p99_ms": round(ran.tbt_p99_ms, 2), "lag_p99_ms": round(lag_p99_ms(ran.outcomes), 2),
        "pool_bytes": ran.pool_bytes, "peak_kv_bytes": round(ran.peak_share * ran.pool_bytes),
        "counts": ran.counts, "seconds": round(max(one.ended_ms for one in good) / 1000, 2),
    }  # fmt: skip


def said(row: dict[str, Any]) -> str:
    """A line of a sample."""
    if row["kind"] != "point":
        return json.dumps(row)
    ttft = burst_ttft_ms(row)
    counts = row["counts"]
    return (
        f"{row['workload']} {row['load']} {row['system']} seed {row['seed']}: {row['requests']} asked, "
        f"{row['failed']} failed, TTFT {quantile(ttft, 0.5):.0f}/{quantile(ttft, 0.9):.0f} ms (P50/P90), "
        f"RCT {fmean(row['rct_ms']):.0f} ms, "
        f"TPOT {fmean(row['tpot_ms']):.1f}, TBT P99 {row['tbt_p99_ms']:.0f} ms, "
        f"{counts.get('swapped_out_bytes', 0) / 1e9:.2f} GB out, {counts.get('swapped_in_bytes', 0) / 1e9:.2f} in, "
        f"{counts.get('num_recomputed_tokens', 0)} tokens again, {row['seconds']:.0f} s"
    )


class Measuring:
    """What is left of a workload. Args: stable: of this workload."""

    def __init__(
        self, options: argparse.Namespace, stable: Stable, progress: Progress, folder: Path, end_s: float
    ) -> None:
        self._options, self._stable, self._progress, self._end_s = options, stable, progress, end_s
        self._folder = folder
        self._pairs = burst_plan.lengths(stable.workload, options.scale, options.context_tokens)
        self._sizes = {
            "factor": options.factors[stable.workload], "burst_s": options.burst_s, "stable_s": options.stable_s,
        }  # fmt: skip
        self._engines: dict[str, Engine] = {}

    def points(self) -> list[Point]:
        """Those that have no sample yet."""
        options = self._options
        wanted = burst_plan.points(self._stable.workload, options.seeds, options.systems)
        left = [one for one in wanted if not self._has(one)]
        if options.together:
            return left
        return sorted(left, key=lambda one: one.engine != FCFS)  # an engine at a time

    def _has(self, point: Point) -> dict[str, Any] | None:
        return self._progress.has(
            kind="point", workload=point.workload, load=point.load, system=point.system, seed=point.seed
        )

    def run(self) -> bool:
        """Everything that fits into the time. False: points are left."""
        left = self.points()
        with ExitStack() as stack:
            for point in left:
                if time.monotonic() + self._expected_s(point) > self._end_s:
                    print("  the time is up", flush=True)
                    return False
                self._start({one.engine for one in left}, point, stack)
                self._progress.add(self._measure(point))
        return True

    def _expected_s(self, point: Point) -> float:
        same = [s for s in self._progress.samples if s["kind"] == "point" and s["workload"] == point.workload]
        took = [
            s["seconds"] for s in same if (s["load"], s["burst_s"]) == (point.load, self._options.burst_s)
        ]
        guess_s = burst_plan.expected_s(point, self._stable.rate_per_s, **self._sizes)
        return max(took) + 6.0 if took else guess_s

    def _start(self, all_names: set[str], point: Point, stack: ExitStack) -> None:
        """This point's engine; all that will be needed at once, where they may be up together."""
        names = all_names if self._options.together else {point.engine}
        if names <= set(self._engines):
            return
        if not self._options.together:
            stack.close()
            self._engines.clear()
        begin_s = time.monotonic()
        setup = setup_of(self._options, self._stable)
        made = {name: Engine(name, setup, self._folder) for name in sorted(names - set(self._engines))}
        with ThreadPoolExecutor(len(made)) as starting:
            list(starting.map(lambda engine: stack.enter_context(engine), made.values()))
        self._engines |= made
        print(f"{', '.join(made)}: ready after {time.monotonic() - begin_s:.0f} s", flush=True)
        for engine in made.values():
            warm = burst_plan.warm(self._stable, self._pairs, engine.name)
            engine.run(warm, is_measured=False)
        print(f"warm after {time.monotonic() - begin_s:.0f} s", flush=True)

    def _measure(self, point: Point) -> dict[str, Any]:
        engine = self._engines[point.engine]
        if point.engine != FCFS:
            engine.swap_to(peer=point.system == PEER)
        requests = burst_plan.requests(point, self._pairs, self._stable.rate_per_s, **self._sizes)
        return row_of(self._options, point, self._stable, engine.run(requests))


def setup_of(options: argparse.Namespace, stable: Stable) -> Setup:
    """Of both engines."""
    worker = {
        "max_model_len": options.context_tokens, "max_num_seqs": options.slots,
        "max_num_batched_tokens": options.chunk_tokens, "max_inflight": 65_536,
        **({"enforce_eager": True} if options.device == "cuda" and not options.graphs else {}),
        **options.worker,
    }  # fmt: skip
    fair = {
        "fair_slice_steps": options.slice_steps,
        "fair_quantum_tokens": options.quantum_tokens,
        "fair_patience_slices": options.patience_slices,
        "fair_spread_ms": options.spread_ms,
        **({"fair_swap_gb_per_s": options.swap_gb_per_s} if options.swap_gb_per_s else {}),
    }
    mempool = {"out_in_flight_bytes": options.in_flight_bytes, "pin_host": options.device == "cuda"}
    return Setup(
        device=options.device, gpus=options.gpus, pool_bytes=stable.pool_bytes, swap_bytes=options.swap_bytes,
        worker=worker, fair=fair, mempool=mempool, cluster=options.set, model_dir=options.model_dir,
        max_lag_ms=options.max_lag_ms,
    )  # fmt: skip


# -- the command ----------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options; --device and --quick change the defaults of others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, a short burst; writes no result file")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--model-dir", default="", help="default: 8B shape, random weights; on CPU the demo model"
    )
    parser.add_argument("--workloads", default="sharegpt", help="sharegpt, arxiv")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seeds", default="")
    parser.add_argument("--profile", default="", help="FILE[:CASE] of the stable rate; of the first workload")
    parser.add_argument("--rate", type=float, default=0.0, help="the stable rate, with --peak-bytes")
    parser.add_argument("--peak-bytes", type=int, default=0, help="KV memory that it holds at most")
    for name in ("burst-s", "stable-s", "scale", "max-lag-ms", "spread-ms"):
        parser.add_argument(f"--{name}", type=float, default=None)
    for name in (
        "context-tokens",
        "slots",
        "chunk-tokens",
        "slice-steps",
        "quantum-tokens",
        "patience-slices",
        "swap-bytes",
        "in-flight-bytes",
    ):
        parser.add_argument(f"--{name}", type=int, default=None)
    parser.add_argument(
        "--swap-gb-per-s",
        type=float,
        default=1e6,
        help="that slices count on: always worth it; 0: as measured",
    )
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, which take time to capture")
    parser.add_argument("--worker", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing that would end later")
    parser.add_argument("--resume", type=Path, help="JSON lines of finished points")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    defaults = dict(burst_plan.DEFAULTS[options.device])
    if options.quick:
        defaults |= {"seeds": "1", "burst_s": min(15.0, defaults["burst_s"]), "stable_s": 5.0}
    for name, value in defaults.items():
        if getattr(options, name) in (None, ""):
            setattr(options, name, value)
    options.seeds = [int(word) for word in options.seeds.split(",")]
    options.systems = [name for name in options.systems.split(",") if name]
    options.workloads = options.workloads.split(",")
    options.factors = dict(FACTORS)
    options.together = options.device == "cuda" and options.gpus > 1
    options.gpus = options.gpus if options.device == "cuda" else 0
    pairs = [one.partition("=") for one in options.worker]
    options.worker = {key: json.loads(value) for key, _, value in pairs}
    return options


def stable_of(options: argparse.Namespace, workload: str) -> Stable:
    """What the options say, or a profile. Raises: SystemExit in words."""
    if options.rate and options.peak_bytes:
        return Stable(workload, options.rate, options.peak_bytes, "given")
    if options.device == "cpu" and not options.profile:
        return Stable(workload, *burst_plan.CPU_STABLE[workload], "chosen for two cores")
    name = options.profile or burst_plan.PROFILE.get(workload, "")
    if not name:
        raise SystemExit(f"no profile of {workload}: give --profile, or --rate and --peak-bytes")
    file, _, case = name.partition(":")
    path = Path(file) if Path(file).is_file() else RESULTS / file
    return burst_plan.stable_from(path, case, workload)


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed, 3 when there are points left."""
    options = parse(argv)
    end_s = time.monotonic() + options.budget_s
    progress = Progress(options.resume, said)
    is_whole = True
    with tempfile.TemporaryDirectory(prefix="quire-burst-") as name:
        folder = Path(name)
        for workload in options.workloads:
            stable = stable_of(options, workload)
            head = {
                "kind": "stable", "workload": workload, "rate_per_s": stable.rate_per_s, "slo_ms": SLO_MS,
                "peak_kv_bytes": stable.peak_kv_bytes, "pool_bytes": stable.pool_bytes, "source": stable.source,
            }  # fmt: skip
            if progress.has(**head) is None:
                progress.add(head)
            home = folder / workload
            home.mkdir()
            make_model(home, setup_of(options, stable))
            is_whole = Measuring(options, stable, progress, home, end_s).run() and is_whole
    return report(options, argv, progress.samples, is_whole=is_whole)


def report(options: argparse.Namespace, argv: Sequence[str], samples: Samples, *, is_whole: bool) -> int:
    """The table, and the result file where there is one."""
    metrics = metrics_from_samples(samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:48} {value:12.3f}")
    if not options.quick and any(row["kind"] == "point" for row in samples):
        settings = {
            key: value
            for key, value in vars(options).items()
            if key not in ("out", "commit", "resume", "quick")
        }
        settings |= {"shape": options.model_dir or "8B", "eager": not options.graphs}
        path = write_result(
            NAME, claim=CLAIM, command="python -m loadtest.bench_burst " + " ".join(argv), settings=settings,
            metrics=metrics, samples=samples, folder=options.out, commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    if not is_whole:
        print("points are left: call again with the same --resume to go on")
        return 3
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
