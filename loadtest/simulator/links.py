"""Transfers between instances, and between an instance and the host memory behind it: one at a time at each end."""

from dataclasses import dataclass, field

from shared.wire.cost import LinkRate


@dataclass(frozen=True, slots=True)
class Rate:
    """A path. bytes_per_ms 0 means that nothing moves and nothing waits: both ends use the same pages."""

    latency_ms: float = 0.1
    bytes_per_ms: float = 50e6  # 50 GB/s

    def transfer_ms(self, num_bytes: float) -> float:
        """Alone on the path."""
        return self.latency_ms + num_bytes / self.bytes_per_ms if self.bytes_per_ms else 0.0


def gb_per_s(rate: float, latency_ms: float = 0.1) -> Rate:
    """From the unit in which link speeds are told."""
    return Rate(latency_ms, rate * 1e6)


def as_told(rate: Rate) -> LinkRate:
    """As a worker reports what it measured."""
    return LinkRate(gb_per_s=(rate.bytes_per_ms or 1e12) / 1e6, latency_ms=rate.latency_ms)


@dataclass(slots=True)
class Links:
    """A transfer begins when its source may send and its target may receive; each end does one after the other.

    Args: peer: between instances of one host; remote: between hosts; dram: from the host memory behind an instance.
    """

    peer: Rate = field(default_factory=Rate)
    remote: Rate = field(default_factory=Rate)
    dram: Rate = field(default_factory=lambda: Rate(0.05, 40e6))
    instances_per_host: int = 1
    num_bytes: int = 0  # between instances
    _out_free_ms: dict[int, float] = field(default_factory=dict)
    _in_free_ms: dict[int, float] = field(default_factory=dict)
    _dram_free_ms: dict[int, float] = field(default_factory=dict)

    def host_of(self, instance: int) -> int:
        """Instances of a host follow each other."""
        return instance // self.instances_per_host

    def are_apart(self, number: int, other: int) -> bool:
        """Of different hosts. -1: no instance."""
        return other >= 0 and self.host_of(number) != self.host_of(other)

    def send(self, source: int, target: int, num_bytes: int, now_ms: float) -> float:
        """Between instances: when it has arrived."""
        rate = self.peer if self.host_of(source) == self.host_of(target) else self.remote
        if not rate.bytes_per_ms or not num_bytes:
            return now_ms
        took_ms = rate.transfer_ms(num_bytes)
        begin_ms = max(now_ms, self._out_free_ms.get(source, 0.0), self._in_free_ms.get(target, 0.0))
        self._out_free_ms[source] = self._in_free_ms[target] = begin_ms + took_ms - rate.latency_ms
        self.num_bytes += num_bytes
        return begin_ms + took_ms

    def load(self, instance: int, num_bytes: int, now_ms: float) -> float:
        """From the host memory behind an instance: when it has arrived."""
        if not self.dram.bytes_per_ms or not num_bytes:
            return now_ms
        begin_ms = max(now_ms, self._dram_free_ms.get(instance, 0.0))
        self._dram_free_ms[instance] = begin_ms + self.dram.transfer_ms(num_bytes)
        return self._dram_free_ms[instance]
