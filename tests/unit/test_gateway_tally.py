"""What tallies hand over is what prometheus_client would have counted."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.gateway import tally
from services.gateway.tally import CountTally, HistogramTally, LevelTally

BUCKETS = (1, 2, 5, 10)
VALUES = [0, 0.5, 1, 1.0001, 2, 4.9, 5, 10, 10.1, 1e9]


@pytest.fixture(autouse=True)
def only_here(monkeypatch):
    monkeypatch.setattr(tally, "_ALL", [])


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_histogram_counts_as_prometheus_own():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = HistogramTally(Histogram("h", "x", buckets=BUCKETS, registry=ours))
    plain = Histogram("h", "x", buckets=BUCKETS, registry=theirs)
    for end in (3, len(VALUES)):
        for value in VALUES[:end]:
            counted.observe(value)
            plain.observe(value)
        tally.settle()
        tally.settle()  # nothing new
        assert lines(ours) == lines(theirs)


def test_counters_and_levels_are_handed_over_once():
    registry = CollectorRegistry()
    count = CountTally(Counter("c", "x", registry=registry))
    level = LevelTally(Gauge("g", "x", registry=registry))
    count.inc()
    count.inc(4)
    level.inc(3)
    level.inc(-1)
    assert registry.get_sample_value("c_total") == 0
    for _ in range(2):
        tally.settle()
        assert registry.get_sample_value("c_total") == 5
        assert registry.get_sample_value("g") == 2
    level.inc(-2)
    tally.settle()
    assert registry.get_sample_value("g") == 0
