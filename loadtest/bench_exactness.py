"""Tokens of `quire up` on one GPU and on two beside stock vLLM's on one of them, token for token.

    python -m loadtest.bench_exactness [--modes M,M] [--topologies T,T] [--keep FILE]
        [--budget-s 500] [--device cuda|cpu] [--out FOLDER] [--commit HEAD]

writes loadtest/results/h200-exactness.json once every run is there; several calls with one --keep (its lines may come
from several machines' files). The demo model; modes are the data type, torch.compile and CUDA graphs on both sides,
request slots without a block table. Topologies: prefill and decode apart (`disaggregated`) and one `colocated` engine,
on the first GPU that is visible; on two GPUs, with graphs: each with its own (`two-gpus`), prefill of two ranks and
decode of one (`prefill-tp2`), and the other way round (`decode-tp2`), whose engines share a GPU.
Each run: a cluster of its own answers all cases of tests/support/exactness_cases.py one after another. Stock vLLM
answers each twice, with an empty prefix cache and with the prompt cached: there too a position that is computed alone
differs in its last bits. An answer unlike either is judged by how near a tie the first differing token was (`share`,
exactness_shares.py): below 0.8, or where stock cannot say, it is wrong. Sampled and structured cases that are unlike
either are not judged in 16 bits, only counted.

Exit status 1: a run failed, or an answer is wrong; 3: time ran out before the last run.
"""

import argparse
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest import exactness_rig as rig
from loadtest import exactness_shares as shares
from loadtest.progress import Progress
from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, write_result

NAME = "h200-exactness"
CLAIM = (
    "On one GPU, prefill and decode apart or together, and on two, apart with one and with two ranks, every answer "
    "equals stock vLLM's token for token in float32, eager and with CUDA graphs; where one is unlike both of stock's "
    "own, in 16 bits or with the kernels of request slots, the first differing token was a near tie."
)
MODES = ("float32", "float32+graphs", "bfloat16+graphs", "float32+token-major", "float32+layer-major")
ONE_GPU, TWO_GPUS = ("disaggregated", "colocated"), ("two-gpus", "prefill-tp2", "decode-tp2")
TOPOLOGIES = (*ONE_GPU, *TWO_GPUS)
RUNS = [(mode, topology) for mode in MODES for topology in ONE_GPU]
RUNS += [("float32+graphs", topology) for topology in TWO_GPUS]
SAME_KERNELS = ("float32", "float32+graphs")  # what the claim of equal tokens is about
STOCK_S, RUN_S = 30.0, 45.0  # expected on a GPU: nothing is begun with less time
GRAPHS_S = 40.0  # and either takes so much more with graphs
OUT_OF_TIME = 3


def merged(samples: Samples) -> list[dict[str, Any]]:
    """Every run that stock was asked about, its cases with `verdict` and `shares` (None: stock cannot say)."""
    asked = {(row["mode"], row["topology"]): row["shares"] for row in samples if row["kind"] == "shares"}
    runs = []
    for row in samples:
        key = (row["mode"], row["topology"])
        if row["kind"] != "answers" or key not in asked:
            continue
        cases = []
        for case in row["cases"]:
            nearness = [one["share"] for one in asked[key] if one["case"] == case["id"]]
            judged = shares.verdict(row["mode"], case, nearness)
            cases.append({**case, "shares": nearness, "verdict": judged})
        runs.append({**row, "cases": cases})
    return runs


