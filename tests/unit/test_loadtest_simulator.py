"""bench_simulator: its figures come from its samples, its calibration from other runs, and its simulated half runs."""

from dataclasses import replace

import msgspec
import pytest

from loadtest import bench_simulator as bench
from loadtest.bench_simulator import Calibration
from loadtest.outcomes import Outcome
from loadtest.results import check_metrics
from loadtest.simulator.prices import ModelPrices
from shared.wire.cost import CostCoefficients, ModelShape

SHAPE = ModelShape(
    num_layers=6, hidden_size=192, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=4096,
    dtype_bytes=2,
)  # fmt: skip
COST = CostCoefficients(shape=SHAPE, matmul_ms_per_gflop=0.05, step_overhead_ms=5.0, request_ms=2.0)


def real_of(requests, truth: Calibration) -> list[Outcome]:
    """What a cluster that is exactly so would answer, with receipts."""
    model = ModelPrices(COST)
    told = bench.simulated(requests, COST, truth)
    for one in told:
        total = sum(one.sources.values())
        predicted_ms = model.prefill_ms(total, total - one.sources["computed"])
        one.stages = {"queue_ms": 0.0, "compute_ms": truth.slope * predicted_ms + truth.offset_ms}
    return told


def test_prompts_have_their_line_and_a_position_that_is_computed_again_is_a_decode():
    plain, found = ModelPrices(COST), bench.MeasuredPrices(COST, Calibration(2.0, 3.0, 1.5))
    assert found.step_ms([(500, 0)], 0, 0) == pytest.approx(2 * plain.step_ms([(500, 0)], 0, 0) + 3)
    assert found.step_ms([(500, 0), (1, 700)], 2, 90) == pytest.approx(
        2 * plain.step_ms([(500, 0)], 3, 790) + 3
    )
    assert found.step_ms([(1, 700)], 2, 90) == pytest.approx(1.5 * plain.decode_ms(3, 790))
    assert found.decode_ms(3, 900) == pytest.approx(1.5 * plain.decode_ms(3, 900))


def test_a_line_goes_through_the_prompts_and_equal_ones_give_a_factor():
    assert bench.line([(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]) == pytest.approx((2.0, 3.0))
    assert bench.line([(2.0, 6.0), (2.0, 8.0)]) == (3.5, 0.0)
    assert bench.line([(1.0, 9.0), (3.0, 3.0)]) == (3.0, 0.0)  # noise: no prompt is faster for being longer
    with pytest.raises(ValueError, match="alone"):
        bench.line([])


def test_prompts_that_disturb_each_other_are_left_out():
    sent = [0.0, 100.0, 105.0, 300.0]
    outcomes = [
        Outcome(n, "s", 0, sent_ms=at, output_tokens=1, stages={"compute_ms": 20.0})
        for n, at in enumerate(sent)
    ]
    assert [one.request_id for one in bench.alone(outcomes)] == [0, 3]


def test_a_calibration_finds_what_the_cluster_is():
    truth = Calibration(1.4, 2.0, 1.3, 12.0)
    requests = [bench.workload(24, 2.0, seed, "test", seed) for seed in (1, 2)]
    found = bench.calibrate(COST, [(some, real_of(some, truth)) for some in requests])
    assert found.slope == pytest.approx(truth.slope, rel=1e-6)
    assert found.offset_ms == pytest.approx(truth.offset_ms, abs=1e-6)
    assert found.decode_factor == pytest.approx(truth.decode_factor, rel=0.03)
    assert found.request_ms == pytest.approx(truth.request_ms, rel=0.1)
    others = bench.workload(24, 4.0, 3, "other")
    row = bench.compare(4.0, real_of(others, truth), bench.simulated(others, COST, found))
    assert bench.metrics_from_samples([row])["ttft_error_ratio"] < 0.05


def test_equal_runs_have_no_error_and_a_slower_machine_has_its_factor():
    requests = bench.workload(16, 2.0, 1, "test")
    told = bench.simulated(requests, COST, Calibration())
    slow = bench.simulated(requests, COST, Calibration(slope=2.0, decode_factor=2.0))
    calibration = {
        "part": "calibration",
        "slope": 1.0,
        "offset_ms": 0.0,
        "decode_factor": 1.0,
        "request_ms": 9.0,
    }
    same = bench.metrics_from_samples([calibration, bench.compare(2.0, told, told)])
    assert check_metrics(same) == []
    assert (same["ttft_error_ratio"], same["hit_error_points"], same["pair_error_median_ratio"]) == (0, 0, 0)
    assert same["request_delay_ms"] == 9.0
    worse = bench.metrics_from_samples([bench.compare(2.0, told, told), bench.compare(4.0, told, slow)])
    assert 0.4 < worse["ttft_error_ratio"] < 1.2
    assert worse["rate_4_ttft_mean_simulated_ms"] > worse["rate_4_ttft_mean_real_ms"]


def test_coefficients_are_the_prefill_workers_where_its_profile_was_not_disturbed():
    def cost(ms):
        return {"coefficients": None if ms is None else {"shape": msgspec.to_builtins(SHAPE), "chunk_ms": ms}}

    assert bench.coefficients_of({"decode-0": cost(2.0), "prefill-0": cost(1.0)}).chunk_ms == 1.0
    assert bench.coefficients_of({"decode-0": cost(2.0), "prefill-0": cost(None)}).chunk_ms == 2.0
    with pytest.raises(StopIteration):
        bench.coefficients_of({"decode-0": cost(None)})


def test_a_longer_way_is_a_later_first_token():
    requests = bench.workload(8, 1.0, 1, "test")
    near, far = (bench.simulated(requests, COST, replace(Calibration(), request_ms=ms)) for ms in (0.0, 10.0))
    assert near[0].ttft_ms + 10 == pytest.approx(far[0].ttft_ms)
