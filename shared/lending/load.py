"""What is known of a space's load: arrivals, queue and memory over the last while. No I/O."""

from collections import deque
from dataclasses import dataclass

MAX_READINGS = 4_096


@dataclass(frozen=True, slots=True)
class Load:
    """A reading of one space: all of its engines together, as they reported last.

    Args:
        total_bytes: of its pages that have memory.
        needed_bytes: held by running requests.
        least_bytes: what the longest possible request needs.
        num_waiting: requests in front of the engines.
        num_arrived: requests since their start; may begin anew when an engine does.
    """

    total_bytes: int
    needed_bytes: int
    least_bytes: int = 0
    num_waiting: int = 0
    num_arrived: int = 0


@dataclass(frozen=True, slots=True)
class _Reading:
    at_ms: int
    num_new: int  # arrived since the reading before
    num_waiting: int
    needed_bytes: int


class LoadWindow:
    """Readings of the last `peak_ms`. Cost: a pass over them for each question."""

    def __init__(self, window_ms: int, peak_ms: int) -> None:
        self._window_ms, self._keep_ms = window_ms, max(window_ms, peak_ms)
        self._peak_ms = peak_ms
        self._readings: deque[_Reading] = deque(maxlen=MAX_READINGS)
        self._num_arrived: int | None = None

    def add(self, load: Load, now_ms: int) -> None:
        """Readings come in order of time."""
        before, self._num_arrived = self._num_arrived, load.num_arrived
        num_new = max(0, load.num_arrived - before) if before is not None else 0
        self._readings.append(_Reading(now_ms, num_new, load.num_waiting, load.needed_bytes))
        while self._readings[0].at_ms < now_ms - self._keep_ms:
            self._readings.popleft()

    def clear(self) -> None:
        """What was read before says nothing any more."""
        self._readings.clear()
        self._num_arrived = None

    def num_arrived(self, now_ms: int) -> int:
        """Requests within the window."""
        return sum(x.num_new for x in self._readings if x.at_ms > now_ms - self._window_ms)

    def rate_per_s(self, now_ms: int) -> float:
        """Arrivals over the window, as if nothing had come before the first reading."""
        return self.num_arrived(now_ms) * 1_000 / self._window_ms

    def queue_growth(self, now_ms: int) -> int:
        """By how much the queue is longer than it was at its shortest within the window."""
        recent = [x.num_waiting for x in self._readings if x.at_ms > now_ms - self._window_ms]
        return recent[-1] - min(recent) if recent else 0

    def peak_bytes(self, now_ms: int) -> int:
        """The most that running requests held."""
        return max((x.needed_bytes for x in self._readings if x.at_ms > now_ms - self._peak_ms), default=0)
