"""How many more pages requests together will need at once. No I/O."""

from collections.abc import Iterable
from typing import NamedTuple


class Need(NamedTuple):
    """Of one request, in pages."""

    held: int  # that it has, or takes when it begins
    more: int  # that it still may need, one after the other


def growth_pages(needs: Iterable[Need], *, in_use: int) -> int:
    """Pages beyond those held at the worst moment ahead, where all grow alike and whoever ends gives its pages up.

    The future peak of Gong et al. (ASPLOS'25, "Past-Future Scheduler"): with the longest-lived first, when the i-th
    ends those before it have grown as much as it has.

    Args: in_use: what they hold together, pages that several hold counted once: those are not free at one's end.
    Cost: O(n log n).
    """
    found = sorted(needs, key=lambda need: -need.more)
    held = sum(need.held for need in found)
    own = min(1.0, in_use / held) if held else 1.0
    peak = alive = 0.0
    for number, need in enumerate(found, 1):
        alive += own * need.held
        peak = max(peak, alive + number * need.more)
    return max(0, int(peak - own * held + 0.999))
