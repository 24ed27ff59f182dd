"""When a gateway's process that ended starts again: soon at first, then later and later. No I/O."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
STABLE_S = 10.0  # who ran for so long has not failed before


class Restarts:
    """Of the processes of one gateway, by number. Times are a monotonic clock's."""

    def __init__(self) -> None:
        self._began_s: dict[int, float] = {}
        self._failures: dict[int, int] = {}

    def began(self, number: int, now_s: float) -> None:
        """It was started."""
        self._began_s[number] = now_s

    def ended(self, number: int, now_s: float) -> float:
        """It is gone. When it is to start again."""
        if now_s - self._began_s[number] >= STABLE_S:
            self._failures[number] = 0
        failures = self._failures[number] = self._failures.get(number, 0) + 1
        return now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 20))
