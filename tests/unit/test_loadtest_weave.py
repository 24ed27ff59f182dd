"""What bench_weave.py makes of its samples."""

import pytest

from loadtest import bench_weave as bench
from loadtest import weave_engine
from loadtest.results import check_metrics


def steps(shape: str, ranks: int, tokens: int, **modes: float) -> list[dict]:
    common = {"kind": "step", "shape": shape, "ranks": ranks, "layers": 4, "tokens": tokens, "woven": 0}
    return [
        {**common, "mode": mode.replace("_", "-"), "ms": ms * factor, "engine": "", "round": number}
        for mode, ms in modes.items()
        for number, factor in enumerate((0.9, 1.0, 2.0))
    ]


SAMPLES = [
    *steps("70b", 4, 1024, stock=1.0, full=2.0, fuse=0.9, stock_alone=0.8),  # short: no part of the gain
    *steps("70b", 4, 4096, stock=10.0, stock_fused=9.0, full=7.5, fuse=8.0, stock_alone=7.0),
    *steps("70b", 4, 8192, stock=20.0, stock_fused=21.0, full=16.0, fuse=18.0, stock_alone=16.0),
    *steps("70b", 8, 4096, stock=10.0, full=8.0, fuse=9.0),
    *steps("8b", 2, 4096, stock=10.0, full=10.0, fuse=10.0, stock_alone=9.0),
    {
        "kind": "failed",
        "engine": "stock-fused",
        "shape": "8b",
        "ranks": 2,
        "layers": 4,
        "why": "exit status 1",
    },
]


def test_the_gain_is_that_over_the_better_stock_and_of_the_most_ranks():
    metrics = bench.metrics_from_samples(SAMPLES)
    assert check_metrics(metrics) == []
    assert metrics["70b_tp4_gain_ratio"] == pytest.approx((9.0 / 7.5 + 20.0 / 16.0) / 2)
    assert metrics["prefill_gain_ratio"] == metrics["70b_tp8_gain_ratio"] == pytest.approx(1.25)
    assert metrics["prefill_gain_ranks_count"] == 8
    assert metrics["failed_count"] == 1


def test_communication_is_won_back_in_part_whole_or_more_than_whole():
    metrics = bench.metrics_from_samples([s for s in SAMPLES if s["ranks"] != 8])
    assert metrics["communication_recovered_ratio"] == pytest.approx((1.5 / 2.0 + 4.0 / 4.0) / 2)
    assert metrics["8b_tp2_recovered_ratio"] == 0.0


def test_without_the_counterfactual_of_the_most_ranks_nothing_is_said_of_communication():
    assert "communication_recovered_ratio" not in bench.metrics_from_samples(SAMPLES)


def test_the_table_has_a_line_for_each_length_and_a_hole_for_what_is_missing():
    lines = bench.table(SAMPLES)
    assert len(lines) == 1 + 5
    assert lines[-1].split()[-1] == "1.000"
    assert "-" in lines[-1].split()


def test_groups_are_shapes_ranks_and_layers():
    assert bench.groups_of("70b:4:1,8b:2:32") == [("70b", 4, 1), ("8b", 2, 32)]
    with pytest.raises(ValueError, match="13b"):
        bench.groups_of("13b:2:4")


def test_serving_is_said_by_chunk():
    samples = [
        {"kind": "serving", "shape": "70b", "ranks": 4, "layers": 16, "step_tokens": 2048, "tokens": 1000, "mode": mode,
         "s": s}
        for mode, s in (("full", 1.0), ("full", 3.0), ("full", 2.0), ("fuse", 2.2), ("stock", 2.5))
    ]  # fmt: skip
    metrics = bench.metrics_from_samples(samples)
    assert check_metrics(metrics) == []
    assert metrics["70b_16_layers_tp4_serving_2048_full_tokens_per_s"] == 500
    assert metrics["70b_16_layers_tp4_serving_gain_2048_ratio"] == pytest.approx(1.25)


def test_served_lengths_are_sharegpts():
    lengths = weave_engine.sharegpt_lengths(4_000, 1)
    prompts, answers = (sorted(values) for values in zip(*lengths, strict=True))
    assert abs(prompts[2_000] / 1730 - 1) < 0.1
    assert abs(answers[2_000] / 415 - 1) < 0.1
    assert abs(answers[3_600] / 834 - 1) < 0.1
    assert lengths == weave_engine.sharegpt_lengths(4_000, 1)
