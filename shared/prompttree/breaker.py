"""When to stop asking a server that does not answer in time."""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """CLOSED -(max_failures in a row)-> OPEN -(a call or a probe is answered)-> CLOSED.

    While it is open nobody asks; whoever opened it probes every probe_interval_ms, doubling up to max_interval_ms
    while that fails. Requests must not be what probes: they look whether it is open, and stay away.
    """

    max_failures: int = 3
    probe_interval_ms: int = 250
    max_interval_ms: int = 2_000
    num_failures: int = 0  # in a row
    is_open: bool = False
    _interval_ms: int = 0

    @property
    def wait_ms(self) -> int:
        """Until the next probe, from the last failure on; 0 while it is closed."""
        return self._interval_ms if self.is_open else 0

    def on_success(self) -> None:
        """A call or a probe was answered in time."""
        self.num_failures = 0
        self.is_open = False

    def on_failure(self) -> bool:
        """A call failed. Returns whether that opened it: calls that were under way then say nothing new."""
        self.num_failures += 1
        if self.is_open or self.num_failures < self.max_failures:
            return False
        self.is_open = True
        self._interval_ms = self.probe_interval_ms
        return True

    def on_probe_failure(self) -> None:
        """A probe failed."""
        self._interval_ms = min(self.max_interval_ms, 2 * self._interval_ms)
