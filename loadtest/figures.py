"""`make figures`: redraw every figure from the result files alone, as SVG and PNG under loadtest/figures/.

python -m loadtest.figures [RESULTS_FOLDER] [OUTPUT_FOLDER]
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.registry import RESULTS

FIGURES = RESULTS.parent / "figures"
Result = dict[str, Any]
INK, PALE, ACCENT = "#333333", "#9db4c0", "#c8553d"
SYSTEMS = {"": "Quire", "vllm_router_": "vllm-router", "litellm_": "LiteLLM"}


def gateway_cpu(result: Result) -> Figure:
    """CPU per request and per chunk beside the peers, and the added TTFT's distribution."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4))
    _bars(left, result, "cpu_us_per_request", "CPU per request (µs)", bar=600)
    _bars(middle, result, "cpu_us_per_chunk", "CPU per paced SSE chunk (µs)", bar=40)
    for sample in result["samples"]:
        if sample["series"] == "ttft":
            ordered = sorted(sample["ttft_ms"])
            shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
            name = {"quire": "Quire", "vllm_router": "vllm-router", "litellm": "LiteLLM"}.get(
                sample["system"], "no proxy"
            )
            right.plot(ordered, shares, label=f"{name}, {sample['rate_per_s']:.0f}/s", linewidth=1.4)
    right.set(xscale="log", xlabel="ms", title="Added TTFT at half load", ylim=(0, 1))
    right.axvline(5, color=ACCENT, linestyle=":", linewidth=1)
    right.legend(fontsize=7, frameon=False)
    return figure


def _bars(axes: Axes, result: Result, key: str, title: str, *, bar: float) -> None:
    values = {
        name: result["metrics"][prefix + key]
        for prefix, name in SYSTEMS.items()
        if prefix + key in result["metrics"]
    }
    shown = axes.bar(
        list(values), list(values.values()), color=[ACCENT, PALE, PALE][: len(values)], width=0.6
    )
    axes.bar_label(shown, fmt="%.0f", fontsize=8)
    axes.axhline(bar, color=INK, linestyle=":", linewidth=1)
    axes.set(title=title, yscale="log")


def cluster_footprint(result: Result) -> Figure:
    """Memory by service, of the run that held the most."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    worst = max(result["samples"], key=lambda sample: sum(sample["pss_bytes"].values()))["pss_bytes"]
    names = sorted(worst, key=lambda name: worst[name])
    shown = axes.barh(names, [worst[name] / 2**20 for name in names], color=PALE)
    axes.bar_label(shown, fmt="%.0f", fontsize=8, padding=2)
    total = sum(worst.values()) / 2**30
    axes.set(
        xlabel="PSS (MiB)", title=f"{total:.2f} GiB in all, ready in {result['metrics']['ready_s']:.1f} s"
    )
    return figure


DRAW: dict[str, Callable[[Result], Figure]] = {
    "gateway-cpu": gateway_cpu,
    "cluster-footprint": cluster_footprint,
}


def draw(path: Path, target: Path) -> list[Path]:
    """Files made from one result file; [] when no figure is drawn of it."""
    if path.stem not in DRAW:
        return []
    result = json.loads(path.read_text())
    # Fixed ids and no date: the same result file gives the same bytes.
    with plt.rc_context({"svg.hashsalt": path.stem, "axes.spines.top": False, "axes.spines.right": False}):
        figure = DRAW[path.stem](result)
        note = f"{result['machine']['cpu']}, {result['commit'][:10]}, {result['date'][:10]}"
        figure.text(0.995, 0.005, note, ha="right", va="bottom", fontsize=6, color=INK)
        figure.tight_layout()
        target.mkdir(parents=True, exist_ok=True)
        made = [target / f"{path.stem}.svg", target / f"{path.stem}.png"]
        figure.savefig(made[0], metadata={"Date": None})
        figure.savefig(made[1], dpi=160, metadata={"Software": None})
        plt.close(figure)
    return made


def main(argv: Sequence[str]) -> int:
    """Draw all; exit status 0, also when there are no results yet."""
    source = Path(argv[0]) if argv else RESULTS
    target = Path(argv[1]) if len(argv) > 1 else FIGURES
    for path in sorted(source.glob("*.json")):
        for made in draw(path, target):
            print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
