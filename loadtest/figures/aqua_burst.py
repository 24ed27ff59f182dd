"""AQUA, Figures 8, 9 and 13: a burst in three systems, a cached context reloaded from two places, long prompts."""

from collections.abc import Mapping
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, SECOND, THIRD, Result

SYSTEMS = {
    "fcfs": ("order of arrival", PALE),
    "cfs_dram": ("fair slices, host memory", THIRD),
    "cfs_peer": ("fair slices, peer GPU", ACCENT),
}
TIERS = {"peer": "peer GPU", "dram": "host memory"}
PARTS = {"reload": ACCENT, "queue": INK, "prefill": SECOND, "other": PALE}


def _bursts(result: Result, workload: str) -> dict[str, Mapping[str, Any]]:
    """The first seed that all systems have; {} when there is none."""
    rows = [
        row
        for row in result["samples"]
        if row["kind"] == "point" and (row["workload"], row["load"]) == (workload, "burst")
    ]
    for seed in sorted({row["seed"] for row in rows}):
        found = {row["system"]: row for row in rows if row["seed"] == seed}
        if set(found) >= set(SYSTEMS):
            return found
    return {}


def _in_order(result: Result, workload: str) -> Figure | str:
    found = _bursts(result, workload)
    if not found:
        return f"no seed of {workload} has a burst of all three systems"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for system, (label, colour) in SYSTEMS.items():
        row = found[system]
        order = range(len(row["at_ms"]))
        axes[0].plot(
            order, [value / 1000 for value in row["ttft_ms"]], color=colour, label=label, linewidth=1
        )
        axes[1].plot(order, row["tpot_ms"], color=colour, label=label, linewidth=1)
    begin = sum(at < found["fcfs"]["burst_from_ms"] for at in found["fcfs"]["at_ms"])
    for place, what in zip(axes, ("time to first token, s", "time per output token, ms"), strict=True):
        place.axvline(begin, color=INK, linestyle=":", linewidth=1)
        place.set(xlabel="request, in order of arrival", ylabel=what)
        place.set_ylim(bottom=0)
    axes[0].legend()
    return figure


def burst(result: Result) -> Figure | str:
    """Figure 8."""
    return _in_order(result, "sharegpt")


def long_burst(result: Result) -> Figure | str:
    """Figure 13."""
    return _in_order(result, "arxiv")


def reload(result: Result) -> Figure | str:
    """Figure 9a: where a time to first token goes; beside it plain copies of as many bytes."""
    metrics = result["metrics"]
    if not all(f"{tier}_ttft_ms" in metrics for tier in TIERS):
        return "one of the two places was not measured"
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), width_ratios=(3, 2))
    left = [0.0] * len(TIERS)
    for part, colour in PARTS.items():
        values = [max(0.0, metrics[f"{tier}_{part}_ms"]) for tier in TIERS]
        axes[0].barh(list(TIERS.values()), values, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes[0].set(xlabel="time to first token, ms")
    axes[0].legend()
    ours = [metrics[f"{tier}_reload_gb_per_s"] for tier in TIERS]
    plain = [metrics.get(f"{tier}_ceiling_gb_per_s", 0.0) for tier in TIERS]
    for shift, values, colour, label in ((-0.2, ours, ACCENT, "reload"), (0.2, plain, PALE, "plain copy")):
        bars = axes[1].bar([at + shift for at in range(len(TIERS))], values, 0.4, color=colour, label=label)
        axes[1].bar_label(bars, [f"{value:.0f}" for value in values], fontsize=7)
    axes[1].set_xticks(range(len(TIERS)), list(TIERS.values()))
    axes[1].set(ylabel="GB/s")
    axes[1].legend()
    return figure


def long_prompt(result: Result) -> Figure | str:
    """Figure 9b: decoding prompts longer than memory; beside it a step, and what it would take if the far pages were
    copied after everything else was done: a kernel reads far and near pages at the same time, and is faster.
    """
    metrics = result["metrics"]
    ratios = sorted(
        {row["ratio"] for row in result["samples"] if row.get("tier") in TIERS and "ratio" in row}
    )
    ratios = [
        ratio for ratio in ratios if all(f"x{ratio:g}_{tier}_tokens_per_s" in metrics for tier in TIERS)
    ]
    if not ratios:
        return "no length was measured in both places"
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), width_ratios=(3, 2))
    for shift, (tier, label), colour in zip((-0.2, 0.2), TIERS.items(), (ACCENT, PALE), strict=True):
        at = [place + shift for place in range(len(ratios))]
        rates = [metrics[f"x{ratio:g}_{tier}_tokens_per_s"] for ratio in ratios]
        steps = [metrics[f"x{ratio:g}_{tier}_step_ms"] for ratio in ratios]
        axes[0].bar_label(axes[0].bar(at, rates, 0.4, color=colour, label=label), fmt="%.3g", fontsize=7)
        axes[1].bar_label(axes[1].bar(at, steps, 0.4, color=colour), fmt="%.1f", fontsize=7)
        apart = [metrics.get(f"x{ratio:g}_{tier}_possible_step_ms") for ratio in ratios]
        for place, step_ms in zip(at, apart, strict=True):
            if step_ms is not None:
                axes[1].hlines(step_ms, place - 0.2, place + 0.2, color=INK, linestyle=":", linewidth=1)
    if "own_tokens_per_s" in metrics:
        axes[0].axhline(metrics["own_tokens_per_s"], color=INK, linestyle=":", linewidth=1, label="it fits")
    for place, what in zip(axes, ("tokens/s of one request", "ms a step"), strict=True):
        place.set_xticks(range(len(ratios)), [f"{ratio:g}x" for ratio in ratios])
        place.set(xlabel="prompt, times the engine's KV memory", ylabel=what)
    axes[0].legend()
    return figure
