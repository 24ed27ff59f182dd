"""Prometheus metrics of lending by itself, read when they are scraped."""

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.mempool.core.desk import Desk
from services.mempool.core.mempool import Mempool

_PREFIX = "quire_mempool_lending"


class LendingCollector(Collector):
    """Registers itself; one per process."""

    def __init__(self, pool: Mempool, desk: Desk) -> None:
        self._pool, self._desk = pool, desk
        REGISTRY.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        memory = GaugeMetricFamily(
            f"{_PREFIX}_bytes", "Offered, lent and borrowed memory by space", labels=["space", "share"]
        )
        for number, space in self._desk.status().items():
            for share in ("offered", "lent", "borrowed"):
                memory.add_metric([number, share], space[f"{share}_bytes"])
        yield memory
        copies = self._pool.lending.copies
        moved = CounterMetricFamily(
            f"{_PREFIX}_moved_bytes", "Through a producer's lent pages", labels=["space"]
        )
        for number, count in copies.spent_bytes().items():
            moved.add_metric([str(number)], count)
        yield moved
        yield GaugeMetricFamily(
            f"{_PREFIX}_copies_held", "Copies that wait for a budget", value=copies.num_held
        )
        counters = self._pool.lending.counters()
        names = (
            "copies_refused",
            "loans_taken",
            "loans_excused",
            "refused",
            "blocks_dropped",
            "pages_returned",
        )
        for name in names:
            text = f"Lending: {name.replace('_', ' ')} since the start"
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=counters[f"lending_{name}"])
