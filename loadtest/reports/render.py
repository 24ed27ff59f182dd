"""Summaries as Markdown and as one HTML file that needs nothing else."""

import html
from collections.abc import Sequence
from pathlib import Path

from loadtest.outcomes import SOURCES, Run
from loadtest.reports import plots
from loadtest.reports.summary import METRICS, PERCENTILES, Interval, Slo, Summary, summarise

TITLES = {
    "distributions": "Distributions",
    "timeline": "Timeline: TTFT by when a request was sent; shaded: requests in flight",
    "sources": "Prompt tokens by where their KV came from",
}
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;color:#333;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #9db4c0;padding:.25em .6em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}small{color:#777}.bad{color:#c8553d}svg{max-width:100%;height:auto}"
)

Table = list[list[str]]


def write_report(runs: Sequence[Run], folder: Path, slo: Slo) -> list[Summary]:
    """report.md, report.html and the plots as .svg under `folder`. Raises: ValueError on no runs."""
    if not runs:
        raise ValueError("no runs")
    runs = told_apart(runs)
    summaries = [summarise(run, slo) for run in runs]
    drawn = plots.draw_all(runs, summaries, slo)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (folder / f"{name}.svg").write_text(text)
    (folder / "report.md").write_text(markdown(runs, summaries, list(drawn)))
    (folder / "report.html").write_text(page(runs, summaries, drawn))
    return summaries


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """A run that has the name of one before it gets a number behind it: `name (2)`."""
    taken: set[str] = set()
    found = []
    for run in runs:
        name, number = run.name, 1
        while name in taken:
            number += 1
            name = f"{run.name} ({number})"
        taken.add(name)
        found.append(Run({**run.head, "name": name}, run.outcomes))
    return found


def tables(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[tuple[str, Table]]:
    """(title, rows with the head first)."""
    slo = summaries[0].slo
    overview = [
        [
            "run",
            "requests",
            "failed",
            "not sent",
            "cut off",
            "requests/s",
            "output tokens/s",
            "goodput/s",
            "in the SLO",
            "hits",
            "of an infinite cache",
        ]
    ]
    overview += [
        [
            one.name, str(one.num_requests), str(one.num_failed), str(one.num_skipped), str(one.num_cut_off),
            f"{one.requests_per_s:.2f}", f"{one.output_tokens_per_s:.0f}", _interval(one.goodput, "{:.2f}"),
            _interval(one.slo_share, "{:.0%}"), _interval(one.hit, "{:.1%}"),
            "-" if one.hit_bound is None else f"{one.hit_bound:.1%}",
        ]
        for one in summaries
    ]  # fmt: skip
    found = [(f"Overview (SLO: TTFT {slo.ttft_ms:g} ms, TPOT {slo.tpot_ms:g} ms)", overview)]
    for metric in METRICS:
        if not any(metric in one.times for one in summaries):
            continue
        rows = [["run", "mean", *PERCENTILES]]
        for one in summaries:
            times = one.times.get(metric, {})
            form = "{:.2f}" if metric == "tpot_ms" else "{:.1f}"
            cells = [_interval(times[key], form) if key in times else "-" for key in ("mean", *PERCENTILES)]
            rows.append([one.name, *cells])
        found.append((f"{plots.LABELS[metric]} (ms)", rows))
    if any(one.sources for one in summaries):
        rows = [["run", *SOURCES]]
        rows += [
            [one.name, *(f"{one.sources[key]:.1%}" if one.sources else "-" for key in SOURCES)]
            for one in summaries
        ]
        found.append(("Hit rates by tier, % of prompt tokens (receipts)", rows))
    if any(one.predicted for one in summaries):
        rows = [["run", "p50", "p90"]]
        for one in summaries:
            cells = [
                _interval(one.predicted[key], "{:.0%}") if one.predicted else "-" for key in ("p50", "p90")
            ]
            rows.append([one.name, *cells])
        found.append(("Error of the scheduler's predicted TTFT (receipts)", rows))
    found.append(
        ("Runs", [["run", "workload", "rate/s", "seed", "server's model", "machine", "lag p99 (ms)"]])
    )
    for run, one in zip(runs, summaries, strict=True):
        head = run.head
        machine = head.get("machine") or {}
        where = ", ".join(dict.fromkeys(machine.get("gpu", []))) or str(machine.get("cpu", "-"))
        cells = [head.get(key, "-") for key in ("workload", "rate_per_s", "seed", "model")]
        found[-1][1].append([one.name, *(str(cell) for cell in cells), where, f"{one.lag_p99_ms:.1f}"])
    return found


def _interval(one: Interval, form: str) -> str:
    return f"{form.format(one.value)} [{form.format(one.low)}, {form.format(one.high)}]"


def warnings(summaries: Sequence[Summary]) -> list[str]:
    """What a reader must know before reading any figure."""
    found = []
    for one in summaries:
        if one.client_verdict:
            found.append(f"{one.name}: the client was the bottleneck: {one.client_verdict}")
        if one.is_cut_short:
            found.append(f"{one.name}: the run was cut short")
    return found


NOTE = (
    "In brackets: 95% intervals, bootstrap over requests; of shares in the SLO Wilson's. Times are the client's; "
    "what the run's end cut off counts only where it was late by then; "
    "percentiles by nearest rank."
)


def markdown(runs: Sequence[Run], summaries: Sequence[Summary], drawn: Sequence[str]) -> str:
    """report.md."""
    lines = ["# Load test", "", NOTE, ""]
    lines += [f"**{text}**\n" for text in warnings(summaries)]
    for title, rows in tables(runs, summaries):
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines += [f"## {title}", "", "| " + " | ".join(cells[0]) + " |", "|" + "---|" * len(cells[0])]
        lines += ["| " + " | ".join(row) + " |" for row in cells[1:]]
        lines.append("")
    lines += [f"![{TITLES[name]}]({name}.svg)\n" for name in drawn]
    return "\n".join(lines)


def page(runs: Sequence[Run], summaries: Sequence[Summary], drawn: dict[str, str]) -> str:
    """report.html."""
    out = [
        f"<!doctype html><meta charset=utf-8><title>Load test</title><style>{_STYLE}</style><h1>Load test</h1>"
    ]
    out.append(f"<p><small>{html.escape(NOTE)}</small></p>")
    out += [f"<p class=bad>{html.escape(text)}</p>" for text in warnings(summaries)]
    for title, rows in tables(runs, summaries):
        out.append(f"<h2>{html.escape(title)}</h2><table>")
        for number, row in enumerate(rows):
            tag = "td" if number else "th"
            out.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
        out.append("</table>")
    for name, text in drawn.items():
        out.append(f"<h2>{html.escape(TITLES[name])}</h2>{text}")
    return "\n".join(out) + "\n"
