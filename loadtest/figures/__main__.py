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
    """Draw all; exit status 0, also when there are no results yet: such a figure says what is missing, and why."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("target", nargs="?", type=Path, default=DRAWN)
    parser.add_argument("--only", default="", help="names of figures, by comma")
    parser.add_argument("--kinds", default="svg,png")
    options = parser.parse_args(argv)
    results = sheet.Results(options.results)
    wanted = options.only.split(",") if options.only else [one.name for one in SHEETS]
    lines = []
    for one in SHEETS:
        if one.name in wanted:
            drawn = sheet.draw(one, results, options.target, options.kinds.split(","))
            lines.append(sheet.index_line(one, results, drawn))
            print(f"{one.name:24} {drawn}")
    if not options.only:
        (options.target / "index.md").write_text("# Figures\n\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
