"""transfer(): how long bytes take on each path, for eq 2 of MemServe 5.3.1. Pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.wire.cost import LinkRate

BYTES_PER_MS = 1e6  # of 1 GB/s
# Until somebody has measured: what a path reaches at least on any hardware of its kind.
CAREFUL_RATES: Mapping[str, LinkRate] = {
    "alias": LinkRate(gb_per_s=1000.0, latency_ms=0.1),  # mapping only
    "peer": LinkRate(gb_per_s=5.0, latency_ms=1.0),
    "dram": LinkRate(gb_per_s=5.0, latency_ms=1.0),
    "remote": LinkRate(gb_per_s=1.0, latency_ms=2.0),
}


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Measured rates by path ("alias", "peer", "dram", "remote")."""

    rates: Mapping[str, LinkRate] = field(default_factory=lambda: CAREFUL_RATES)

    def transfer_ms(self, path: str, num_bytes: int) -> float:
        """Time of one transfer. An unknown path counts as "remote"; nothing to move costs nothing."""
        if num_bytes <= 0:
            return 0.0
        rate = self.rates.get(path) or CAREFUL_RATES.get(path) or CAREFUL_RATES["remote"]
        return rate.latency_ms + num_bytes / (max(rate.gb_per_s, 1e-6) * BYTES_PER_MS)

    def measured(
        self, path: str, num_bytes: int, ms: float, *, weight: float = 0.2, is_copy: bool = False
    ) -> "LinkRates":
        """With one more transfer seen. Small ones say something of the latency only, and are ignored.

        Args: is_copy: `ms` is the copy's alone, without the latency of who waited for it.
        """
        rate = self.rates.get(path) or CAREFUL_RATES.get(path) or CAREFUL_RATES["remote"]
        busy_ms = ms if is_copy else ms - rate.latency_ms
        if num_bytes < 1 << 20 or busy_ms <= 0:
            return self
        seen = num_bytes / (busy_ms * BYTES_PER_MS)
        is_first = self.rates.get(path) is CAREFUL_RATES.get(path)
        mixed = seen if is_first else (1 - weight) * rate.gb_per_s + weight * seen
        return LinkRates({**self.rates, path: LinkRate(gb_per_s=mixed, latency_ms=rate.latency_ms)})


def should_fetch(
    transfer_ms: float, exec_ms: float, exec_with_more_ms: float, *, margin: float = 1.0
) -> bool:
    """MemServe eq 2: fetch what another instance has, instead of computing it, where that is no slower.

    Args: exec_ms: with what is here; exec_with_more_ms: with what would be here after the transfer.
    """
    return transfer_ms * margin <= exec_ms - exec_with_more_ms
