"""What a worker says its model is off by, and how long that is believed."""

import math
from dataclasses import dataclass

CORRECTIONS = (0.1, 10.0)  # what a worker may say of its own model
CORRECTION_HALF_LIFE_MS = 10_000


@dataclass(slots=True)
class Fading:
    """A correction that nothing has confirmed for a while counts less and less.

    Otherwise an instance that was slow once, perhaps because of a neighbour, would not be asked again and so could
    never show that it is as fast as before.
    """

    said: float = 1.0
    num_measured: int = 0
    at_ms: int = 0

    def now(self, said: float, num_measured: int, now_ms: int) -> float:
        """What to multiply by. A worker that measures nothing new says the same count, though perhaps a smaller value,
        as its old measurements count for less; of one that says no count another value is measured.
        """
        if num_measured != self.num_measured or (not num_measured and said != self.said):
            self.at_ms = now_ms
        self.said, self.num_measured = said, num_measured
        faded = 0.5 ** ((now_ms - self.at_ms) / CORRECTION_HALF_LIFE_MS)
        return 1.0 + (_correction(said) - 1.0) * faded


def _correction(value: float) -> float:
    """It comes from a socket."""
    low, high = CORRECTIONS
    return min(high, max(low, value)) if math.isfinite(value) else 1.0
