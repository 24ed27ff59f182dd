"""Prometheus metrics by name: `quire_<service>_<what>_<unit>`. Asking twice for a name gives the same metric.

In a hot path keep the child: `placed = counter(...).labels("prefill")` once, then `placed.inc()`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEFAULT_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
DEFAULT_BUCKETS_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

_known: dict[str, Any] = {}
M = TypeVar("M", Counter, Gauge, Histogram)


def _metric(kind: type[M], name: str, text: str, labels: Sequence[str], **options: Any) -> M:
    if not name.startswith("quire_"):
        raise ValueError(f"metric {name!r}: names begin with quire_<service>_")
    metric = _known.get(name)
    if metric is None:
        metric = _known[name] = kind(name, text, tuple(labels), **options)
    if not isinstance(metric, kind):
        raise ValueError(f"metric {name!r} exists as {type(metric).__name__}")
    return metric


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """A number that only grows. Name: quire_<service>_..._total."""
    return _metric(Counter, name, text, labels)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """A number that goes up and down. Of several processes that share metrics: each living one's, by its number."""
    return _metric(Gauge, name, text, labels, multiprocess_mode="liveall")


def histogram_ms(
    name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = DEFAULT_BUCKETS_MS
) -> Histogram:
    """Durations in ms. Name: quire_<service>_..._ms."""
    if not name.endswith("_ms"):
        raise ValueError(f"histogram {name!r}: the name must end with its unit, _ms")
    return _metric(Histogram, name, text, labels, buckets=tuple(buckets))


def histogram_ratio(
    name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = DEFAULT_BUCKETS_RATIO
) -> Histogram:
    """Something measured over the same predicted: 1 is right. Name: quire_<service>_..._ratio."""
    if not name.endswith("_ratio"):
        raise ValueError(f"histogram {name!r}: the name must end with its unit, _ratio")
    return _metric(Histogram, name, text, labels, buckets=tuple(buckets))


def render() -> bytes:
    """All metrics of this process in Prometheus' text format."""
    return generate_latest(REGISTRY)
