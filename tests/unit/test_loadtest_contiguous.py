"""What bench_contiguous.py makes of its samples."""

import pytest

from loadtest import bench_contiguous as bench
from loadtest.results import check_metrics


def kernel(variant, **fields):
    return {"part": "kernel", "variant": variant, **fields}


def serving(engine, kernel="flash3", **fields):
    return {"part": "serving", "engine": engine, "kernel": kernel, **fields}


SAMPLES = [
    kernel("paged16.flash3", kind="check", error=0.01),
    kernel("paged16.flash3", kind="prefill", tokens=16384, layer_ms=4.0, tflop=2.0),
    kernel("token-major.flash3", kind="prefill", tokens=16384, layer_ms=3.2, tflop=2.0),
    kernel("paged16.flash3", kind="decode", batch=8, tokens=16384, ms=5.0, gb=16.0, graph=True),
    kernel("layer-major.flash3", kind="decode", batch=8, tokens=16384, ms=4.0, gb=16.0, graph=True),
    kernel("layer-major.torch_flash2", kind="failed", why="x"),
    kernel("cross-layer64.flash3", kind="check", error="inf"),
    serving("paged16", kind="prefill", tokens=32768, ttft_ms=1200.0),
    serving("paged16", kind="prefill", tokens=32768, ttft_ms=1000.0),
    serving("token-major", kind="prefill", tokens=32768, ttft_ms=800.0),
    serving("token-major", kernel="torch_flash2", kind="decode", batch=32, tokens=4096, gap_ms=9.0),
    serving("layer-major", kind="failed", why="exit status 1"),
    serving("token-major", kind="facts", ready_s=9.0),
]


def test_rates_ratios_and_failures_are_what_the_samples_say():
    metrics = bench.metrics_from_samples(SAMPLES)
    assert check_metrics(metrics) == []
    assert metrics["kernel_prefill_16384_token_major_flash3_tflop_per_s"] == pytest.approx(625)
    assert metrics["kernel_prefill_16384_token_major_ratio"] == pytest.approx(1.25)
    assert metrics["kernel_decode_8_layer_major_ratio"] == pytest.approx(1.25)
    assert metrics["kernel_decode_8_layer_major_flash3_gb_per_s"] == pytest.approx(4000)
    assert metrics["serving_prefill_32768_paged16_flash3_ttft_ms"] == 1000.0  # the best of two
    assert metrics["serving_prefill_32768_token_major_ratio"] == pytest.approx(1.25)
    assert metrics["serving_decode_32_token_major_torch_flash2_gap_ms"] == 9.0
    assert "serving_decode_32_token_major_ratio" not in metrics  # nothing to compare it with
    assert metrics["failed_count"] == 3


def test_the_table_has_a_line_for_each_thing_and_a_column_for_each_cache_and_kernel():
    lines = bench.table(bench.metrics_from_samples(SAMPLES))
    assert "token_major_flash3" in lines[0]
    (prefill,) = [line for line in lines if line.startswith("serving prefill 32768, ttft_ms")]
    assert "1000.00" in prefill
    assert "800.00" in prefill
    assert not any("ratio" in line for line in lines)


def test_without_any_sample_there_is_an_empty_table_and_no_failure():
    assert bench.metrics_from_samples([]) == {"failed_count": 0.0}
    assert len(bench.table({})) == 1
