"""When to stop asking a server that does not answer in time."""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """CLOSED -(max_failures in a row)-> OPEN -(a probe is answered)-> CLOSED.

    While it is open nobody asks; a probe that costs no request is due every probe_interval_ms, doubling
    up to max_interval_ms while it fails.
    """

    max_failures: int = 3
    probe_interval_ms: int = 250
    max_interval_ms: int = 2_000
    num_failures: int = 0  # in a row
    is_open: bool = False
    _interval_ms: int = 0
    _probe_at_ms: int = 0

    def on_success(self) -> None:
        """A call or a probe was answered in time."""
        self.num_failures = 0
        self.is_open = False

    def on_failure(self, *, now_ms: int) -> None:
        """A call or a probe failed."""
        self.num_failures += 1
        if self.is_open:
            self._interval_ms = min(self.max_interval_ms, 2 * self._interval_ms)
        elif self.num_failures >= self.max_failures:
            self.is_open = True
            self._interval_ms = self.probe_interval_ms
        self._probe_at_ms = now_ms + self._interval_ms

    def probe_due(self, *, now_ms: int) -> bool:
        """Whether to probe now; the next one is due an interval later."""
        if not self.is_open or now_ms < self._probe_at_ms:
            return False
        self._probe_at_ms = now_ms + self._interval_ms
        return True
