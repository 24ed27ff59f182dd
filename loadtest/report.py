"""Reports of one or several runs side by side.

    python -m loadtest.report out/a.jsonl out/b.jsonl --out report/ [--slo-ttft-ms 2000 --slo-tpot-ms 100]

Writes report.html (one file, plots inside), report.md and the plots.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.outcomes import read_run
from loadtest.reports.summary import Slo, between, one_line


def main(argv: Sequence[str]) -> int:
    """0; 2 when a file is no run, or the report cannot be written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("report"))
    parser.add_argument("--slo-ttft-ms", type=float, default=2_000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0)
    parser.add_argument(
        "--from-s", type=float, default=0.0, help="only requests due from then on: no warm-up"
    )
    parser.add_argument("--to-s", type=float, default=math.inf, help="and before then")
    options = parser.parse_args(argv)
    try:
        runs = [between(read_run(path), options.from_s, options.to_s) for path in options.runs]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        from loadtest.reports.render import write_report
    except ImportError as missing:
        print(
            f"error: plots need matplotlib, of the extra `loadtest` (`make install` has it): {missing}",
            file=sys.stderr,
        )
        return 2
    try:
        summaries = write_report(runs, options.out, Slo(options.slo_ttft_ms, options.slo_tpot_ms))
    except OSError as error:
        print(f"error: --out {options.out}: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    for found in summaries:
        print(one_line(found))
    print(options.out / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
