"""bench_simulator: its figures come from its samples, and its simulated half runs without a cluster."""

import pytest

from loadtest import bench_simulator as bench
from loadtest.results import check_metrics

SHAPE = {
    "num_layers": 6, "hidden_size": 192, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
    "vocab_size": 4096, "dtype_bytes": 2,
}  # fmt: skip


def cost(prefill, decode):
    coefficients = {"shape": SHAPE, "matmul_ms_per_gflop": 0.05, "step_overhead_ms": 5.0, "request_ms": 2.0}
    return {
        "coefficients": coefficients,
        "corrections": {"prefill": {"factor": prefill}, "decode": {"factor": decode}},
    }


def test_each_worker_gives_the_factor_of_what_it_does():
    prices = bench.prices_of({"prefill-0": cost(2.0, 9.0), "decode-0": cost(9.0, 3.0)})
    plain = bench.prices_of({"prefill-0": cost(1.0, 1.0), "decode-0": cost(1.0, 1.0)})
    assert prices.prefill_ms(500) == pytest.approx(2 * plain.prefill_ms(500))
    assert prices.decode_ms(3, 900) == pytest.approx(3 * plain.decode_ms(3, 900))
    assert prices.step_ms([(100, 0)], 1, 50) == pytest.approx(2 * plain.step_ms([(100, 0)], 1, 50))


def test_equal_runs_have_no_error_and_a_slower_machine_has_its_factor():
    requests = bench.workload(16, 2.0, 1, "test")
    told = bench.simulated(requests, bench.prices_of({"prefill-0": cost(1, 1), "decode-0": cost(1, 1)}))
    slow = bench.simulated(requests, bench.prices_of({"prefill-0": cost(2, 2), "decode-0": cost(2, 2)}))
    same = bench.metrics_from_samples([bench.compare(2.0, told, told)])
    assert check_metrics(same) == []
    assert (same["ttft_error_ratio"], same["hit_error_points"], same["pair_error_median_ratio"]) == (0, 0, 0)
    worse = bench.metrics_from_samples([bench.compare(2.0, told, told), bench.compare(4.0, told, slow)])
    assert 0.4 < worse["ttft_error_ratio"] < 1.2
    assert worse["rate_4_ttft_mean_simulated_ms"] > worse["rate_4_ttft_mean_real_ms"]
