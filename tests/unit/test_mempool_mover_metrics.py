"""What /metrics says of copies between spaces."""

from prometheus_client import CollectorRegistry, generate_latest

from services.mempool.mover_metrics import mover_metrics

STATUS = {
    "copies": 3,
    "quarantined_pages": 2,
    "pinned_bytes": 4096,
    "huge_bytes": 2048,
    "pairs": {"cuda:a to cuda:b": 314.0},
    "reasons": {"imported": "by the copy engines of cuda:b"},
    "paths": {"imported": {"copies": 5, "bytes": 640, "last_gb_per_s": 300.5}},
    "failures": {"transfer.timeout": 1},
}


class Source:
    def __init__(self, status):
        self.status = status

    def collect(self):
        return mover_metrics(self.status)


def text_of(status):
    registry = CollectorRegistry()
    registry.register(Source(status))
    return generate_latest(registry).decode()


def test_copies_bytes_and_rates_are_told_by_path_and_failures_by_code():
    text = text_of(STATUS)
    for line in (
        'quire_mempool_copies_total{path="imported"} 5.0',
        'quire_mempool_copied_bytes_total{path="imported"} 640.0',
        'quire_mempool_copy_gb_per_s{path="imported",reason="by the copy engines of cuda:b"} 300.5',
        'quire_mempool_copies_failed_total{code="transfer.timeout"} 1.0',
        'quire_mempool_gpu_pair_gb_per_s{pair="cuda:a to cuda:b"} 314.0',
        "quire_mempool_copies_running 3.0",
        "quire_mempool_copy_quarantined_pages 2.0",
        "quire_mempool_copy_pinned_bytes 4096.0",
        "quire_mempool_copy_huge_bytes 2048.0",
    ):
        assert line in text


def test_a_mempool_that_never_copied_has_the_families_and_zeros():
    text = text_of({})
    assert "quire_mempool_copies_running 0.0" in text
    assert "# TYPE quire_mempool_copies_total counter" in text
