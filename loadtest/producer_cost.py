"""Figures of bench_producer_cost.py from its samples. Pure."""

import statistics
from collections.abc import Sequence
from typing import Any

from loadtest.results import Metrics, Samples, quantile

MODES = ("budget", "full")
MAIN = ("engine", "diffusion", "audio")  # whose worst is the headline; tp4 needs five GPUs
MODEL_UNITS = ("images", "clips")  # of producers that are no engine
GIB = 1 << 30


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the bench. `full_...`: with the budget off. Medians over rounds, spreads beside them. The headline is of
    rounds with a budget, of a producer that has none of rounds without. The first round of a model whose windows did
    not begin with a batch that is not counted is left out: its first one, with the loan off, was cold.

    Raises: ValueError without a round of one of MAIN.
    """
    out = metrics_so_far(samples)
    if "throughput_ratio" not in out:
        raise ValueError(f"no rounds of any of {', '.join(MAIN)}")
    return out


def metrics_so_far(samples: Samples) -> Metrics:
    """The same of what there is."""
    out: Metrics = {}
    rounds = [s for s in samples if s["kind"] == "round"]
    for producer in dict.fromkeys(s["producer"] for s in rounds):
        for mode in MODES:
            mine = [s for s in rounds if (s["producer"], s["mode"]) == (producer, mode) and not _is_cold(s)]
            if mine:
                name = f"{producer}_full" if mode == "full" else producer
                out |= {f"{name}_{key}": value for key, value in _of_rounds(mine).items()}
    held: Metrics = {}
    for one in MAIN:
        for suffix in ("_full", ""):
            if (ratio := out.get(f"{one}{suffix}_throughput_ratio")) is not None:
                held[one] = ratio
    if held:
        out["throughput_ratio"] = min(held.values())
    full = [ratio for one in MAIN if (ratio := out.get(f"{one}_full_throughput_ratio")) is not None]
    if full:
        out["full_throughput_ratio"] = min(full)
    alone = [s["bytes"] / s["seconds"] / 1e9 for s in samples if s["kind"] == "ceiling"]
    if alone:
        out["copy_alone_gb_per_s"] = max(alone)  # a first second maps what it copies to
    reclaims = [s for s in samples if s["kind"] == "reclaim"]
    return out | (_of_reclaims(reclaims) if reclaims else {})


def _is_cold(sample: Any) -> bool:
    is_model = sample["unit"] in MODEL_UNITS
    return is_model and sample["round"] == 0 and not sample["off"].get("is_warm", False)


def _of_rounds(rounds: Sequence[Any]) -> Metrics:
    """Of one producer in one mode."""
    rates = {arm: [s[arm]["items"] / s[arm]["seconds"] for s in rounds] for arm in ("off", "on")}
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    out: Metrics = {
        "throughput_ratio": statistics.median(ratios),
        "throughput_worst_ratio": min(ratios),
        "throughput_best_ratio": max(ratios),
        "rounds_count": len(rounds),
        "moved_gb_per_s": quantile([s["moved_bytes"] / s["moved_s"] / 1e9 for s in rounds], 0.5),
        "lent_gib": quantile([s["lent_bytes"] / GIB for s in rounds], 0.5),
    }
    unit = {"images": "count", "clips": "count", "steps": "count"}.get(rounds[0]["unit"], rounds[0]["unit"])
    for arm, values in rates.items():
        out[f"{arm}_{unit}_per_s"] = quantile(values, 0.5)
    for key in ("tpot_mean", "tpot_p99") if "tpot_mean_ms" in rounds[0]["on"] else ():
        for arm in ("off", "on"):
            out[f"{arm}_{key}_ms"] = quantile([s[arm][f"{key}_ms"] for s in rounds], 0.5)
        each = [s["on"][f"{key}_ms"] / s["off"][f"{key}_ms"] for s in rounds]
        out[f"{key}_ratio"] = quantile(each, 0.5)
    return out


def bound_s(sample: Any) -> float:
    """Of one reclaim: its bytes at the rate of the same copies alone, and one step of the engine."""
    return sample["bytes"] / (sample["copy_bytes"] / sample["copy_s"]) + sample["step_s"]


def _of_reclaims(samples: Sequence[Any]) -> Metrics:
    over = [s["seconds"] / bound_s(s) for s in samples]
    return {
        "reclaim_ms": quantile([1e3 * s["seconds"] for s in samples], 0.5),
        "reclaim_worst_ms": max(1e3 * s["seconds"] for s in samples),
        "reclaim_bound_ms": quantile([1e3 * bound_s(s) for s in samples], 0.5),
        "reclaim_step_ms": quantile([1e3 * s["step_s"] for s in samples], 0.5),
        "reclaim_over_bound_ratio": quantile(over, 0.5),
        "reclaim_over_bound_worst_ratio": max(over),
        "reclaim_copy_gb_per_s": quantile([s["copy_bytes"] / s["copy_s"] / 1e9 for s in samples], 0.5),
        "reclaim_gib": quantile([s["bytes"] / GIB for s in samples], 0.5),
        "reclaims_count": len(samples),
        "reclaim_lost_pages": sum(s["lost"] for s in samples),
    }
