"""How fast a producer's lent pages may be read and written: a bucket of bytes that fills with time. No I/O.

A copy is let through while the bucket is not in debt, and takes its bytes, which may leave it in debt: so over any time
t no more than t * bytes_per_s, the burst and one copy pass. AQUA 5 bounds the load on a producer's link by lending to
one consumer only; a cap says how much of it that one may take.
"""

from collections.abc import Collection, Mapping

# Of a pair of GPUs' copy rate. An engine on an H200 lost 7.6% of its throughput to all that a consumer could copy, 219
# GB/s, and nothing that showed in three rounds to 100 GB/s (loadtest/results/h200x2-producer-cost.json). 64 MiB, as the
# mover measures a pair, go at 321 GB/s there and no faster.
AUTO_SHARE = 0.3
# To host memory, where nothing was measured: it is not page-locked then, and others copy beside it (6.5 GB/s alone).
SLOWEST_BYTES_PER_S = 2_000_000_000


def auto_budget_bytes_per_s(devices: Collection[str], gb_per_s: Mapping[tuple[str, str], float]) -> int:
    """A budget for the producer on these GPUs, of all of them together; 0: none, since nothing of it was measured.

    A GPU's rate is that of its fastest pair: a measurement that somebody disturbed must not bind for good, and a
    slower link bounds its own copies. Pages are cut equally over the GPUs, so the slowest of them says what all do.
    Args: devices: none for host memory; gb_per_s: by (source, target), between two GPUs.
    """
    best: dict[str, float] = {}
    for pair, rate in gb_per_s.items():
        inside = [device for device in pair if device in devices]
        if len(inside) == 1 and rate > 0.0:  # within the producer nothing is lent
            best[inside[0]] = max(rate, best.get(inside[0], 0.0))
    if not best:
        return 0
    return max(1, int(AUTO_SHARE * min(best.values()) * 1e9 * len(set(devices))))


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

    def change(self, bytes_per_s: int, burst_bytes: int) -> None:
        """Another rate from now on; what is owed stays owed."""
        self._bytes_per_s, self._burst = bytes_per_s, max(0, burst_bytes) * 1_000
        self._level = min(self._level, self._burst)

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
