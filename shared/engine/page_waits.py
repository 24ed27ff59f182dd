"""How long a request waits for its pages: what a setting says, or as long as computing them would take.

Who waits as long as the other way costs, then takes it, pays at most twice the better of the two, however long the
pages would have taken (Karlin et al., Competitive Snoopy Caching, 1988: rent or buy). A bound of its own would end what
eq 2 decided: over 5 GB/s 65,536 tokens of an 8B model are there in 1.7 s, and computed in 3.3.
"""

from collections.abc import Callable

from shared.engine.worker_config import WorkerSettings

MOST_MS = 30_000  # the mempool waits no longer for anything: its max_wait_ms
ComputeMs = Callable[[int, int], float]  # of a prompt of so many tokens, of which so many are cached


def unknown(_num_tokens: int, _cached_tokens: int) -> float:
    """Of an engine without a cost model."""
    return 0.0


class PageWaits:
    """Of one worker. Args: compute_ms: as its cost model predicts it now; 0.0: it has none."""

    def __init__(self, settings: WorkerSettings, compute_ms: ComputeMs = unknown) -> None:
        self._settings = settings
        self._compute_ms = compute_ms

    def fetch_ms(self, num_tokens: int, fetched_tokens: int) -> int:
        """For so many tokens of a prompt that the scheduler wants fetched."""
        saved_ms = self._compute_ms(num_tokens, 0) - self._compute_ms(num_tokens, fetched_tokens)
        return _within(self._settings.fetch_wait_ms, saved_ms)

    def handoff_ms(self, num_tokens: int) -> int:
        """For a prompt that another instance has computed."""
        return _within(self._settings.handoff_wait_ms, self._compute_ms(num_tokens, 0))


def _within(least_ms: int, worth_ms: float) -> int:
    return max(least_ms, min(MOST_MS, int(worth_ms)))
