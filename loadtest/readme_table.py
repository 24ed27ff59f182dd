"""The README's table of figures, from the result files: `python -m loadtest.readme_table` rewrites it."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from loadtest.readme_rows import ROWS
from loadtest.registry import RESULTS, ROOT

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
README = ROOT / "README.md"


def load(name: str) -> dict[str, Any] | None:
    """A result file, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def render() -> str:
    """Markdown between the marks."""
    lines = ["| what | measured | bar | file |", "|---|---|---|---|"]
    machines = set()
    for name, metric, what, form, bar in ROWS:
        found = load(name)
        if found is None or metric not in found["metrics"]:
            continue
        machine = found["machine"]
        machines.add(f"{machine.get('cpu', 'unknown CPU')}, {machine.get('num_cpus', '?')} cores")
        value = found["metrics"][metric]
        shown = form.format(value / (1 << 30) if metric.endswith("_bytes") else value)
        lines.append(f"| {what} | {shown} | {bar} | [{name}](loadtest/results/{name}.json) |")
    if len(lines) == 2:
        return "\n"
    return "\n" + "\n".join(lines) + "\n\nMachine: " + "; ".join(sorted(machines)) + ".\n"


def main(argv: Sequence[str]) -> int:
    """Rewrite the part of the README between the marks."""
    argparse.ArgumentParser(prog="python -m loadtest.readme_table", description=__doc__).parse_args(argv)
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(head + BEGIN + render() + END + tail)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
