"""How fast a producer's lent pages may be read and written: a bucket of bytes that fills with time. No I/O.

A copy is let through while the bucket is not in debt, and takes its bytes, which may leave it in debt: so over any time
t no more than t * bytes_per_s, the burst and one copy pass. AQUA 5 bounds the load on a producer's link by lending to
one consumer only; a cap says how much of it that one may take.
"""


class Budget:
    """Args: bytes_per_s: 0: no limit; burst_bytes: what passes at once after a rest."""

    def __init__(self, bytes_per_s: int, burst_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst = (
            max(0, burst_bytes) * 1_000
        )  # in thousandths of bytes: whole milliseconds fill it exactly
        self._level = self._burst
        self._at_ms: int | None = None
        self.spent_bytes = 0

    def is_open(self, now_ms: int) -> bool:
        """Whether a copy may begin now."""
        self._fill(now_ms)
        return not self._bytes_per_s or self._level >= 0

    def spend(self, num_bytes: int, now_ms: int) -> None:
        """A copy of so many bytes has begun."""
        self._fill(now_ms)
        self.spent_bytes += num_bytes
        if self._bytes_per_s:
            self._level -= num_bytes * 1_000

    def opens_at_ms(self, now_ms: int) -> int | None:
        """When is_open() is true next; None: it is now."""
        if self.is_open(now_ms):
            return None
        return now_ms - self._level // self._bytes_per_s

    def _fill(self, now_ms: int) -> None:
        before, self._at_ms = self._at_ms, now_ms if self._at_ms is None else max(self._at_ms, now_ms)
        if before is not None:
            self._level = min(self._burst, self._level + (self._at_ms - before) * self._bytes_per_s)
