"""MemServe, Figures 8, 13 and 14: prefill and decode apart, what caching saves, how good the cost model is."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.bench_cost_model import BEST, arch_ms, truest
from loadtest.figures.caching import DRAWN_PANELS, through_the_cluster
from loadtest.figures.sheet import ACCENT, COLOURS, INK, PALE, Result, Sheet
from shared.costmodel.model import CostModel
from shared.costmodel.observation import predict
from shared.wire.cost import CostCoefficients

PANELS = (
    ("jct_mean_ms", "JCT, mean (s)", 1e-3),
    ("jct_p99_ms", "JCT, P99 (s)", 1e-3),
    ("ttft_mean_ms", "TTFT, mean (ms)", 1.0),
    ("ttft_p99_ms", "TTFT, P99 (ms)", 1.0),
    ("tpot_mean_ms", "TPOT, mean (ms)", 1.0),
    ("tpot_p99_ms", "TPOT, P99 (ms)", 1.0),
    ("goodput_requests_per_s", "goodput (requests/s)", 1.0),
)
TITLES = {"sharegpt": "ShareGPT-like", "loogle": "LooGLE-like", "react": "ReAct-like"}


def _arm_words(arm: str) -> str:
    pair, _, how = arm.partition("_")
    words = {"": "-CC", "basic": "", "auto": "-CC, free to choose"}
    own = {"colocated": "PD-CC (colocated)", "stock": "vLLM (colocated)"}
    return own.get(arm) or f"{pair.upper()}{words[how]}"


def end_to_end(result: Result) -> Figure:
    """A row for each workload and number of GPUs, a column for each metric, a line for each arm; bars: 95%."""
    found = [row for row in result["samples"] if row["kind"] == "point"]
    rows = sorted(
        {(row["gpus"], row["workload"]) for row in found}, key=lambda r: (r[0], [*TITLES].index(r[1]))
    )
    figure, grid = plt.subplots(len(rows), len(PANELS), figsize=(17, 2.2 * len(rows)), squeeze=False)
    arms = sorted({row["arm"] for row in found}, key=lambda arm: (arm != "colocated", arm))
    colours = {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(arms)}
    for (gpus, workload), axes_row in zip(rows, grid, strict=True):
        mine = [row for row in found if (row["gpus"], row["workload"]) == (gpus, workload)]
        for axes, (metric, words, scale) in zip(axes_row, PANELS, strict=True):
            for arm in (arm for arm in arms if any(row["arm"] == arm for row in mine)):
                rates = sorted({row["rate"] for row in mine if row["arm"] == arm})
                heads = [f"gpus{gpus}_{workload}_rate{rate:g}_{arm}".replace(".", "_") for rate in rates]
                _line(axes, result["metrics"], heads, rates, metric, scale, colours[arm], _arm_words(arm))
            axes.set(title=words, xlabel="requests/s of an instance")
            axes.set_ylim(0, 1.08 * axes.dataLim.y1)  # also where all points lie together
        axes_row[0].set_ylabel(f"{TITLES[workload]}, {3 if gpus == 4 else gpus} GPUs")
    for axes in grid[:, -1]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _line(
    axes: Axes,
    metrics: Mapping[str, float],
    heads: Sequence[str],
    rates: Sequence[float],
    metric: str,
    scale: float,
    colour: str,
    label: str,
) -> None:
    name, unit = (
        (metric.removesuffix("_ms"), "ms") if metric.endswith("_ms") else ("goodput", "requests_per_s")
    )
    values = [scale * metrics[f"{head}_{metric}"] for head in heads]
    spans = [[scale * metrics[f"{head}_{name}_{end}_{unit}"] for head in heads] for end in ("low", "high")]
    below = [max(0.0, value - low) for value, low in zip(values, spans[0], strict=True)]
    above = [max(0.0, high - value) for value, high in zip(values, spans[1], strict=True)]
    axes.errorbar(
        rates, values, yerr=[below, above], fmt="o-", markersize=3, capsize=2, color=colour, label=label
    )


def _fastest(rows: Sequence[Mapping[str, Any]], tokens: int) -> dict[float, float]:
    """Fastest round of single prompts of so many tokens: ms by cached ratio."""
    best: dict[float, float] = {}
    for row in rows:
        ((length, cached),) = row["prompts"]
        if length == tokens:
            ratio = cached / length
            best[ratio] = min(row["ms"], best.get(ratio, float("inf")))
    return best


def caching(serving: Result, result: Result, on_gpu: Result | None) -> Figure | str:
    """A row for each device through the cluster, (a) to (d); then the engines alone, by length, a panel for each."""
    singles = [
        row
        for row in result["samples"]
        if row["part"] in ("grid", "off") and row.get("kind") == "prefill" and row["tp"] == 1
    ]
    devices = sorted({row["device"] for row in singles})
    served = [("CPU", serving), *([("H200", on_gpu)] if on_gpu is not None else [])]
    figure, grid = plt.subplots(
        len(served) + 1, DRAWN_PANELS, figsize=(14, 3.0 * (len(served) + 1)), squeeze=False
    )
    for (words, each), row in zip(served, grid, strict=False):
        through_the_cluster(row, each, words)
    for axes in grid[-1][len(devices) :]:
        axes.axis("off")
    num_lines = 0
    for device, axes in zip(devices, grid[-1], strict=False):
        mine = [row for row in singles if row["device"] == device]
        lengths = sorted({row["prompts"][0][0] for row in mine})
        lines = {
            tokens: found for tokens in lengths if len(found := _fastest(mine, tokens)) > 2 and 0.0 in found
        }
        shades = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, max(1, len(lines))))
        for colour, (tokens, found) in zip(shades, lines.items(), strict=True):
            saved = [100 * (1 - found[ratio] / found[0.0]) for ratio in sorted(found)]
            axes.plot(
                [100 * r for r in sorted(found)],
                saved,
                "o-",
                markersize=3,
                color=colour,
                label=f"{tokens} tokens",
            )
        num_lines += len(lines)
        axes.axhline(0, color=INK, linewidth=0.5)
        axes.set(
            xlabel="cached, % of the prompt",
            ylabel="time saved, %",
            title=f"engine alone, by length, {device}",
        )
        axes.legend()
    if not num_lines:
        plt.close(figure)
        return "no prompt length of cost-model was measured with several shares cached"
    return figure


ERRORS = (
    ("prefill", "prompts: by operators"),
    ("arch", "prompts: fitted whole"),
    ("batch", "batches: by operators"),
    ("decode", "decode steps: by operators"),
    ("tp2_prefill", "prompts on 2 ranks: scaled"),
    ("tp2_arch", "prompts on 2 ranks: halved whole"),
)


def accuracy(result: Result) -> Figure:
    """(a) predicted against measured prompts, (b) errors of both models, from one rank to two."""
    devices = sorted({row["device"] for row in result["samples"]})
    figure, panels = plt.subplots(len(devices), 2, figsize=(10, 3.4 * len(devices)), squeeze=False)
    for device, (left, right) in zip(devices, panels, strict=True):
        rows = [row for row in result["samples"] if (row["device"], row["tp"]) == (device, 1)]
        model = next(row for row in rows if row["part"] == "model" and row["profile"] == BEST)
        cost = CostModel(msgspec.convert(model["coefficients"], CostCoefficients))
        seen = [one for one in truest(rows, "off") if one.kind == "prefill"]
        measured = [one.ms for one in seen]
        ways = (
            ([predict(cost, one) for one in seen], "o", 3, ACCENT, "by operators"),
            ([arch_ms(model, one) for one in seen], "x", 4, PALE, "fitted whole"),
        )
        for predicted, mark, size, color, label in ways:
            left.plot(measured, predicted, mark, markersize=size, color=color, label=label)
        ends = [min(measured), max(measured)]
        left.plot(ends, ends, ":", color=INK, linewidth=1)
        left.set(
            xscale="log",
            yscale="log",
            xlabel="measured, ms",
            ylabel="predicted, ms",
            title=f"(a) prompts, {device}",
        )
        left.legend()
        names = [
            (key, words) for key, words in ERRORS if f"{device}_{key}_median_error_ratio" in result["metrics"]
        ]
        for place, (key, _) in enumerate(names):
            median, p90 = (
                100 * result["metrics"][f"{device}_{key}_{share}_error_ratio"] for share in ("median", "p90")
            )
            colour = PALE if "arch" in key else ACCENT
            right.barh(place, p90, 0.7, color=colour, alpha=0.4)
            right.barh(place, median, 0.7, color=colour)
        right.set_yticks(range(len(names)), [words for _, words in names])
        right.invert_yaxis()
        right.axvline(10, color=INK, linestyle=":", linewidth=1)
        right.set(
            xlabel="relative error, %: median, p90 (pale); dotted: the bar",
            title=f"(b) {device}",
        )
    return figure


SHEETS = (
    Sheet(
        "memserve-08",
        "MemServe Figure 8: prefill and decode apart against colocated, with and without caching",
        ours="vLLM 0.26 in all; colocated, ours and plain vLLM, with prefix caching and chunked prefill; 8B shape, "
        "random weights; open loop, real answers in later turns; bars: 95% intervals over requests. "
        "CC: caching (PD-Caching-3), else PD-Basic.",
        paper="1P2D lowers JCT against PD by 30% on average and 42% at P99 (ShareGPT), caching by 17% and 29% more; "
        "LooGLE 10%, then 27%; ReAct 41% (its text says increases), then 27%.",
        differs="the paper's baseline is vLLM 0.4.0 without caching and chunked prefill, its model Llama2-13B on "
        "H800s; think time between turns is 1 s here, the paper states none; lengths follow published statistics.",
        needs=("h200-disaggregation",),
        draw=end_to_end,
    ),
    Sheet(
        "memserve-13",
        "MemServe Figure 13: what context caching saves",
        ours="time to the first token through gateway and cluster, one colocated worker, fastest round of each; below, "
        "single prompts on one engine alone, from the cost model's calibration grid.",
        paper="the saving grows with the cached share; longer prompts save more at the same share, and so do batches; "
        "from DRAM it pays from some share on.",
        differs="on CPU the engine is a small model, and both places of (d) are host memory, with a copy between them; "
        "what is cached is asked for just before, and evicted by hand in (d).",
        needs=("context-caching", "cost-model"),
        also=("h200-context-caching",),
        draw=caching,
    ),
    Sheet(
        "memserve-14",
        "MemServe Figure 14: cost model by operators and fitted whole",
        ours="prompts, batches and decode steps off the calibration grid, fastest round of each; two ranks are "
        "predicted from coefficients of one, but for what their all-reduces cost: that is fitted to lone decode steps "
        "and the longest prompt of the two ranks' own grid.",
        paper="the arch-level model is 20% less accurate than the operator-level one and scales worse with tensor "
        "parallelism.",
        differs="the paper's arch-level model is one polynomial, as ours; ours predicts batches and decode steps too.",
        needs=("cost-model",),
        draw=accuracy,
    ),
)
