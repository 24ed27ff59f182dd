"""TokenWeave, Figures 1, 4 and 9 to 16: what communication costs, the fused kernel, steps in two parts."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import INK, Result, Sheet, grouped_bars

Series = dict[str, dict[int, float]]  # name: tokens: value
OURS = "ours"
WAYS = ("one_shot/", "two_shot/")
STOCKS = ("stock", "stock-fused")
SERVED = (*STOCKS, "fuse", "full")
DEFAULT_CHUNK = 2048
CUTS = {"whole": "no split", "equal": "equal halves", "smart": "smart splitting"}


def _panels(panels: Mapping[str, Series], ylabel: str, *, log: bool) -> Figure:
    """One a title: lines over tokens."""
    figure, row = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), squeeze=False)
    for axes, (title, series) in zip(row[0], panels.items(), strict=True):
        for name, values in series.items():
            axes.plot(list(values), list(values.values()), marker="o", markersize=3, label=name)
        _tokens_below(axes)
        axes.set(title=title, ylabel=ylabel)
        if log:
            axes.set_yscale("log")
        axes.legend()
    return figure


def _tokens_below(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")


def _kernel_times(result: Result) -> dict[int, dict[str, dict[int, dict[int, float]]]]:
    """world: who (the fused kernel's fastest way is "kernel"): SMs: tokens: us."""
    found: dict[int, dict[str, dict[int, dict[int, float]]]] = {}
    for row in result["samples"]:
        who = "kernel" if row["who"].startswith(WAYS) else row["who"]
        times = found.setdefault(row["world"], {}).setdefault(who, {}).setdefault(row["sms"], {})
        us = median(row["us"])
        times[row["tokens"]] = min(us, times.get(row["tokens"], us))
    return found


def kernel(result: Result) -> Figure | str:
    """Figure 4: the fused kernel and its rivals over the best rival's time."""
    panels: dict[str, Series] = {}
    for world, whos in sorted(_kernel_times(result).items()):
        rivals = {who: by_sms[0] for who, by_sms in whos.items() if who not in (OURS, "kernel")}
        if OURS not in whos or not rivals:
            continue
        best = {
            tokens: min(times[tokens] for times in rivals.values() if tokens in times)
            for tokens in whos[OURS][0]
            if any(tokens in times for times in rivals.values())
        }
        lines = {OURS: whos[OURS][0], **rivals}
        panels[f"TP {world}"] = {
            who: {tokens: best[tokens] / us for tokens, us in sorted(times.items()) if tokens in best}
            for who, times in lines.items()
        }
    if not panels:
        return "h200-fused-norm has no group with the kernel and a rival"
    figure = _panels(panels, "speed, times the best rival's", log=False)
    for axes in figure.axes:
        axes.axhline(1.0, color=INK, linestyle=":", linewidth=1)
    return figure


def few_sms(result: Result) -> Figure | str:
    """Figure 10: the kernel's time by SMs."""
    panels: dict[str, Series] = {}
    for world, whos in sorted(_kernel_times(result).items()):
        budgets = whos.get("kernel", {})
        if len(budgets) > 1:
            ordered = sorted(budgets, key=lambda sms: sms or 1000)
            panels[f"TP {world}"] = {
                f"{sms} SMs" if sms else "all SMs": dict(sorted(budgets[sms].items())) for sms in ordered
            }
    return _panels(panels, "us", log=True) if panels else "h200-fused-norm has no times by SMs"


def _step_times(result: Result) -> dict[str, dict[str, dict[int, float]]]:
    """shape and ranks: mode: tokens: median ms."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in result["samples"]:
        if row["kind"] == "step":
            times = found.setdefault(_group(row), {}).setdefault(row["mode"], {})
            times.setdefault(row["tokens"], []).append(row["ms"])
    return {
        group: {
            mode: {tokens: median(values) for tokens, values in sorted(times.items())}
            for mode, times in modes.items()
        }
        for group, modes in sorted(found.items())
    }


def _of_steps(
    wanted: tuple[str, ...], over: tuple[str, ...], ylabel: str
) -> Callable[[Result], Figure | str]:
    """Lines of some modes, as times the fastest of `over` at the same length."""

    def drawn(result: Result) -> Figure | str:
        panels: dict[str, Series] = {}
        for group, modes in _step_times(result).items():
            bases = [modes[mode] for mode in over if mode in modes]
            lines = {mode: modes[mode] for mode in wanted if mode in modes}
            if bases and lines:
                panels[group] = {
                    mode: {
                        tokens: min(base[tokens] for base in bases if tokens in base) / ms
                        for tokens, ms in times.items()
                        if any(tokens in base for base in bases)
                    }
                    for mode, times in lines.items()
                }
        return (
            _panels(panels, ylabel, log=False)
            if panels
            else f"h200-weave has no steps of {', '.join(wanted)}"
        )

    return drawn


def overhead(result: Result) -> Figure | str:
    """Figure 1: the share of a step that goes without communication."""
    panels: dict[str, Series] = {}
    for group, modes in _step_times(result).items():
        if "stock" in modes and "stock-alone" in modes:
            alone = modes["stock-alone"]
            panels[group] = {
                "stock": {t: 100 * (1 - alone[t] / ms) for t, ms in modes["stock"].items() if t in alone}
            }
    return (
        _panels(panels, "communication, % of a step", log=False)
        if panels
        else "h200-weave has no steps alone"
    )


def _group(row: Mapping[str, Any]) -> str:
    return f"{row['shape']}, {row['layers']} layers, TP {row['ranks']}"


def _rates(result: Result) -> dict[str, dict[str, dict[int, dict[str, float]]]]:
    """shape and ranks: workload: chunk: mode: tokens per second."""
    found: dict[str, dict[str, dict[int, dict[str, list[float]]]]] = {}
    for row in result["samples"]:
        if row["kind"] == "serving":
            chunks = found.setdefault(_group(row), {}).setdefault(row["workload"], {})
            modes = chunks.setdefault(row["step_tokens"], {})
            modes.setdefault(row["mode"], []).append(row["tokens"] / row["s"])
    return {
        group: {
            workload: {
                chunk: {mode: median(values) for mode, values in modes.items()}
                for chunk, modes in sorted(chunks.items())
            }
            for workload, chunks in workloads.items()
        }
        for group, workloads in sorted(found.items())
    }


def _bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], xlabel: str) -> Figure:
    """One a title: groups of bars, a colour for each mode."""
    figure, row = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), squeeze=False)
    for axes, (title, groups) in zip(row[0], panels.items(), strict=True):
        modes = [mode for mode in SERVED if any(mode in values for values in groups.values())]
        series = {mode: [values.get(mode) for values in groups.values()] for mode in modes}
        grouped_bars(axes, list(groups), series)
        axes.set(title=title, xlabel=xlabel, ylabel="tokens a second")
    return figure


def by_workload(result: Result) -> Figure | str:
    """Figure 12: throughput of each load in steps of vLLM's default chunk, or of the nearest one that was run."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for group, workloads in _rates(result).items():
        panels[group] = {
            workload: chunks[min(chunks, key=lambda chunk: abs(chunk - DEFAULT_CHUNK))]
            for workload, chunks in workloads.items()
        }
    return _bars(panels, "load") if panels else "h200-weave has no served requests"


def by_chunk(result: Result) -> Figure | str:
    """Figure 13: throughput by the tokens of a step."""
    panels = {
        f"{workload}: {group}": {str(chunk): modes for chunk, modes in chunks.items()}
        for group, workloads in _rates(result).items()
        for workload, chunks in workloads.items()
        if len(chunks) > 1
    }
    return (
        _bars(panels, "tokens of a step") if panels else "h200-weave has no requests served in several chunks"
    )


def ffn(result: Result) -> Figure | str:
    """Figure 9: the FFN in two parts over the FFN whole."""
    panels: dict[str, Series] = {}
    for row in sorted(
        (row for row in result["samples"] if row["kind"] == "ffn"), key=lambda row: row["tokens"]
    ):
        lines = panels.setdefault(f"{row['shape']}, a rank of TP {row['ranks']}", {})
        for cut, times in row["us"].items():
            if times:
                lines.setdefault(CUTS[cut], {})[row["tokens"]] = median(times) / median(row["us"]["whole"])
    return (
        _panels(panels, "time, times the whole's", log=False) if panels else "h200-weave has no FFN by itself"
    )


def _awaited(number: int, title: str, paper: str, reason: str) -> Sheet:
    return Sheet(
        f"tokenweave-{number:02}", f"TokenWeave Figure {number}: {title}", "", paper, "", reason=reason
    )


SHEETS = (
    Sheet(
        "tokenweave-01",
        "TokenWeave Figure 1: what communication costs",
        ours="stock vLLM's prefill steps against the same engine whose ranks add nothing up.",
        paper="up to 23% on 8 x H100 with NVLink SHARP; three models.",
        differs="one model's shape with few layers and random weights; no multicast, which makes it dearer.",
        needs=("h200-weave",),
        draw=overhead,
    ),
    Sheet(
        "tokenweave-04",
        "TokenWeave Figure 4: all-reduce and RMSNorm in one kernel",
        ours="speed at hidden 8192 in bf16 over the best of what is drawn beside it, each with a fused add and norm.",
        paper="up to 1.40 times all-reduce and norm, with multimem on 8 x H100.",
        differs="no multicast on either side; rivals without it; graphs are replayed, the L2 is not flushed.",
        needs=("h200-fused-norm",),
        draw=kernel,
    ),
    Sheet(
        "tokenweave-09",
        "TokenWeave Figure 9: smart splitting of the FFN",
        ours="one rank's FFN in two parts, one after the other, over the FFN whole.",
        paper="cuts that keep the waves' number spare short batches what equal halves cost.",
        differs="tiles are read from the kernels at run time, without tuning files; random weights.",
        needs=("h200-weave",),
        draw=ffn,
    ),
    Sheet(
        "tokenweave-10",
        "TokenWeave Figure 10: the fused kernel by SMs",
        ours="the faster of its engines at each size; rows of 8 MB and more.",
        paper="8 SMs are close to optimal, 4 for long sequences: the switch adds and distributes.",
        differs="no multicast: every SM carries the bytes of all ranks itself.",
        needs=("h200-fused-norm",),
        draw=few_sms,
    ),
    Sheet(
        "tokenweave-11",
        "TokenWeave Figure 11: prefill in two parts",
        ours="speed of a step over the faster of stock vLLM with and without its own fusion; `alone` adds nothing up.",
        paper="1.18 to 1.29 times vLLM with multimem on 8 x H100, often faster than without communication.",
        differs="few layers with random weights, the longest steps 32K tokens; no multicast.",
        needs=("h200-weave",),
        draw=_of_steps(("full", "fuse", "stock-alone"), STOCKS, "speed, times stock's"),
    ),
    Sheet(
        "tokenweave-12",
        "TokenWeave Figure 12: throughput of served requests",
        ours="prompts' and answers' tokens of requests asked at once, in steps of 2,048 tokens; stock vLLM beside.",
        paper="about 1.20 times on 8 x H100, of fixed lengths and of ShareGPT.",
        differs="lengths drawn from ShareGPT's published quantiles; one model's shape, few layers, no multicast.",
        needs=("h200-weave",),
        draw=by_workload,
    ),
    Sheet(
        "tokenweave-13",
        "TokenWeave Figure 13: throughput by chunk size",
        ours="the same requests in steps of 1K to 8K tokens; those from 1K on are cut where that costs few waves.",
        paper="1.15 to 1.26 times at chunks of 1K to 8K tokens, Llama-3.3-70B on 8 x H100.",
        differs="lengths drawn from ShareGPT's published quantiles; one model's shape, few layers, no multicast.",
        needs=("h200-weave",),
        draw=by_chunk,
    ),
    _awaited(14, "one layer beside TileLink", "TileLink loses at short sequences.",
             "not run by us: TileLink is not part of any serving engine (TokenWeave 4.1)."),
    _awaited(15, "NanoFlow", "NanoFlow recovers less of its own framework's communication.",
             "not run by us: NanoFlow is a serving engine of its own (TokenWeave 4.1)."),
    Sheet(
        "tokenweave-16",
        "TokenWeave Figure 16: fused only, and in two parts",
        ours="one eager engine in its modes, speed over the mode off (vLLM's own operations).",
        paper="fuse-only gains by less norm and fewer passes over memory, two parts gain the rest.",
        differs="few layers with random weights; no multicast.",
        needs=("h200-weave",),
        draw=_of_steps(("full", "fuse", "alone"), ("off",), "speed, times off's"),
    ),
)  # fmt: skip
