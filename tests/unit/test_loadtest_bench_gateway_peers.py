"""Which numbers a run of the gateway beside routers has."""

from loadtest.bench_gateway_peers import metrics_from_samples


def test_every_system_has_its_own_numbers_and_failures():
    ttft = {"series": "ttft", "rate_per_s": 100.0, "count": 2}
    found = metrics_from_samples(
        [
            {"system": "quire_traced", "series": "closed_loop", "count": 10, "wall_s": 2.0, "cpu_us": 5_000},
            {"system": "quire_traced", **ttft, "failed": 1, "ttft_ms": [3.0, 3.0]},
            {"system": "smg_cache_aware", **ttft, "failed": 0, "ttft_ms": [1.0, 1.0]},
            {"system": "direct", **ttft, "failed": 0, "ttft_ms": [0.5, 0.5]},
        ]
    )
    assert found == {
        "quire_traced_cpu_us_per_request": 500.0,
        "quire_traced_closed_loop_requests_per_s": 5.0,
        "quire_traced_added_ttft_p50_ms": 3.0,
        "quire_traced_added_ttft_p99_ms": 3.0,
        "quire_traced_failed_requests": 1.0,
        "smg_cache_aware_added_ttft_p50_ms": 1.0,
        "smg_cache_aware_added_ttft_p99_ms": 1.0,
        "smg_cache_aware_failed_requests": 0.0,
        "direct_added_ttft_p50_ms": 0.5,
        "direct_added_ttft_p99_ms": 0.5,
        "direct_failed_requests": 0.0,
    }
