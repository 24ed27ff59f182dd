"""TokenWeave, Figures 1, 4 and 9 to 16: what communication costs, the fused kernel, steps in two parts."""

from collections.abc import Callable, Mapping
from statistics import median

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import INK, Result, Sheet

Series = dict[str, dict[int, float]]  # name: tokens: value
OURS = "ours"
WAYS = ("one_shot/", "two_shot/")
STOCKS = ("stock", "stock-fused")


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
            group = f"{row['shape']}, {row['layers']} layers, TP {row['ranks']}"
            times = found.setdefault(group, {}).setdefault(row["mode"], {})
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


def _awaited(number: int, title: str, paper: str, reason: str) -> Sheet:
    return Sheet(
        f"tokenweave-{number:02}", f"TokenWeave Figure {number}: {title}", "", paper, "", reason=reason
    )


TRACES = "h200-weave times single steps; served traces with steps in two parts are in no script yet."
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
    _awaited(9, "smart splitting of the FFN", "cuts that keep the waves' number spare short batches what equal "
             "halves cost.", "no script times the FFN by itself; the cut's waves are proven by tests of shared/weave."),
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
    _awaited(12, "throughput of traces", "up to 1.26 times.", TRACES),
    _awaited(13, "throughput by chunk size", "gains at chunks of 1K to 8K tokens.", TRACES),
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