def _least(cases: Sequence[dict[str, Any]]) -> list[float]:
    """[the least share of judged cases], or []."""
    judged = [case for case in cases if case["verdict"] in ("near_tie", "wrong")]
    return sorted(share for case in judged for share in case["shares"] if share is not None)[:1]


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. No `least_share_ratio` where no judged case is unlike both of stock's answers."""
    out: Metrics = {}
    runs = merged(samples)
    for run in runs:
        name = f"{run['mode']}_{run['topology']}".replace("+", "_").replace("-", "_")
        out[f"{name}_equal_count"] = sum(case["equal"] for case in run["cases"])
        out[f"{name}_unlike_either_count"] = sum(case["unlike_either"] for case in run["cases"])
        if run["topology"] != "colocated":
            out[f"{name}_placed_apart_count"] = run["placements"].get("disaggregated", 0)
    cases = [case for run in runs for case in run["cases"]]
    out["cases_count"] = len(cases)
    out["wrong_count"] = sum(case["verdict"] == "wrong" for case in cases)
    out["not_judged_count"] = sum(case["verdict"] == "not_judged" for case in cases)
    if least := _least(cases):
        out["least_share_ratio"] = least[0]
    same = [case for run in runs if run["mode"] in SAME_KERNELS for case in run["cases"]]
    if same:
        out["float32_cases_count"] = len(same)
        out["float32_equal_ratio"] = sum(case["equal"] for case in same) / len(same)
    return {key: float(value) for key, value in out.items()}


def table(samples: Samples) -> list[str]:
    """A line for each run."""
    lines = [f"{'mode':20} {'topology':14}" + "".join(f"{name:>12}" for name in (*shares.VERDICTS, "least"))]
    for run in merged(samples):
        counts = [sum(case["verdict"] == name for case in run["cases"]) for name in shares.VERDICTS]
        least = f"{_least(run['cases'])[0]:.4f}" if _least(run["cases"]) else "-"
        cells = "".join(f"{cell:>12}" for cell in (*counts, least))
        lines.append(f"{run['mode']:20} {run['topology']:14}{cells}")
    return lines


class Measuring:
    """Runs that are not there yet, while there is time. `failed`: what went wrong, a line each."""

    def __init__(self, options: argparse.Namespace, folder: Path, progress: Progress) -> None:
        self._options, self._folder, self._progress = options, folder, progress
        self._end_s = time.monotonic() + options.budget_s
        self._cases = rig.cases()
        self._no_stock: set[str] = set()
        self.failed: list[str] = []
        self.is_out_of_time = False

    def all(self) -> None:
        """Every mode and topology that was asked for."""
        for mode, topology in RUNS:
            if mode not in self._options.modes or topology not in self._options.topologies:
                continue
            try:
                self._one(mode, topology)
            except Exception as error:  # noqa: BLE001  one that fails leaves the others
                traceback.print_exc()
                self.failed.append(f"{mode} {topology}: {str(error)[:300] or type(error).__name__}")
                print(f"  failed: {self.failed[-1]}", flush=True)

    def _one(self, mode: str, topology: str) -> None:
        key = {"mode": mode, "topology": topology, "device": self._options.device}
        run = self._progress.has(kind="answers", **key)
        shared = self._progress.has(kind="shares", **key)
        if run and shared:
            return
        stock = self._stock(rig.stock_mode(mode))
        if stock is None:
            return
        if run is None:
            if not self._has_time(mode, RUN_S, f"{mode} {topology}"):
                return
            run = rig.cluster_answers(self._folder, self._options, mode, topology, self._cases, stock)
            self._progress.add(run)
        is_asking = bool(shares.questions_of(run))
        if not is_asking or self._has_time(mode, STOCK_S, f"shares of {mode} {topology}"):
            self._progress.add(rig.shares_row(self._folder, run, self._cases, stock))

    def _stock(self, mode: str) -> dict[str, Any] | None:
        """Stock vLLM's answers of a mode, asked once; None: no time, or it failed before."""
        key = {"kind": "stock", "mode": mode, "device": self._options.device}
        row = self._progress.has(**key)
        if row is None:
            if mode in self._no_stock:
                raise RuntimeError(f"no answers of stock vLLM in {mode}")
            if not self._has_time(mode, STOCK_S, f"stock vLLM in {mode}"):
                return None
            self._no_stock.add(mode)
            began_s = time.monotonic()
            answers = rig.stock_answers(self._folder, self._cases, mode)
            row = {**key, "answers": answers, "all_s": round(time.monotonic() - began_s, 1)}
            self._progress.add(row)
        return row["answers"]

    def _has_time(self, mode: str, needed_s: float, what: str) -> bool:
        needed_s += GRAPHS_S if "graphs" in mode.split("+") else 0.0
        if self._end_s - time.monotonic() >= needed_s:
            return True
        self.is_out_of_time = True
        print(f"  {what}: no time left", flush=True)
        return False


