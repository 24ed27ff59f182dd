"""Where fetching a prefix from another host takes as long as computing it: measured, and as eq 2 predicts it.

    python -m loadtest.bench_crossover [--quick] [--out FOLDER] [--commit HEAD]                  writes crossover.json

Root only: two hosts are network namespaces with a link whose rate is limited (crossover_rig.py). Of every prompt the
worker on one host has the prefix, and the worker on the other is sent the whole prompt with either verdict forced: to
fetch the prefix, or to compute it; prompts of equal length, nothing of them seen there before, in turns. Before each
of them the scheduler's own core says what both would take, from what that worker has reported: coefficients from the
profile at its start, its correction, and the link's rate and latency as its own transfers showed them. After the rate
has been changed, some transfers come first that count for nothing but for that.

Crossover: the link rate at which both take equally long, between the medians of neighbouring rates, linear in the time
a byte takes. Predicted: the same of the predictions. A sample whose receipt says otherwise than was told is repeated.
right_percent: of all samples, where eq 2's verdict was what was faster by the medians; regret: what the others lost.
"""

import argparse
import asyncio
import os
import random
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from loadtest.crossover_rig import HOLDER, READER, CrossoverRig
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, machine, write_result
from loadtest.two_hosts import TwoHosts, why_not

NAME = "crossover"
CLAIM = (
    "Eq 2 turns from fetching to computing at a link rate within 20% of the one at which, measured on real engines, "
    "both take equally long."
)
MODEL = ROOT / "deploy" / "models" / "quire-demo"
NEW_TOKENS = 64  # behind the prefix: nobody has them
FIRST_TOKEN, LAST_TOKEN = 100, 4_000  # of random prompts
REST_S = 0.12  # a report's interval and more: the scheduler knows what went before
TRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """`passes` over all rates, up and down in turns; `rounds` over all prefixes at each."""

    rates_mb_per_s: tuple[int, ...]
    prefixes: tuple[int, ...]
    passes: int
    rounds: int
    settling: tuple[int, ...]  # prefixes fetched after the rate has changed


FULL = Plan(
    (25, 35, 50, 70, 100, 140, 280), (512, 1024, 2048, 3072), 2, 4, (512, 256, 1024, 384, 768, 256, 1024, 512)
)
QUICK = Plan((40, 80, 160), (512, 1024), 1, 2, (512, 256, 1024, 384, 768))


def crossing(points: Sequence[tuple[float, float]], *, beyond: bool = False) -> float | None:
    """Where a line through (x, y) goes from below zero to above, between neighbours by x; None: nowhere.

    Args: beyond: where all are on one side, as the two points nearest to the other side say.
    """
    ordered = sorted(points)
    for (x, y), (next_x, next_y) in pairwise(ordered):
        if y <= 0 < next_y:
            return x + (next_x - x) * -y / (next_y - y)
    if not beyond or len(ordered) < 2:
        return None
    (x, y), (next_x, next_y) = ordered[:2] if ordered[0][1] > 0 else ordered[-2:]
    found = x - y * (next_x - x) / (next_y - y) if next_y > y else 0.0
    return found if found > 0 else None


def crossover_gb_per_s(points: Mapping[float, float], *, beyond: bool = False) -> float | None:
    """The link rate at which fetching takes as long as computing.

    Args: points: link rate in GB/s -> ms that fetching takes longer. Linear in between by the time a byte takes.
    """
    found = crossing([(1 / rate, longer_ms) for rate, longer_ms in points.items()], beyond=beyond)
    return 1 / found if found else None


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Raises: ValueError where the rates do not enclose a prefix's crossover."""
    points: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in samples:
        points[row["prefix_tokens"], row["rate_mb_per_s"]].append(row)
    measured: dict[int, dict[float, float]] = defaultdict(dict)
    predicted: dict[int, dict[float, float]] = defaultdict(dict)
    for (prefix, rate), rows in points.items():
        longer = median(row["fetch_ms"] for row in rows) - median(row["recompute_ms"] for row in rows)
        measured[prefix][rate / 1e3] = longer
        predicted[prefix][rate / 1e3] = median(
            row["predicted_fetch_ms"] - row["predicted_recompute_ms"] for row in rows
        )
    out: Metrics = {}
    errors = []
    for prefix in sorted(measured):
        real = crossover_gb_per_s(measured[prefix])
        said = crossover_gb_per_s(predicted[prefix], beyond=True)
        if real is None or said is None:
            raise ValueError(f"the rates do not enclose the crossover of {prefix} tokens")
        errors.append(abs(said - real) / real)
        head = f"prefix{prefix}"
        out[f"{head}_measured_crossover_gb_per_s"] = real
        out[f"{head}_predicted_crossover_gb_per_s"] = said
        out[f"{head}_crossover_error_ratio"] = errors[-1]
    out["crossover_error_ratio"] = max(errors)
    out["crossover_median_error_ratio"] = median(errors)
    return out | _regrets(points, measured)


def _regrets(
    points: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]],
    measured: Mapping[int, Mapping[float, float]],
) -> Metrics:
    """How often eq 2 chose what is faster, and what it lost where not; beside both constant choices."""
    regrets: dict[str, list[float]] = defaultdict(list)
    for (prefix, rate), rows in points.items():
        longer = measured[prefix][rate / 1e3]
        lost = {"fetch": max(0.0, longer), "recompute": max(0.0, -longer)}
        for row in rows:
            regrets["chosen"].append(lost[row["chosen"]])
            for way, ms in lost.items():
                regrets[way].append(ms)
    chosen = regrets["chosen"]
    return {
        "right_percent": 100 * sum(ms == 0.0 for ms in chosen) / len(chosen),
        "mean_regret_ms": fmean(chosen),
        "worst_regret_ms": max(chosen),
        "always_fetch_mean_regret_ms": fmean(regrets["fetch"]),
        "always_recompute_mean_regret_ms": fmean(regrets["recompute"]),
    }


