"""What bench_cost_model.py makes of its samples, and which points it runs."""

import argparse
import json

import msgspec
import pytest

from loadtest import bench_cost_model as bench
from loadtest.cost_engine import off_grid
from loadtest.results import check_metrics
from shared.costmodel.model import CostModel
from shared.wire.cost import CostCoefficients, ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=500,
)
COST = CostCoefficients(shape=SHAPE, device="cpu", matmul_ms_per_gflop=100.0, step_overhead_ms=5.0)
MODEL = CostModel(COST)
LINK = {"all_reduce_ms": 0.5, "all_reduce_ms_per_gb": 0.0}
TWO_RANKS = CostModel(msgspec.structs.replace(COST, tp=2, **LINK))
OPTIONS = argparse.Namespace(seed=1, block_tokens=32, longest=4000, points=40)


def off(point, ms, tp=1, **fields):
    return {"device": "cpu", "tp": tp, "part": "off", "point": point, "waited_ratio": 0.0, "ms": ms, **fields}


def prompt(point, tokens, cached, factor, tp=1):
    model = MODEL if tp == 1 else TWO_RANKS
    ms = model.prefill_ms(tokens, cached) * factor
    return off(point, ms, tp, kind="prefill", prompts=[[tokens, cached]])


SAMPLES = [
    {"device": "cpu", "tp": 1, "part": "frame", "frame": {}},
    {
        "device": "cpu", "tp": 1, "part": "model", "profile": -1, "arch": [0.0, 0.0, 0.0, 0.0, 10.0],
        "coefficients": msgspec.to_builtins(COST),
    },
    prompt(0, 1000, 0, 1.25),
    prompt(0, 1000, 0, 9.0),  # a slower round
    prompt(1, 1000, 480, 1.0),
    off(2, 10.0, kind="decode", num_decodes=4, context_tokens=100),
    {**prompt(0, 2000, 0, 1.0, tp=2), "part": "grid", "profile": 0},
    {
        **off(0, TWO_RANKS.decode_step_ms(1, 100), 2, kind="decode", num_decodes=1, context_tokens=100),
        "part": "grid",
        "profile": 0,
    },
    prompt(0, 1000, 0, 1.0, tp=2),
]  # fmt: skip


def test_errors_are_of_the_fastest_rounds():
    metrics = bench.metrics_from_samples(SAMPLES)
    assert check_metrics(metrics) == []
    assert metrics["cpu_prefill_p90_error_ratio"] == pytest.approx(0.2)
    assert metrics["cpu_prefill_median_error_ratio"] == pytest.approx(0.0)
    assert metrics["cpu_decode_median_error_ratio"] == pytest.approx(0.5, abs=0.02)
    whole, half = MODEL.prefill_ms(1000), MODEL.prefill_ms(1000, 480)
    assert metrics["cpu_crossover_error_ratio"] == pytest.approx((1.25 * whole - half) / (whole - half) - 1)
    assert metrics["cpu_tp2_median_error_ratio"] == pytest.approx(0.0, abs=1e-3)
    assert metrics["cpu_tp2_arch_median_error_ratio"] > 0.1
    assert len(bench.table(metrics)) == 1 + len([k for k in metrics if "p90" not in k])


def test_a_batch_is_its_middle_round_as_its_beginning_may_be_late():
    rows = [off(3, ms, kind="batch", prompts=[[100, 0], [200, 0]]) for ms in (3.4, 36.2, 35.9)]
    assert [one.ms for one in bench.truest([*rows, *SAMPLES], "off") if one.kind == "batch"] == [35.9]


def test_points_are_the_same_for_the_same_seed_and_fit_the_engine():
    points = off_grid(OPTIONS)
    assert points == off_grid(OPTIONS)
    for point in points:
        assert all(0 <= cached < tokens <= 4000 and cached % 32 == 0 for tokens, cached in point.prompts)
        assert point.behind == (len(point.prompts) > 1)


def test_samples_of_other_devices_are_kept_and_fitted_again(tmp_path):
    path = tmp_path / "cost-model.json"
    assert bench.kept(path, "cpu") == []
    frame = msgspec.structs.replace(COST, matmul_ms_per_gflop=0.0, step_overhead_ms=0.0)
    grid = [{**prompt(0, n, 0, 1.0), "part": "grid", "profile": 0} for n in (16, 100, 500, 1000, 3000)]
    kept = [{"device": "cpu", "tp": 1, "part": "frame", "frame": msgspec.to_builtins(frame)}, *grid]
    two = prompt(0, 1000, 0, 1.0, tp=2)
    samples = [*kept, SAMPLES[1], two, {"device": "h200", "tp": 1, "part": "off"}]
    path.write_text(json.dumps({"samples": samples}))
    found = bench.kept(path, "h200")
    assert [row for row in found if row["part"] != "model"] == [*kept, two]
    models = [row for row in found if row["part"] == "model"]
    assert [(row["device"], row["tp"], row["profile"]) for row in models] == [("cpu", 1, -1), ("cpu", 1, 0)]
    fitted = CostModel(msgspec.convert(models[0]["coefficients"], CostCoefficients))
    assert fitted.prefill_ms(2000) == pytest.approx(MODEL.prefill_ms(2000), rel=0.05)
