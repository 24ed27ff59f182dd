"""How many attempts may be repeated: a share of the requests and a small floor, as a token bucket. No I/O.

When an instance dies, its requests are placed again on those that are left. Without a bound, a cluster that loses
instances under load is asked for more and more work by its own gateways.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class RetryBudget:
    """Over any time: retries <= share * requests + floor_per_s * seconds + burst. One per gateway process.

    Args: share: of a retry that each request earns; floor_per_s: earned by time alone; burst: most that is saved, and
    what there is at the start: as many as one instance may hold (`overload_factor` times its sequences).
    """

    share: float = 0.2
    floor_per_s: float = 5.0
    burst: float = 1_024.0
    num_taken: int = 0
    num_refused: int = 0
    _saved: float = -1.0  # until the first call
    _at_ms: int = 0

    def on_request(self, now_ms: int) -> None:
        """A request has come."""
        self._earn(now_ms, self.share)

    def take(self, now_ms: int) -> bool:
        """Whether one attempt may be repeated now; if so it is spent."""
        self._earn(now_ms, 0.0)
        if self._saved < 1.0:
            self.num_refused += 1
            return False
        self._saved -= 1.0
        self.num_taken += 1
        return True

    @property
    def left(self) -> float:
        """Retries that could be taken at once."""
        return self.burst if self._saved < 0 else self._saved

    def _earn(self, now_ms: int, more: float) -> None:
        if self._saved < 0:
            self._saved, self._at_ms = self.burst, now_ms
        elapsed_ms = max(0, now_ms - self._at_ms)
        self._at_ms = max(self._at_ms, now_ms)
        self._saved = min(self.burst, self._saved + more + self.floor_per_s * elapsed_ms / 1000)