# -- measuring ------------------------------------------------------------------------------------------


class Measuring:
    """Samples of one rig."""

    def __init__(self, rig: CrossoverRig, hosts: TwoHosts, plan: Plan) -> None:
        self._rig = rig
        self._hosts = hosts
        self._plan = plan
        self._rng = random.Random(7)

    async def run(self) -> list[dict[str, Any]]:
        """All of the plan. Raises: RuntimeError where receipts never say what was told."""
        for prefix in self._plan.prefixes:  # shapes are seen for the first time, the path is opened
            for _ in range(2):
                await self._pair(prefix)
        samples: list[dict[str, Any]] = []
        for number in range(self._plan.passes):
            rates = self._plan.rates_mb_per_s
            for rate in rates if number % 2 else reversed(rates):
                self._hosts.limit(rate * 1_000_000)
                for prefix in self._plan.settling:
                    await self._fetch(prefix, self._prompt(prefix))
                for _ in range(self._plan.rounds):
                    for prefix in self._plan.prefixes:
                        found = await self._pair(prefix)
                        samples.append({"rate_mb_per_s": rate, **found})
                print(f"  {rate} MB/s, load {os.getloadavg()[0]:.2f}", flush=True)
        return samples

    def _prompt(self, prefix: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(prefix + NEW_TOKENS)]

    async def _pair(self, prefix: int) -> dict[str, Any]:
        """One prompt fetched, one computed, and what both were predicted to take."""
        rig, num_tokens = self._rig, prefix + NEW_TOKENS
        await asyncio.sleep(REST_S)
        said = rig.predict(num_tokens, prefix)
        fetched = await self._fetch(prefix, self._prompt(prefix))
        await asyncio.sleep(REST_S)
        computed = await rig.ask(READER, self._prompt(prefix), rig.plan(prefix, recompute=True))
        return {
            "prefix_tokens": prefix,
            "fetch_ms": round(fetched.ms, 3),
            "recompute_ms": round(computed.ms, 3),
            "transfer_ms": fetched.receipt.fetch_ms,
            "left_ms": fetched.receipt.prefill_ms,
            "predicted_fetch_ms": round(said.fetch_ms + said.left_ms, 3),
            "predicted_recompute_ms": round(said.compute_ms, 3),
            "predicted_transfer_ms": round(said.fetch_ms, 3),
            "link_gb_per_s": round(said.link_gb_per_s, 5),
            "link_latency_ms": round(said.link_latency_ms, 3),
            "correction": round(said.correction, 4),
            "chosen": said.chosen,
        }

    async def _fetch(self, prefix: int, prompt: list[int]) -> Any:
        rig = self._rig
        for _ in range(TRIES):
            await rig.ask(HOLDER, prompt[: prefix + 1])
            await asyncio.sleep(REST_S)
            found = await rig.ask(READER, prompt, rig.plan(prefix, recompute=False))
            if found.receipt.tokens_remote == prefix:
                return found
            print(f"  again: {found.receipt}", flush=True)
            prompt = self._prompt(prefix)
        raise RuntimeError(f"{prefix} tokens were not fetched in {TRIES} tries")


async def measure(plan: Plan) -> list[dict[str, Any]]:
    """Start, measure, stop. Raises: as CrossoverRig and Measuring."""
    with TwoHosts() as hosts, tempfile.TemporaryDirectory(prefix="quire-cross-") as name:
        async with CrossoverRig(hosts, Path(name), MODEL) as rig:
            return await Measuring(rig, hosts, plan).run()


def table(samples: Samples, metrics: Metrics) -> list[str]:
    """Medians by point, then the figures."""
    lines = [f"{'tokens':>7}{'MB/s':>6}{'fetch':>9}{'said':>9}{'compute':>9}{'said':>9}  fetches chosen"]
    points: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in samples:
        points[row["prefix_tokens"], row["rate_mb_per_s"]].append(row)
    for (prefix, rate), rows in sorted(points.items()):
        names = ("fetch_ms", "predicted_fetch_ms", "recompute_ms", "predicted_recompute_ms")
        shown = "".join(f"{median(row[name] for row in rows):9.1f}" for name in names)
        fetches = sum(row["chosen"] == "fetch" for row in rows)
        lines.append(f"{prefix:7}{rate:6}{shown}  {fetches} of {len(rows)}")
    return lines + [f"{key:44}{value:10.3f}" for key, value in metrics.items()]


def main(argv: Sequence[str]) -> int:
    """Measure, print, write. Exit status 1 where two hosts cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few points; writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if reason := why_not():
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return 1
    began_s, before = time.monotonic(), machine()
    plan = QUICK if options.quick else FULL
    samples = asyncio.run(measure(plan))
    metrics = metrics_from_samples(samples)
    print(*table(samples, metrics), sep="\n")
    if not options.quick:
        path = write_result(
            NAME, claim=CLAIM, command=shlex.join(["python", "-m", "loadtest.bench_crossover", *argv]),
            settings={"model": "quire-demo, float32, 1 thread", "new_tokens": NEW_TOKENS, "passes": plan.passes,
                      "rounds": plan.rounds, "load_average_1min_before": before["load_average_1min"]},
            metrics=metrics, samples=samples, folder=options.out, commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    load = f"load {before['load_average_1min']} before, {os.getloadavg()[0]:.2f} after"
    print(f"{time.monotonic() - began_s:.0f} s; {load}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
