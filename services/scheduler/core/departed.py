"""Instances that said Goodbye: sources of what they held, never places. No I/O.

A mempool outlives its workers, keeps their sealed pages and publishes them in the prompt tree, under the names of those
that were there. So in a rolling restart what a worker computed is fetched, not computed again. Hits are the mempool's
own word: it withdraws them when it ends, and they expire when it dies.
"""

from typing import Protocol, TypeVar

from shared.ids import InstanceId

KEPT_MS = 600_000  # as long as a mempool keeps pages that no engine uses (its space_idle_ms)
MAX_DEPARTED = 1_024


class Known(Protocol):
    """An instance."""

    instance: InstanceId
    seen_at_ms: int


K = TypeVar("K", bound=Known)


class Departed(dict[InstanceId, K]):
    """By name, the ones that left last. Bounded: MAX_DEPARTED."""

    def add(self, known: K) -> None:
        """It said Goodbye."""
        self.pop(known.instance, None)
        self[known.instance] = known
        if len(self) > MAX_DEPARTED:
            del self[next(iter(self))]

    def find(self, name: InstanceId, *, now_ms: int) -> K | None:
        """As it was when it left."""
        known = self.get(name)
        return known if known is not None and now_ms - known.seen_at_ms < KEPT_MS else None
