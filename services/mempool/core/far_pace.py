"""When far blocks that lie in host memory go back to lent pages: the pace of one engine. No I/O.

    a reclaim --calm for pause_ms--> a few every EVERY_MS, while nothing else of far places or swaps moves
    a reclaim soon behind that: the next pause is twice as long, up to MAX_PAUSE_MS; a long stay: BASE_PAUSE_MS again

A lender that takes back and lends again in turn would otherwise have blocks copied both ways for nothing: a block pays
for its way by the steps that read it there. Source: AQUA 9.3 ("transparently moves the offloaded tensors back"), which
has no hysteresis.
"""

from dataclasses import dataclass

MAX_BACK = 32  # blocks of an engine that go back at once
BASE_PAUSE_MS, MAX_PAUSE_MS = 1_000, 64_000
LONG_STAY = 10  # a stay of so many pauses was worth its way
EVERY_MS = 50  # between two of them, and between two looks that find nothing to do


@dataclass(slots=True)
class Pace:
    """Times are the mempool's. `calm_at_ms`: nothing goes back before."""

    calm_at_ms: int = 0
    pause_ms: int = BASE_PAUSE_MS
    began_ms: int | None = None  # the first return since the last reclaim

    def taken(self, now_ms: int) -> None:
        """A lender wants blocks back. Said again of the same reclaim, it only is calm later."""
        if self.began_ms is not None:
            is_short = now_ms - self.began_ms < LONG_STAY * self.pause_ms
            self.pause_ms = min(2 * self.pause_ms, MAX_PAUSE_MS) if is_short else BASE_PAUSE_MS
            self.began_ms = None
        self.calm_at_ms = max(self.calm_at_ms, now_ms + self.pause_ms)

    def returned(self, now_ms: int) -> None:
        """Blocks are on their way back."""
        if self.began_ms is None:
            self.began_ms = now_ms
        self.later(now_ms)

    def later(self, now_ms: int) -> None:
        """Not before a while."""
        self.calm_at_ms = max(self.calm_at_ms, now_ms + EVERY_MS)


def num_back(num_free: int, num_lent: int) -> int:
    """Blocks that go back at once. Half of the places at which nothing is stay for reclaims and blocks that leave.

    Args: num_free: such places. num_lent: free pages that are lent to the engine's space.
    """
    return max(0, min(MAX_BACK, num_free // 2, num_lent))
