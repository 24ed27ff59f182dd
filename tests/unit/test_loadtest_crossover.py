"""What bench_crossover.py makes of its samples: where lines cross, the error, the policy's share and its regret."""

import pytest

from loadtest import bench_crossover as bench
from loadtest.results import check_metrics

RATES = (50, 100, 200)


def row(rate, fetch_ms, recompute_ms, said_fetch_ms, said_recompute_ms, chosen, prefix=1024):
    return {
        "prefix_tokens": prefix, "rate_mb_per_s": rate, "fetch_ms": fetch_ms, "recompute_ms": recompute_ms,
        "predicted_fetch_ms": said_fetch_ms, "predicted_recompute_ms": said_recompute_ms, "chosen": chosen,
    }  # fmt: skip


def samples(*, real_ms=60.0, said_ms=60.0, prefix=1024):
    """6 MB: fetching takes 10 ms and the link's time; computing `real_ms`, and `said_ms` as predicted."""
    out = []
    for rate in RATES:
        fetch_ms = 10.0 + 6_000.0 / rate
        chosen = "fetch" if fetch_ms <= said_ms else "recompute"
        out.append(row(rate, fetch_ms, real_ms, fetch_ms, said_ms, chosen, prefix))
    return out


def test_a_crossing_lies_between_neighbours():
    assert bench.crossing([(3.0, 4.0), (1.0, -1.0), (2.0, 1.0)]) == pytest.approx(1.5)
    assert bench.crossing([(1.0, 0.0), (2.0, 1.0)]) == 1.0
    assert bench.crossing([(1.0, 1.0), (2.0, 3.0)]) is None
    assert bench.crossing([(1.0, -2.0), (2.0, -1.0)]) is None


def test_a_crossing_beyond_the_points_is_on_the_line_of_the_nearest_two():
    assert bench.crossing([(2.0, 1.0), (3.0, 3.0), (4.0, 99.0)], beyond=True) == pytest.approx(1.5)
    assert bench.crossing([(0.0, -99.0), (1.0, -2.0), (2.0, -1.0)], beyond=True) == pytest.approx(3.0)
    assert bench.crossing([(1.0, 1.0), (2.0, 3.0)], beyond=True) == pytest.approx(0.5)
    assert bench.crossing([(1.0, 3.0), (2.0, 3.0)], beyond=True) is None
    assert bench.crossing([(1.0, 3.0)], beyond=True) is None


def test_a_crossover_is_exact_where_time_is_linear_in_bytes():
    """10 + 6000 / rate = 60 at 120 MB/s, between 100 and 200."""
    longer = {rate / 1e3: 10.0 + 6_000.0 / rate - 60.0 for rate in RATES}
    assert bench.crossover_gb_per_s(longer) == pytest.approx(0.12)
    assert bench.crossover_gb_per_s({0.1: -5.0, 0.2: -9.0}) is None


def test_the_error_is_of_the_link_rate_and_the_worst_prefix_counts():
    """Predicted: 10 + 6000 / rate = 70 at 100 MB/s."""
    found = bench.metrics_from_samples(samples(said_ms=70.0) + samples(prefix=2048))
    assert not check_metrics(found)
    assert found["prefix1024_measured_crossover_gb_per_s"] == pytest.approx(0.12)
    assert found["prefix1024_predicted_crossover_gb_per_s"] == pytest.approx(0.1)
    assert found["prefix1024_crossover_error_ratio"] == pytest.approx(1 / 6)
    assert found["prefix2048_crossover_error_ratio"] == pytest.approx(0.0)
    assert found["crossover_error_ratio"] == pytest.approx(1 / 6)
    assert found["crossover_median_error_ratio"] == pytest.approx(1 / 12)


def test_regret_is_what_the_other_choice_would_have_saved():
    """At 100 MB/s fetching takes 70 ms, computing 60; it was predicted to take 70, and so fetched."""
    found = bench.metrics_from_samples(samples(said_ms=70.0))
    assert found["right_percent"] == pytest.approx(200 / 3)
    assert found["worst_regret_ms"] == pytest.approx(10.0)
    assert found["mean_regret_ms"] == pytest.approx(10 / 3)
    assert found["always_fetch_mean_regret_ms"] == pytest.approx((70.0 + 10.0) / 3)
    assert found["always_recompute_mean_regret_ms"] == pytest.approx(20 / 3)


def test_medians_count_and_not_the_odd_sample():
    odd = [row(rate, 9e3, 9.0, 9e3, 9.0, "recompute") for rate in RATES]
    found = bench.metrics_from_samples(samples() * 2 + odd)
    assert found["prefix1024_measured_crossover_gb_per_s"] == pytest.approx(0.12)
    assert found["crossover_error_ratio"] == pytest.approx(0.0)


def test_rates_that_do_not_enclose_a_crossover_are_no_measurement():
    with pytest.raises(ValueError, match="1024 tokens"):
        bench.metrics_from_samples(samples(real_ms=1_000.0))
    beyond = bench.metrics_from_samples(samples(said_ms=170.0))
    assert beyond["prefix1024_predicted_crossover_gb_per_s"] == pytest.approx(0.0375)
    assert beyond["crossover_error_ratio"] == pytest.approx(1 - 0.0375 / 0.12)


def test_the_plans_have_rates_on_either_side_and_point_at_prefixes_of_whole_blocks():
    for plan in (bench.FULL, bench.QUICK):
        assert list(plan.rates_mb_per_s) == sorted(plan.rates_mb_per_s)
        assert all(prefix % 64 == 0 for prefix in plan.prefixes)
        assert all(tokens % 64 == 0 for tokens in plan.settling)
