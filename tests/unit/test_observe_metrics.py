"""shared/observe/metrics.py: names carry service and unit; asking twice is one metric."""

import pytest

from shared.observe import metrics


def test_asking_twice_gives_the_same_metric():
    first = metrics.counter("quire_test_things_total", "things", ("kind",))
    first.labels("a").inc()
    metrics.counter("quire_test_things_total", "things", ("kind",)).labels("a").inc()
    assert b'quire_test_things_total{kind="a"} 2.0' in metrics.render()


def test_durations_are_histograms_in_ms():
    metrics.histogram_ms("quire_test_wait_ms", "wait").observe(7)
    text = metrics.render()
    assert b'quire_test_wait_ms_bucket{le="5.0"} 0.0' in text
    assert b'quire_test_wait_ms_bucket{le="10.0"} 1.0' in text


def test_a_name_without_service_or_unit_is_refused():
    with pytest.raises(ValueError, match="quire_"):
        metrics.gauge("pages", "pages")
    with pytest.raises(ValueError, match="_ms"):
        metrics.histogram_ms("quire_test_wait_seconds", "wait")


def test_one_name_is_one_kind():
    metrics.gauge("quire_test_level_pages", "level")
    with pytest.raises(ValueError, match="Gauge"):
        metrics.counter("quire_test_level_pages", "level")
