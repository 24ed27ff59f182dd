"""MemServe's Figure 13 from what a cluster was measured to save: its four panels."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from loadtest.figures.sheet import COLOURS, INK, Result

Row = dict[str, Any]
Pick = Callable[[Row], bool]
DRAWN_PANELS = 4


def savings(rows: Sequence[Row], pick: Pick) -> tuple[list[float], list[float]]:
    """Cached share of the prompts in percent, and time saved in percent of the time with nothing cached."""
    best: dict[float, float] = {}
    for row in rows:
        if row["cached"] == 0 or pick(row):
            share = 100 * row["cached"] / row["tokens"]
            best[share] = min(row["ms"], best.get(share, float("inf")))
    shares = sorted(best)
    return shares, [100 * (1 - best[share] / best[0.0]) for share in shares]


def through_the_cluster(panels: Sequence[Axes], result: Result, device: str) -> None:
    """(a) prompt length, (b) batch, (c) block size, (d) place, into four axes."""
    rows: list[Row] = result["samples"]
    block = min(row["block_tokens"] for row in rows)
    plain = [row for row in rows if row["block_tokens"] == block]
    middle = next(row["tokens"] for row in rows if row["place"] == "dram")
    short = next(row["tokens"] for row in rows if row["batch"] > 1)
    _lines(panels[0], f"(a) by prompt length, {device}", [
        (f"{n} tokens", [row for row in plain if (row["tokens"], row["batch"]) == (n, 1)], "engine")
        for n in sorted({row["tokens"] for row in plain})
    ])  # fmt: skip
    _lines(panels[1], f"(b) prompts of {short} together, {device}", [
        (f"{n} at once", [row for row in plain if (row["tokens"], row["batch"]) == (short, n)], "engine")
        for n in sorted({row["batch"] for row in plain})
    ])  # fmt: skip
    alone = [row for row in rows if (row["tokens"], row["batch"]) == (middle, 1)]
    _lines(panels[2], f"(c) by block size, {middle} tokens, {device}", [
        (f"blocks of {n}", [row for row in alone if row["block_tokens"] == n], "engine")
        for n in sorted({row["block_tokens"] for row in rows})
    ])  # fmt: skip
    words = {"engine": "in the engine's pages", "dram": "in host memory behind"}
    _lines(panels[3], f"(d) by place, {middle} tokens, {device}", [
        (words[place], [row for row in alone if row["block_tokens"] == block], place) for place in ("engine", "dram")
    ])  # fmt: skip


def _lines(axes: Axes, title: str, lines: Sequence[tuple[str, Sequence[Row], str]]) -> None:
    for number, (label, rows, place) in enumerate(lines):
        if rows:
            shares, saved = savings(rows, lambda row, place=place: row["place"] == place)
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(shares, saved, "o-", markersize=3, color=colour, label=label)
    axes.axhline(0, color=INK, linewidth=0.5)
    axes.set(xlabel="cached, % of the prompt", ylabel="time saved, %", title=title)
    axes.legend()
