"""`python -m loadtest.readme_table` rewrites the tables of figures in the README and docs/measured.md."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.readme_headlines import HEADLINES
from loadtest.readme_rows import ROWS
from loadtest.registry import RESULTS, ROOT

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
GPU = re.compile(r"NVIDIA (\S+).*")  # of "NVIDIA H100 80GB HBM3"
README, ALL = ROOT / "README.md", ROOT / "docs" / "measured.md"


def load(name: str) -> dict[str, Any] | None:
    """A result file, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def words(what: str, found: Mapping[str, Any]) -> str:
    """A row's words; {gpu}: the model that the result was measured on, in short."""
    names = dict.fromkeys(GPU.sub(r"\1", name) for name in found["machine"].get("gpu") or ())
    return what.replace("{gpu}", " and ".join(names) or "GPU")


def render(target: Path) -> str:
    """Markdown between the marks of README or ALL."""
    folder = "" if target == README else "../"
    lines = ["| what | measured | bar | file |", "|---|---|---|---|"]
    machines = set()
    for name, metric, what, form, bar in ROWS:
        found = load(name)
        if target == README and (name, metric) not in HEADLINES:
            continue
        if found is None or metric not in found["metrics"]:
            continue
        machine = found["machine"]
        machines.add(f"{machine.get('cpu', 'unknown CPU')}, {machine.get('num_cpus', '?')} cores")
        value = found["metrics"][metric]
        shown = form.format(value / (1 << 30) if metric.endswith("_bytes") else value)
        lines.append(
            f"| {words(what, found)} | {shown} | {bar} | [{name}]({folder}loadtest/results/{name}.json) |"
        )
    if len(lines) == 2:
        return "\n"
    return "\n" + "\n".join(lines) + "\n\nMachine: " + "; ".join(sorted(machines)) + ".\n"


def main(argv: Sequence[str]) -> int:
    """Rewrite the part of both between the marks."""
    argparse.ArgumentParser(prog="python -m loadtest.readme_table", description=__doc__).parse_args(argv)
    for target in (README, ALL):
        head, _, rest = target.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        target.write_text(head + BEGIN + render(target) + END + tail)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
