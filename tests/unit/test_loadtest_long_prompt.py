"""bench_long_prompt: metrics follow from the samples, and the engine and the lender get the memory that is meant."""

import pytest

from loadtest import bench_long_prompt as bench
from loadtest.results import check_metrics


def decode(tier: str, ratio: float, step_ms: float, far_gb: float, ttft_ms: float = 1_000.0) -> dict:
    return {
        "kind": "decode", "tier": tier, "ratio": ratio, "prompt_tokens": 2_000, "ttft_ms": ttft_ms,
        "decode_ms": step_ms * 10, "decode_tokens": 10, "far_bytes": far_gb * 1e9, "tier_bytes": far_gb * 1e9,
    }  # fmt: skip


SAMPLES = [
    decode("own", 0.5, 10.0, 0.0),
    decode("dram", 2.0, 50.0, 2.0, ttft_ms=4_000.0),
    decode("peer", 2.0, 15.0, 2.0, ttft_ms=1_000.0),
    decode("dram", 4.0, 130.0, 6.0),
    decode("peer", 4.0, 26.0, 6.0),
    {"kind": "ceiling", "tier": "dram", "bytes": 50_000_000_000, "seconds": 1.0},
    {"kind": "ceiling", "tier": "peer", "bytes": 400_000_000_000, "seconds": 1.0},
]


def test_the_gain_is_that_of_decoding_the_longest_prompt_that_both_tiers_had():
    found = bench.metrics_from_samples([*SAMPLES, decode("dram", 5.0, 200.0, 8.0)])
    assert found["throughput_gain_ratio"] == pytest.approx(5.0)
    assert found["longest_ratio"] == 4.0
    assert found["x2_decode_gain_ratio"] == pytest.approx(50 / 15)
    assert found["x2_prefill_gain_ratio"] == pytest.approx(4.0)
    assert found["own_tokens_per_s"] == pytest.approx(100.0)
    assert check_metrics(found) == []


def test_what_a_step_takes_beyond_one_in_own_memory_is_reading_what_is_far():
    found = bench.metrics_from_samples(SAMPLES)
    assert found["x2_dram_read_gb_per_s"] == pytest.approx(2.0 / 0.040)
    assert found["x4_peer_read_gb_per_s"] == pytest.approx(6.0 / 0.016)
    assert found["x2_dram_possible_step_ms"] == pytest.approx(10 + 40)
    assert found["x2_possible_gain_ratio"] == pytest.approx(50 / 15)
    assert found["x2_dram_in_its_tier_ratio"] == 1.0


def test_without_samples_there_are_no_metrics():
    assert bench.metrics_from_samples([]) == {}


def test_the_engine_has_the_memory_that_prompts_exceed_and_both_tiers_have_room_for_the_longest():
    options = bench.parse(["--device", "cuda", "--ratios", "2,4"])
    setup = bench.setup_of(options)
    own = options.own_tokens * options.token_bytes
    assert own < setup.pool_bytes < own * 1.05
    assert setup.worker["far_bytes"] >= 3 * own
    assert setup.swap_bytes >= setup.worker["far_bytes"] + own
    assert setup.worker["max_model_len"] >= 4 * options.own_tokens + options.answer_tokens


def test_a_prompt_that_fits_is_refused():
    with pytest.raises(SystemExit):
        bench.parse(["--ratios", "1,2"])
