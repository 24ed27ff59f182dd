"""Plots of several runs side by side: distributions, timelines, where prompt tokens came from. Drawn as SVG text."""

import io
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import COLOURS, STYLE
from loadtest.outcomes import SOURCES, Run
from loadtest.reports.summary import METRICS, Slo, Summary

LABELS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "jct_ms": "JCT"}
MAX_POINTS = 5_000  # of a scatter plot: more are thinned out, the same ones every time


def plain(name: str) -> str:
    """As Matplotlib draws it letter by letter: text between dollars would be a formula."""
    return name.replace("$", r"\$")


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element; the same figure gives the same text."""
    out = io.StringIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def draw_all(runs: Sequence[Run], summaries: Sequence[Summary], slo: Slo) -> dict[str, str]:
    """Every plot by name, as SVG."""
    with plt.rc_context(STYLE):
        found = {"distributions": distributions(runs, slo), "timeline": timeline(runs)}
        if any(one.sources for one in summaries):
            found["sources"] = sources(summaries)
        return {name: svg(figure, name) for name, figure in found.items()}


def distributions(runs: Sequence[Run], slo: Slo) -> Figure:
    """Cumulative distributions of TTFT, TPOT and JCT, one line a run; dotted: the SLO."""
    figure, every = plt.subplots(1, len(METRICS), figsize=(11, 3.2))
    limits = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
    for axes, metric in zip(every, METRICS, strict=True):
        for run in runs:
            ordered = sorted(v for one in run.outcomes if one.ok and (v := getattr(one, metric)) > 0)
            if ordered:
                shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
                axes.step(ordered, shares, where="post", label=plain(run.name), linewidth=1.3)
        if metric in limits:
            axes.axvline(limits[metric], color="#333333", linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel="ms", ylim=(0, 1), title=LABELS[metric])
    every[0].set_ylabel("share of requests")
    if every[-1].get_lines():
        every[-1].legend()
    figure.tight_layout()
    return figure


def timeline(runs: Sequence[Run]) -> Figure:
    """TTFT of every whole answer by when it was sent, and how many requests were in flight, whatever became of them; a
    row a run, on the same scales.
    """
    figure, rows = plt.subplots(
        len(runs), 1, figsize=(11, 0.6 + 2.1 * len(runs)), sharex=True, sharey=True, squeeze=False
    )
    twins = []
    for number, (run, (axes,)) in enumerate(zip(runs, rows, strict=True)):
        twins.append(_timeline_row(axes, run, COLOURS[number % len(COLOURS)]))
    top = max(twin.get_ylim()[1] for twin in twins)
    for twin in twins:
        twin.set_ylim(0, top)
    rows[-1][0].set_xlabel("s")
    figure.tight_layout()
    return figure


def _timeline_row(axes: Axes, run: Run, colour: str) -> Axes:
    good = [one for one in run.outcomes if one.ok]
    step = max(1, len(good) // MAX_POINTS)
    axes.scatter(
        [one.sent_ms / 1000 for one in good[::step]],
        [one.ttft_ms for one in good[::step]],
        s=7,
        color=colour,
        zorder=3,
    )
    failed = [one.due_ms / 1000 for one in run.outcomes if not one.ok]
    if failed:
        axes.scatter(
            failed, [1] * len(failed), marker="x", s=14, color="#333333", label=f"{len(failed)} failed"
        )
        axes.legend()
    axes.set(yscale="log", ylabel="TTFT (ms)", title=plain(run.name))
    sent = [
        one for one in run.outcomes if not one.skipped and one.jct_ms > 0
    ]  # older files have no end of failed ones
    changes = sorted([(one.sent_ms, 1) for one in sent] + [(one.ended_ms, -1) for one in sent])
    times, counts, now = [0.0], [0], 0
    for at_ms, change in changes:
        now += change
        times.append(at_ms / 1000)
        counts.append(now)
    twin = axes.twinx()
    twin.fill_between(times, counts, step="post", color="#bbbbbb", alpha=0.35, linewidth=0)
    twin.set_ylabel("in flight")
    axes.set_zorder(twin.get_zorder() + 1)
    axes.patch.set_visible(False)
    return twin


def sources(summaries: Sequence[Summary]) -> Figure:
    """Where the prompt tokens' KV came from, as the receipts say."""
    figure, axes = plt.subplots(figsize=(11, 0.9 + 0.38 * len(summaries)))
    left = [0.0] * len(summaries)
    rows = range(len(summaries))  # not names: bars of one name are drawn over each other
    for source, colour in zip(SOURCES, (*COLOURS[1:], COLOURS[0]), strict=True):
        shares = [one.sources.get(source, 0.0) * 100 for one in summaries]
        if any(shares):
            axes.barh(rows, shares, left=left, label=source, color=colour)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_yticks(rows, [plain(one.name) for one in summaries])
    axes.set(xlim=(0, 100), xlabel="% of prompt tokens")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.35), ncols=len(SOURCES))
    figure.tight_layout()
    return figure
