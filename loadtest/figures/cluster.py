"""Figures of no paper: the gateway's CPU beside its peers, the cluster's memory."""

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, Result, Sheet

NAMES = {
    "quire": "Quire, two stages",
    "quire_one_stage": "Quire, one stage",
    "vllm_router": "vllm-router",
    "litellm": "LiteLLM",
    "direct": "no proxy",
}
PREFIXES = {
    "quire": "",
    "quire_one_stage": "quire_one_stage_",
    "vllm_router": "vllm_router_",
    "litellm": "litellm_",
}


def gateway_cpu(result: Result) -> Figure:
    """CPU per request and per chunk beside the peers, and the added TTFT's distribution."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4))
    _bars(left, result, "cpu_us_per_request", "CPU per request (µs)", bar=600)
    _bars(middle, result, "cpu_us_per_chunk", "CPU per paced SSE chunk (µs)", bar=40)
    for sample in result["samples"]:
        if sample["series"] == "ttft":
            ordered = sorted(sample["ttft_ms"])
            shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
            name = NAMES.get(sample["system"], sample["system"])
            right.plot(ordered, shares, label=f"{name}, {sample['rate_per_s']:.0f}/s", linewidth=1.4)
    right.set(xscale="log", xlabel="ms", title="Added TTFT at the rate shown", ylim=(0, 1))
    right.axvline(5, color=INK, linestyle=":", linewidth=1, label="5 ms, the bar for one stage")
    right.legend(fontsize=7, frameon=False)
    return figure


def _bars(axes: Axes, result: Result, key: str, title: str, *, bar: float) -> None:
    values = {
        NAMES[system].replace(", ", ",\n"): result["metrics"][prefix + key]
        for system, prefix in PREFIXES.items()
        if prefix + key in result["metrics"]
    }
    shown = axes.bar(
        list(values),
        list(values.values()),
        color=[ACCENT if name.startswith("Quire") else PALE for name in values],
        width=0.6,
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


SHEETS = (
    Sheet(
        "gateway-cpu",
        "CPU of the gateway beside its peers",
        ours="CPU time of the gateway's process and added time to first token, with mock engines; dotted: the bars. "
        "Rates are half of what Quire takes with so many stages; peers' that of one stage, or half of their own.",
        paper="",
        differs="",
        needs=("gateway-cpu",),
        draw=gateway_cpu,
    ),
    Sheet(
        "cluster-footprint",
        "Memory of one prefill, one decode and everything else",
        ours="proportional set size of every process of `quire up` under load.",
        paper="",
        differs="",
        needs=("cluster-footprint",),
        draw=cluster_footprint,
    ),
)
