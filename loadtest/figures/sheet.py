"""One figure: which result files it needs, how it is drawn, what is said below it; a placeholder where one is missing.

A caption has three parts: what is ours and how it was got, what the paper shows, and what differs between the two.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.results import load_result

Result = dict[str, Any]
HEAD = {"name", "commit", "date", "machine", "samples"}  # of every result
INK, PALE, ACCENT, SECOND, THIRD = "#333333", "#9db4c0", "#c8553d", "#4b6c5a", "#d9a441"
COLOURS = (ACCENT, PALE, SECOND, THIRD, "#6d6875", "#7fb069")
CAPTION_COLUMNS = 130
STYLE: Any = {  # matplotlib names its keys by a literal type
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.prop_cycle": cycler(color=COLOURS),
}


class Results:
    """Result files of a folder, read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Result | None] = {}
        self._wrong: dict[str, str] = {}

    def get(self, name: str) -> Result | None:
        """None when there is no such file, or it cannot be read: see why_lacking()."""
        if name not in self._read:
            path = self._folder / f"{name}.json"
            self._read[name] = None
            try:
                found = load_result(path) if path.is_file() else None
                if found is not None and not (isinstance(found, dict) and found.keys() >= HEAD):
                    raise ValueError(f"{path.name} is no result")
                self._read[name] = found
            except (ValueError, OSError) as error:
                self._wrong[name] = str(error)
        return self._read[name]

    def why_lacking(self, names: Sequence[str], reason: str = "") -> str:
        """Of those that get() has not: what is wrong with their files, else the reason, else how they are measured."""
        if wrong := [self._wrong[name] for name in names if name in self._wrong]:
            return "; ".join(wrong)
        return reason or f"no result file {', '.join(names)} yet: `make measure NAME={names[0]}`"


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is drawn, and from what.

    needs: all of these result files; without one of them `reason` is drawn. No `draw`: nothing is measured yet.
    also: files that are drawn where they exist.
    draw: gets the results in that order; a text instead of a figure says what the files lack.
    """

    name: str
    title: str
    ours: str
    paper: str
    differs: str
    needs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    draw: Callable[..., Figure | str] | None = None
    reason: str = ""

    @property
    def caption(self) -> str:
        """For people."""
        parts = [("Ours", self.ours), ("Paper", self.paper), ("Differs", self.differs)]
        return " ".join(f"{head}: {text}" for head, text in parts if text)


def draw(sheet: Sheet, results: Results, target: Path, kinds: Sequence[str] = ("svg", "png")) -> str:
    """Write the files; "drawn", or why it is a placeholder. The same results give the same bytes."""
    found = {name: results.get(name) for name in (*sheet.needs, *sheet.also)}
    lacking = [name for name in sheet.needs if found[name] is None]
    why = ""
    with plt.rc_context(STYLE | {"svg.hashsalt": sheet.name}):
        if sheet.draw is None or lacking:
            why = results.why_lacking(lacking, sheet.reason)
            figure = placeholder(why)
        else:
            made = sheet.draw(*(found[name] for name in (*sheet.needs, *sheet.also)))
            why = made if isinstance(made, str) else ""
            figure = placeholder(made) if isinstance(made, str) else made
        figure.suptitle(sheet.title, fontsize=10, x=0.01, ha="left")
        used = [result for result in found.values() if result is not None and not why]
        _write_below(figure, sheet.caption, [origin(result) for result in used])
        target.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            dated = {"svg": {"Date": None}, "png": {"Software": None}}.get(kind)
            figure.savefig(target / f"{sheet.name}.{kind}", metadata=dated, dpi=150)
        plt.close(figure)
    return f"not measured: {why}" if why else "drawn"


def index_line(sheet: Sheet, results: Results, drawn: str) -> str:
    """A line of the list of figures."""
    files = ", ".join(name for name in (*sheet.needs, *sheet.also) if results.get(name) is not None)
    source = f"; from {files}" if files else ""
    return f"- [{sheet.name}]({sheet.name}.svg) {sheet.title} ({drawn}{source}). {sheet.caption}"


def origin(result: Result) -> str:
    """Machine, commit and day of a result."""
    found = cards(result)
    where = ", ".join(found) or result["machine"]["cpu"]
    if len(found) > 1:
        where += " (by point)"
    return f"{result['name']}: {where}, {result['commit'][:10]}, {result['date'][:10]}"


def cards(result: Result) -> list[str]:
    """Names of the GPUs that it was measured on: what samples of several machines say for themselves, else the file."""
    samples = result.get("samples")
    rows = [row for row in samples if isinstance(row, dict)] if isinstance(samples, list) else []
    of_samples = dict.fromkeys(card for row in rows for card in row.get("cards") or ())
    return list(of_samples or dict.fromkeys(result["machine"].get("gpu") or ()))


def placeholder(reason: str) -> Figure:
    """A figure that only says why there is none."""
    figure, axes = plt.subplots(figsize=(8, 2.6))
    axes.axis("off")
    text = "\n".join(textwrap.wrap(f"Not measured: {reason}", 90))
    axes.text(
        0.5,
        0.5,
        text,
        ha="center",
        va="center",
        color=INK,
        bbox={"facecolor": "#f2efe9", "edgecolor": PALE, "pad": 8},
    )
    return figure


def _write_below(figure: Figure, caption: str, origins: Sequence[str]) -> None:
    """Make room under the axes for the caption and where the figures come from."""
    columns = int(CAPTION_COLUMNS * figure.get_figwidth() / 8)
    lines = textwrap.wrap(caption, columns) + textwrap.wrap("; ".join(origins), columns)
    extra = 0.14 * len(lines) + 0.1  # inches
    height = figure.get_figheight() + extra
    figure.set_figheight(height)
    figure.tight_layout(rect=(0, extra / height, 1, 0.98))
    figure.text(0.01, 0.05 / height, "\n".join(lines), fontsize=6.5, color=INK, va="bottom", linespacing=1.3)


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], form: str = "{:.0f}"
) -> None:
    """Bars side by side, one colour a series; None leaves a gap that says so."""
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(groups))]
        shown = [value or 0.0 for value in values]
        bars = axes.bar(places, shown, width, label=name)
        said = ["-" if v is None else form.format(v) for v in values]
        is_narrow = (
            len(groups) * len(series) * max(map(len, said), default=0) > 50
        )  # labels would run into each other
        axes.bar_label(bars, said, fontsize=6, rotation=90 if is_narrow else 0, padding=2 if is_narrow else 0)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.2)
    axes.legend(loc="lower left", frameon=True, framealpha=0.9, fontsize=7)


def table(rows: Sequence[Sequence[str]], head: Sequence[str], width: float = 8) -> Figure:
    """A table as a figure."""
    figure, axes = plt.subplots(figsize=(width, 0.6 + 0.24 * len(rows)))
    axes.axis("off")
    drawn = axes.table(
        cellText=[list(row) for row in rows], colLabels=list(head), loc="center", cellLoc="right"
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    drawn.scale(1, 1.25)
    drawn.auto_set_column_width(list(range(len(head))))
    for (row, column), cell in drawn.get_celld().items():
        cell.set_edgecolor(PALE)
        if row == 0:
            cell.set_text_props(weight="bold", wrap=True)
        if column == 0:
            cell.set_text_props(ha="left")
    return figure
