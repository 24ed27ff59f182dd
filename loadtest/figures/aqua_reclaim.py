"""AQUA, Figure 12: a long prompt's throughput while its lender takes memory back and lends again."""

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures.sheet import ACCENT, INK, PALE, SECOND, Result, Sheet, grouped_bars
from loadtest.long_prompt_reclaim import ASIDE, AT, DRAM, PEER, PHASES, gaps, of_kind, reclaims, rows_of

GB = 1e9
BIN_S = 0.5
COLOURS = {"peer": ACCENT, "dram": PALE, "both": SECOND, "none": INK}


def _binned(result: Result, begin_s: float) -> tuple[list[float], list[float]]:
    """Middles of bins with outputs in them, and tokens/s there."""
    bins: dict[int, tuple[float, float]] = {}
    for at_s, took_s, count, _ in gaps(result["samples"]):
        number = int((at_s - begin_s) / BIN_S)
        seconds, tokens = bins.get(number, (0.0, 0.0))
        bins[number] = seconds + took_s, tokens + count
    numbers = sorted(number for number, (seconds, _) in bins.items() if seconds > 0)
    return [(n + 0.5) * BIN_S for n in numbers], [bins[n][1] / bins[n][0] for n in numbers]


def _mark(axes: Axes, result: Result, begin_s: float) -> None:
    """When the lender's load was doubled, and when it had its memory back."""
    loaded = [row for row in of_kind(result["samples"], "phase") if row["phase"] == "loaded"]
    for row in loaded:
        end_s = row["begin_s"] + row["seconds"]
        axes.axvspan(row["asked_s"] - begin_s, end_s - begin_s, color=PALE, alpha=0.25, linewidth=0)
    for one in reclaims(result["samples"]):
        axes.axvline(one["ended_s"] - begin_s, color=INK, linestyle=":", linewidth=1)


def elasticity(result: Result) -> Figure | str:
    """Figure 12: (a) where the far blocks lie, and what is lent; (b) tokens/s; (c) the lender beside itself alone."""
    course, tokens = rows_of(result["samples"], "course"), rows_of(result["samples"], "tokens")
    phases = {row["phase"]: row for row in of_kind(result["samples"], "phase")}
    if len(tokens) < 2 or not course or not phases:
        return "h200x2-long-prompt-reclaim has no course of a long prompt"
    begin_s, end_s = course[0][AT], tokens[-1][0]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.0), width_ratios=(4, 4, 3))
    at_s = [row[AT] - begin_s for row in course] + [end_s - begin_s]
    for column, label, colour in ((ASIDE, "lent or on offer", SECOND), (PEER, "read on the peer", ACCENT),
                                  (DRAM, "read in host memory", PALE)):  # fmt: skip
        values = [row[column] / GB for row in course]
        left.step(at_s, [*values, values[-1]], where="post", color=colour, label=label)
    left.set(xlabel="s", ylabel="GB", ylim=(0, None), title="(a) memory")
    left.legend()
    middle.plot(*_binned(result, begin_s), color=ACCENT)
    middle.set(xlabel="s", ylabel="tokens/s of the long prompt", ylim=(0, None), title="(b) the consumer")
    for axes in (left, middle):
        _mark(axes, result, begin_s)
        axes.set_xlim(0, end_s - begin_s)
    alone = {row["phase"]: row for row in of_kind(result["samples"], "alone")}
    names = [name for name in PHASES if name in phases]
    base = [alone.get(name.removesuffix("_again")) for name in names]
    series: dict[str, list[float | None]] = {
        "without lending": [row["items"] / row["seconds"] if row else None for row in base],
        "lending as it sees fit": [phases[name]["items"] / phases[name]["seconds"] for name in names],
    }
    grouped_bars(right, [name.replace("_", " ") for name in names], series, "{:.0f}")
    most = max((value for values in series.values() for value in values if value is not None), default=1.0)
    right.set(ylabel="tokens/s of the lender", title="(c) the lender", ylim=(0, 1.35 * most))
    right.legend(loc="upper left")
    return figure


SHEETS = (
    Sheet(
        "aqua-12",
        "AQUA Figure 12: memory lent, taken back, lent again",
        ours="8B shape with random weights on two GPUs; the lender decides by its own load when it lends; grey: eight "
        "times its clients, dotted: it has its memory again; one prompt of twice the consumer's KV memory throughout.",
        paper="Llama 3.1 8B lends to OPT-30B under FlexGen: 8 tokens/s with a peer's memory, a fall while the lender's "
        "traffic is doubled, and the same again when it is steady; up to 6 times the throughput without.",
        differs="model, GPU; the paper's engine stages layers, ours reads pages where they are; a minute in place of "
        "several, with shorter waits before memory is lent again.",
        needs=("h200x2-long-prompt-reclaim",),
        draw=elasticity,
    ),
)
