"""When leases of requests that wait end, because they are in each other's way. Decides; the scheduler does it.

A lease is only a help. Those of waiting requests may pin what the first of them needs, and it what they need.
Without its lease a request computes all of its prompt again: so one ends at a time, the last in the queue first, and
the next one when the pages of the one before would have come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

STALL_S = 0.1  # with nothing running for so long, waiting requests' leases are in each other's way
NEXT_S = 0.02  # the mempool answers with pages in a fraction of this


@dataclass(slots=True)
class LeaseStalls:
    """Of one engine."""

    _due_s: float | None = None  # of the next end, while nothing runs

    def runs(self) -> None:
        """A request runs, a step is under way, or nobody has a lease."""
        self._due_s = None

    def to_end(self, held: Sequence[str], now_s: float) -> str | None:
        """Nothing runs: whose lease ends now, if any.

        Args: held: requests that wait with a lease, in the order of the queue. now_s: of any steady clock.
        """
        if self._due_s is None:
            self._due_s = now_s + STALL_S
        if not held or now_s < self._due_s:
            return None
        self._due_s = now_s + NEXT_S
        return held[-1]
