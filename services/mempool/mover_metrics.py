"""Prometheus metrics of the copies between a mempool's spaces, from Mover.status()."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_PREFIX = "quire_mempool"


def mover_metrics(status: Mapping[str, Any]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """`status`: empty while nothing has ever been copied; then the families have no samples."""
    paths: Mapping[str, Any] = status.get("paths", {})
    reasons: Mapping[str, str] = status.get("reasons", {})
    copies = CounterMetricFamily(
        f"{_PREFIX}_copies", "Copies between spaces that ended well", labels=["path"]
    )
    moved = CounterMetricFamily(f"{_PREFIX}_copied_bytes", "Bytes of those copies", labels=["path"])
    rate = GaugeMetricFamily(
        f"{_PREFIX}_copy_gb_per_s",
        "Rate of the last copy, and why it went this way",
        labels=["path", "reason"],
    )
    for path, totals in paths.items():
        copies.add_metric([path], totals["copies"])
        moved.add_metric([path], totals["bytes"])
        rate.add_metric([path, reasons.get(path, "")], totals["last_gb_per_s"])
    failed = CounterMetricFamily(f"{_PREFIX}_copies_failed", "Copies that failed", labels=["code"])
    for code, count in status.get("failures", {}).items():
        failed.add_metric([code], count)
    pairs = GaugeMetricFamily(
        f"{_PREFIX}_gpu_pair_gb_per_s", "Measured before its first copy", labels=["pair"]
    )
    for pair, gb_per_s in status.get("pairs", {}).items():
        pairs.add_metric([pair], gb_per_s)
    yield from (copies, moved, rate, failed, pairs)
    for name, text in (
        ("copies", "Copies on their way"),
        ("quarantined_pages", "Pages that a failed copy may still write"),
        ("pinned_bytes", "Host memory that is page-locked for copy engines"),
        ("huge_bytes", "Of it, what lies in huge pages"),
    ):
        key = "copies_running" if name == "copies" else f"copy_{name}"
        yield GaugeMetricFamily(f"{_PREFIX}_{key}", text, value=status.get(name, 0))
