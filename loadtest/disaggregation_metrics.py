"""Figures of bench_disaggregation: from the samples of its points, and nothing else."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from loadtest.reports.summary import bootstrap, nearest_rank
from loadtest.results import Metrics, Samples

RESAMPLES = 200
COMPARED = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "jct_mean", "jct_p99")
BASELINES = ("colocated", "stock")  # our engines, plain vLLM
# of two points that are compared: measured by one call, as far as samples tell
TOGETHER = ("commit", "cards")


def metrics_from_samples(samples: Samples) -> Metrics:
    """Of each point, with 95% intervals from its requests; arms over colocated, over stock vLLM, and over themselves
    without caching, where both were measured together: machines of one kind differ by a third. failed_requests: of all
    points."""
    out: Metrics = {}
    together: dict[str, list[Any]] = {}
    rows = sorted((s for s in samples if s["kind"] == "point"), key=_point_key)
    for key, some in groupby(rows, key=_point_key):
        found = list(some)
        head = _head(*key)
        together[head] = [[row.get(name) for name in TOGETHER] for row in found]
        out |= {f"{head}_{name}": value for name, value in _of_point(found).items()}
    for gpus, workload, rate, arm in dict.fromkeys(_point_key(row) for row in rows):
        for other, word in (*((one, one) for one in BASELINES), (f"{arm}_basic", "basic")):
            mine, theirs = _head(gpus, workload, rate, arm), _head(gpus, workload, rate, other)
            if arm == other or together.get(theirs) != together[mine]:
                continue
            for name in COMPARED:
                if below := out[f"{theirs}_{name}_ms"]:
                    out[f"{mine}_{name}_vs_{word}_ratio"] = out[f"{mine}_{name}_ms"] / below
    out |= _verdict(out, "colocated", "") | _verdict(out, "stock", "_vs_stock")
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
    met = np.array([one for row in rows for one in within_slo(row)], dtype=float)
    found = bootstrap(met, lambda v: v.mean(axis=-1), resamples=RESAMPLES)
    offered = rows[0]["rate_per_s"]
    out |= {
        "goodput_requests_per_s": found.value * offered,
        "goodput_low_requests_per_s": found.low * offered,
        "goodput_high_requests_per_s": found.high * offered,
        "slo_ratio": found.value,
        "disaggregated_ratio": sum(row["disaggregated"] for row in rows) / max(1, len(met)),
        "hit_ratio": hit_ratio(rows),
    }
    return out


def _statistic(values: np.ndarray, level: float | None) -> np.ndarray:
    return values.mean(axis=-1) if level is None else nearest_rank(values, level)


def within_slo(row: Mapping[str, Any]) -> list[bool]:
    """Of each request, whether it kept the SLO; those that failed did not."""
    ttft_ms, tpot_ms = row["slo_ms"]
    pairs = zip(row["ttft_ms"], row["tpot_ms"], strict=True)
    return [a <= ttft_ms and b <= tpot_ms for a, b in pairs] + [False] * row["failed"]


def hit_ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of the prompts' tokens, those that were cached; 0 where nobody said."""
    total = sum(sum(row["sources"].values()) for row in rows)
    return 1 - sum(row["sources"].get("computed", 0) for row in rows) / total if total else 0.0


def _verdict(metrics: Metrics, baseline: str, word: str) -> Metrics:
    """At how many points disaggregation has the lower P99 of JCT: its interval below the baseline's, or above; and what
    `auto` does there: the mean share of requests that it hands off."""
    wins = losses = compared = 0
    handed_off: dict[str, list[float]] = {"wins": [], "loses": []}
    ending = f"_jct_p99_vs_{baseline}_ratio"
    for key in metrics:
        mine = key.removesuffix(ending)
        head, _, arm = mine.rpartition("_")
        if mine == key or arm in (*BASELINES, "basic", "auto"):
            continue
        theirs = f"{head}_{baseline}"
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
    out = {f"{name}{word}_count": float(count) for name, count in counts.items()}
    for name, shares in handed_off.items():
        if shares:
            out[f"auto_hands_off_where_it_{name}{word}_ratio"] = sum(shares) / len(shares)
    return out