def said(row: dict[str, Any]) -> str:
    """A line for a sample."""
    name = f"{row['kind']} {row['mode']} {row.get('topology', '')}".rstrip()
    if row["kind"] == "stock":
        return f"{name}: {len(row['answers'])} cases, {row['all_s']} s"
    if row["kind"] == "shares":
        seen = [(one["case"], one["at"], one["ours"], one["stock"], one["share"]) for one in row["shares"]]
        return f"{name}: {seen or 'nothing to ask'}"
    unlike = [case["id"] for case in row["cases"] if case["unlike_either"]]
    equal = sum(case["equal"] for case in row["cases"])
    times = f"ready after {row['ready_s']} s, all {row['all_s']} s"
    return (
        f"{name}: {equal} equal of {len(row['cases'])}, unlike either {unlike}, {row['placements']}, {times}"
    )


def lacking(progress: Progress, device: str) -> list[str]:
    """Runs that are not there in full."""
    return [
        f"{mode} {topology}"
        for mode, topology in RUNS
        if not all(
            progress.has(kind=kind, mode=mode, topology=topology, device=device)
            for kind in ("answers", "shares")
        )
    ]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options. Exits with status 2 on names that are none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument(
        "--topologies", default="", help=f"of {', '.join(TOPOLOGIES)}; on a CPU the first two"
    )
    parser.add_argument("--keep", type=Path, help="file of what is there; a later call goes on from it")
    parser.add_argument("--budget-s", type=float, default=500.0, help="nothing is begun that may end later")
    parser.add_argument("--ready-s", type=float, default=150.0, help="a cluster has so long to be ready")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.topologies = options.topologies or ",".join(TOPOLOGIES if options.device == "cuda" else ONE_GPU)
    for name, known in (("modes", MODES), ("topologies", TOPOLOGIES)):
        words = getattr(options, name).split(",")
        if unknown := set(words) - set(known):
            parser.error(f"--{name} {','.join(sorted(unknown))}: of {','.join(known)}")
        setattr(options, name, words)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, write the result file, print the table."""
    options = parsed(argv)
    began_s = time.monotonic()
    progress = Progress(options.keep, said)
    with tempfile.TemporaryDirectory(prefix="quire-exact-", ignore_cleanup_errors=True) as name:
        measuring = Measuring(options, Path(name), progress)
        measuring.all()
    rows = [row for row in progress.samples if row["kind"] != "stock" and row.get("device") == options.device]
    metrics = metrics_from_samples(rows)
    missing = lacking(progress, options.device)
    if options.device == "cuda" and not missing:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_exactness", *argv]),
            settings={"model": "deploy/models/quire-demo", "least_share": shares.LEAST_SHARE},
            metrics=metrics,
            samples=rows,
            folder=options.out,
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    for key in sorted(metrics):
        print(f"{key:60} {metrics[key]:10.4f}")
    for run in merged(rows):
        wrong = [case["id"] for case in run["cases"] if case["verdict"] == "wrong"]
        if wrong:
            print(f"wrong: {run['mode']} {run['topology']}: {', '.join(wrong)}")
    print(*(f"failed: {line}" for line in measuring.failed), *table(rows), sep="\n")
    print(f"{time.monotonic() - began_s:.0f} s; not there yet: {', '.join(missing) or 'nothing'}")
    if measuring.failed or metrics["wrong_count"]:
        return 1
    return OUT_OF_TIME if measuring.is_out_of_time else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
