"""How many examples a random test draws."""

import math
import os

SHARE = float(os.environ.get("TEST_EXAMPLES") or 1)


def examples(whole: int) -> int:
    """So many in `make test`; the share TEST_EXAMPLES of them, rounded up, where it is set (`make check`: a half)."""
    return math.ceil(whole * SHARE)
