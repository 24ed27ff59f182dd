"""The batch at which a callable's throughput stops to grow: AQUA 4's way for image and audio models (Figures 3, 7a)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import SettingsError


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One batch size. used_bytes, free_bytes: of the device while it ran, at the peak."""

    batch: int
    items_per_s: float
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """gain: a doubled batch that brings less than this share more throughput has saturated. most: largest batch.

    Raises: SettingsError.
    """

    gain: float = 0.05
    most: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.gain < 1 or self.most < 1:
            raise SettingsError(
                f"gain must be between 0 and 1 and the largest batch at least 1, not {self.gain:g} and {self.most}; "
                "try 0.05 and 1024"
            )


class BatchSweep:
    """Doubles the batch until throughput saturates, memory ends, or the largest batch was run."""

    def __init__(self, limits: SweepLimits) -> None:
        self._limits = limits
        self._points: list[BatchPoint] = []
        self.reason = ""  # why it ended

    @property
    def points(self) -> Sequence[BatchPoint]:
        """In order of the batch."""
        return self._points

    def next_batch(self) -> int | None:
        """The batch to run now; None: the sweep has ended."""
        if self.reason:
            return None
        return min(self._limits.most, self._points[-1].batch * 2) if self._points else 1

    def record(self, point: BatchPoint) -> None:
        """What a batch did."""
        before = max((one.items_per_s for one in self._points), default=0.0)
        self._points.append(point)
        if before and point.items_per_s < before * (1 + self._limits.gain):
            self.reason = f"a batch of {point.batch} brings less than {self._limits.gain:.0%} more"
        elif point.batch >= self._limits.most:
            self.reason = f"{point.batch} is the largest batch that is tried"

    def out_of_memory(self, batch: int) -> None:
        """A batch found no room."""
        self.reason = f"a batch of {batch} found no room"

    def peak(self) -> BatchPoint:
        """The smallest batch within `gain` of the highest throughput. Raises: SettingsError when not even 1 ran."""
        if not self._points:
            raise SettingsError("not even a batch of 1 could be run: the callable needs a larger device")
        best = max(one.items_per_s for one in self._points)
        return next(one for one in self._points if one.items_per_s * (1 + self._limits.gain) >= best)
