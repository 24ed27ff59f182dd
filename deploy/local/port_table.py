"""Where each service of a cluster listens."""

from dataclasses import dataclass

from deploy.local.addresses import in_url


@dataclass(frozen=True, slots=True)
class Ports:
    """Every port of a cluster, from two settings."""

    gateway: int
    base: int

    @property
    def scheduler(self) -> int:
        """ZeroMQ, placements."""
        return self.base + 1

    @property
    def reports(self) -> int:
        """ZeroMQ, load reports of workers."""
        return self.base + 2

    @property
    def coordinator(self) -> int:
        """HTTP."""
        return self.base + 3

    @property
    def standby(self) -> int:
        """HTTP, of the coordinator that stands by."""
        return self.base + 8

    @property
    def redis(self) -> int:
        """Redis protocol."""
        return self.base + 4

    @property
    def mempool_admin(self) -> int:
        """HTTP."""
        return self.base + 5

    @property
    def scheduler_admin(self) -> int:
        """HTTP."""
        return self.base + 6

    @property
    def mempool_peers(self) -> int:
        """ZeroMQ, mempools of other machines."""
        return self.base + 7

    def worker(self, role: str, index: int) -> tuple[int, int]:
        """(ZeroMQ, admin HTTP) of one worker."""
        first = self.base + (20 if role == "prefill" else 40) + 2 * index
        return first, first + 1


def coordinator_urls(host: str, ports: Ports, *, standby: bool) -> tuple[str, ...]:
    """Of both, where one stands by: a client goes to the one that leads."""
    found = (ports.coordinator, ports.standby) if standby else (ports.coordinator,)
    return tuple(f"http://{in_url(host)}:{port}" for port in found)
