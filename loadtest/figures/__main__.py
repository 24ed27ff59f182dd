"""`make figures`: every figure as SVG and PNG, and their list with captions, under loadtest/figures/drawn/.

python -m loadtest.figures [RESULTS_FOLDER] [OUTPUT_FOLDER] [--only NAME,...] [--kinds svg,png]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.figures import (
    aqua,
    aqua_lending,
    aqua_reclaim,
    aqua_response,
    cluster,
    memserve,
    memserve_serving,
    pull_request,
    sheet,
    tokenweave,
    vattention,
    vattention_tables,
)
from loadtest.registry import RESULTS

KINDS = ("svg", "png", "pdf")
DRAWN = Path(__file__).parent / "drawn"
SHEETS = (
    *cluster.SHEETS,
    *memserve_serving.SHEETS,
    *memserve.SHEETS,
    *vattention.SHEETS,
    *vattention_tables.SHEETS,
    *aqua.SHEETS,
    *aqua_lending.SHEETS,
    *aqua_reclaim.SHEETS,
    *aqua_response.SHEETS,
    *tokenweave.SHEETS,
    *pull_request.SHEETS,
)


def main(argv: Sequence[str]) -> int:
    """Draw all; exit status 0, also when there are no results yet: such a figure says what is missing, and why.

    2: there is no such figure or kind, or nothing can be written.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("target", nargs="?", type=Path, default=DRAWN)
    parser.add_argument("--only", default="", help="names of figures, by comma")
    parser.add_argument("--kinds", default="svg,png")
    options = parser.parse_args(argv)
    known = [one.name for one in SHEETS]
    wanted, kinds = options.only.split(",") if options.only else known, options.kinds.split(",")
    try:
        _refuse_unknown("figure", wanted, known)
        _refuse_unknown("kind", kinds, KINDS)
        _draw(options, wanted, kinds)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _refuse_unknown(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises: ValueError."""
    if lacking := [name for name in names if name not in known]:
        raise ValueError(f"no {what} {', '.join(lacking)}; there are {', '.join(known)}")


def _draw(options: argparse.Namespace, wanted: Sequence[str], kinds: Sequence[str]) -> None:
    """Raises: OSError."""
    results = sheet.Results(options.results)
    lines = []
    for one in SHEETS:
        if one.name in wanted:
            drawn = sheet.draw(one, results, options.target, kinds)
            lines.append(sheet.index_line(one, results, drawn))
            print(f"{one.name:24} {drawn}")
    if not options.only:
        (options.target / "index.md").write_text("# Figures\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
