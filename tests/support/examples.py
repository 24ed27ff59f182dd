"""How many examples a random test draws."""

import math
import os

SHARE = float(os.environ.get("TEST_EXAMPLES") or 1)


def examples(whole: int) -> int:
    """So many in `make test`; the share TEST_EXAMPLES of them where it is set, rounded up (`make check`: a quarter)."""
    return math.ceil(whole * SHARE)
