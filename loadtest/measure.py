"""`make measure NAME=gateway-cpu`: measure again and write loadtest/results/NAME.json.

python -m loadtest.measure NAME [arguments of the measuring script]
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from loadtest.registry import MEASURES


def main(argv: Sequence[str]) -> int:
    """Exit status of the measuring script; 2 when there is none of that name."""
    if not argv or argv[0] not in MEASURES:
        near = difflib.get_close_matches(argv[0], MEASURES, n=1) if argv else []
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(MEASURES))}"
        print(f"usage: make measure NAME=...; {hint}", file=sys.stderr)
        return 2
    return importlib.import_module(MEASURES[argv[0]]).main(list(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
