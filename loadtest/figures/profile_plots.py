"""A profile's plots: AQUA's Figure 4 (requests in order), Figure 7b (memory by rate), Figures 3 and 7a (batches).

From the profile alone, as `quire profile` wrote it: the command draws them, and `make figures` does from result files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, SECOND, STYLE

GB = 1e9
Profile = Mapping[str, Any]  # the file's fields


def requests_in_order(profile: Profile) -> Figure:
    """TPOT and TTFT of each request, at the stable rate and one step above it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    slo = profile["settings"]["slo"]
    for colour, rate in zip((SECOND, ACCENT), sorted(profile["series"], key=float), strict=False):
        rows = profile["series"][rate]
        at_s = [row[0] for row in rows]
        left.plot(at_s, [row[2] for row in rows], ".", markersize=3, color=colour, label=f"{rate} requests/s")
        right.plot(
            at_s, [row[1] / 1000 for row in rows], ".", markersize=3, color=colour, label=f"{rate} requests/s"
        )
    left.set(xlabel="sent, s", ylabel="TPOT, ms", title="(a) time per output token")
    right.set(xlabel="sent, s", ylabel="TTFT, s", title="(b) time to first token")
    left.axhline(slo["tbt_ms"], color=INK, linestyle=":", linewidth=1)
    right.axhline(slo["ttft_ms"] / 1000, color=INK, linestyle=":", linewidth=1)
    right.legend()
    return figure


def memory_by_rate(profile: Profile) -> Figure:
    """Free KV memory, and the times of the SLO, of every run by its rate."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    runs = sorted(profile["runs"], key=lambda run: run["rate_per_s"])
    rates = [run["rate_per_s"] for run in runs]
    colours = [SECOND if run["kept"] else ACCENT for run in runs]
    slo = profile["settings"]["slo"]
    free = [(profile["pool_bytes"] - run["peak_kv_bytes"]) / GB for run in runs]
    axes[0].scatter(rates, free, c=colours, s=14)
    axes[0].set(ylabel="GB of KV memory free", ylim=(0, max(1e-9, profile["pool_bytes"] / GB * 1.05)))
    axes[0].axhline(profile["settings"]["threshold_bytes"] / GB, color=INK, linestyle=":", linewidth=1)
    answered = [(run, colour) for run, colour in zip(runs, colours, strict=True) if run["ttft_ms"] >= 0]
    for place, key in ((1, "ttft_ms"), (2, "tbt_ms")):
        points = [(run["rate_per_s"], max(1e-3, run[key])) for run, _ in answered]
        axes[place].scatter([x for x, _ in points], [y for _, y in points], c=[c for _, c in answered], s=14)
        axes[place].axhline(slo[key], color=INK, linestyle=":", linewidth=1)
        share = slo["ttft_share" if key == "ttft_ms" else "tbt_share"]
        axes[place].set(ylabel=f"P{100 * share:g} of {key.removesuffix('_ms').upper()}, ms", yscale="log")
    for one in axes:
        one.axvline(profile["stable_rate_per_s"], color=PALE, linewidth=1)
        one.set_xlabel("requests/s")
    return figure


def swap_by_burst(profile: Profile) -> Figure:
    """KV that a burst keeps alive, beside what there is."""
    figure, axes = plt.subplots(figsize=(5, 3.2))
    bursts = profile["bursts"]
    names = [f"{burst['factor']:g}x" for burst in bursts]
    axes.bar(
        names, [burst["demand_bytes"] / GB for burst in bursts], 0.6, color=PALE, label="if nobody waited"
    )
    bars = axes.bar(
        names, [burst["swap_bytes"] / GB for burst in bursts], 0.3, color=ACCENT, label="swap need"
    )
    axes.bar_label(bars, [f"{burst['swap_bytes'] / GB:.1f}" for burst in bursts], fontsize=7)
    axes.axhline(profile["pool_bytes"] / GB, color=INK, linestyle=":", linewidth=1, label="KV memory")
    axes.set(ylabel="GB", xlabel="burst, times the stable rate")
    axes.legend()
    return figure


def batches(profile: Profile) -> Figure:
    """Throughput and free memory by batch."""
    figure, left = plt.subplots(figsize=(5, 3.2))
    rows = profile["batches"]
    sizes = [row["batch"] for row in rows]
    left.plot(sizes, [row["items_per_s"] for row in rows], "o-", color=ACCENT, label="throughput")
    left.set(xscale="log", xlabel="batch", ylabel="items/s", ylim=(0, None))
    right = left.twinx()
    right.plot(sizes, [row["free_bytes"] / GB for row in rows], "s--", color=SECOND, label="free memory")
    right.set(ylabel="GB free", ylim=(0, None))
    return figure


def draw_all(profile: Profile, folder: Path) -> list[Path]:
    """Write what the profile has; SVG, the same profile gives the same bytes. Raises: OSError."""
    made = {}
    with plt.rc_context(STYLE | {"svg.hashsalt": "profile"}):
        if profile.get("series"):
            made["profile-requests"] = requests_in_order(profile)
        if profile.get("runs"):
            made["profile-rates"] = memory_by_rate(profile)
        if profile.get("bursts"):
            made["profile-bursts"] = swap_by_burst(profile)
        if profile.get("batches"):
            made["profile-batches"] = batches(profile)
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in made.items():
            figure.suptitle(f"{profile['model']}: {profile['source']}", fontsize=8, x=0.01, ha="left")
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
    return [folder / f"{name}.svg" for name in made]
