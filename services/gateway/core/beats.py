"""Which of a gateway's processes hang: those of which the event loop was heard and is no more. No I/O."""

BEAT_S = 1.0
SILENT_S = 30.0  # as long as the supervisor waits for a service that answers no probe
LOOK_S = 1.0
NO_BEATS = -1  # in the place of the descriptor into which they go
AWAY_AFTER_S = 2.0  # without a look: whoever looks stood still


class Beats:
    """Of the processes of one gateway, by number. Times are a monotonic clock's.

    A process counts from its first beat: before it it starts, which takes as long as it takes.
    """

    def __init__(self) -> None:
        self._heard_s: dict[int, float] = {}
        self._looked_s: float | None = None

    def heard(self, number: int, now_s: float) -> None:
        """It has beaten."""
        self._heard_s[number] = now_s

    def ended(self, number: int) -> None:
        """It is gone, or will be."""
        self._heard_s.pop(number, None)

    def silent(self, now_s: float) -> list[int]:
        """Those that hang. To be asked every LOOK_S at least, behind heard().

        Time in which the caller stood still (Ctrl-Z, a paused machine) was nobody's silence, but for LOOK_S of it.
        """
        last_s, self._looked_s = self._looked_s, now_s
        if last_s is not None and now_s - last_s >= AWAY_AFTER_S:
            late_s = now_s - last_s - LOOK_S
            self._heard_s = {n: min(now_s, heard_s + late_s) for n, heard_s in self._heard_s.items()}
        return [n for n, heard_s in self._heard_s.items() if now_s - heard_s >= SILENT_S]
