"""bench_pages.py: capacity at equal memory, driver calls in decode, and a file with parts that were not measured."""

import json
import time

import pytest

from loadtest import core_steps, vmm_capacity
from loadtest.bench_pages import metrics_from_samples, missing, parsed, release
from loadtest.progress import Progress
from loadtest.results import check_metrics
from loadtest.waiting_engines import EngineFailed


def served(engine: str, run: int = 0, **facts: int) -> list[dict]:
    calls = {"steps": 10, "inline": 0, "background": 0, "before": 26_000 if engine == "pages" else 0}
    common = {"engine": engine, "run": run}
    row = {
        **common, "round": 0, "wall_s": 2.0, "output_tokens": 100, "ttft_ms": [1.0], "gaps_ms": [2.0],
        "steps_ms": [3.0], "driver_calls": calls,
    }  # fmt: skip
    return [row | {"kind": "cold"}, row | {"kind": "cached"}, {**common, "kind": "facts", **facts}]


def test_capacity_is_compared_at_the_memory_that_stock_used():
    stock = {"num_blocks": 1_000, "block_tokens": 16, "used_bytes": 50_000_000}
    pages = {"num_blocks": 240, "block_tokens": 64, "used_bytes": 49_000_000}
    assert vmm_capacity.at_equal_memory(stock, pages, 1_000) == pytest.approx((15_360 + 1_000) / 16_000)


def test_memory_counts_as_it_is_after_serving_where_that_was_looked_at():
    assert vmm_capacity.used({"used_bytes": 5}) == 5
    assert vmm_capacity.used({"used_bytes": 5, "used_after_bytes": 7}) == 7


def test_the_smallest_ratio_of_the_shapes_is_the_capacity_ratio():
    eight = [*served("stock", num_blocks=52_000, block_tokens=16, used_bytes=1 << 37)]
    eight += served("pages", 1, num_blocks=12_900, block_tokens=64, used_bytes=1 << 37)
    common = {"kind": "capacity", "shape": "34b_tp1", "token_bytes": 245_760, "used_bytes": 1 << 37, "run": 0}
    other = [
        {**common, "engine": "stock", "num_blocks": 10_000, "block_tokens": 16},
        {**common, "engine": "pages", "num_blocks": 2_450, "block_tokens": 64},
    ]
    found = metrics_from_samples([*eight, *other])
    assert found["capacity_ratio"] == found["capacity_34b_tp1_ratio"] == pytest.approx(0.98)
    assert found["capacity_8b_tp1_ratio"] == pytest.approx(12_900 * 64 / (52_000 * 16))
    assert found["capacity_shapes_count"] == 2
    assert found["throughput_ratio"] == 1.0
    assert check_metrics(found) == []


def test_what_was_not_measured_has_no_metric():
    found = metrics_from_samples(served("pages", num_blocks=10, block_tokens=64, used_bytes=0))
    assert not {"capacity_ratio", "release_gib_per_s", "throughput_ratio"} & found.keys()
    assert found["decode_driver_calls_count"] == 0
    assert found["decode_steps_count"] == 20
    assert found["start_driver_calls_count"] == 26_000


def test_kv_bytes_of_the_shapes_are_those_of_the_geometry_table():
    found = {name: vmm_capacity.token_bytes(config) for name, config in vmm_capacity.SHAPES.items()}
    assert found == {"8b_tp1": 131_072, "70b_tp4": 81_920, "34b_tp1": 245_760, "0_5b_tp1": 12_288}


def test_calls_count_for_the_step_in_which_they_were_made(tmp_path):
    path = tmp_path / "steps"
    lines = [
        "1.0 5 4 900 100 0",  # prefill
        "2.0 5 4 4 100 0",  # the first of decode: prefill's end is in it
        "3.0 5 4 4 101 0",
        "4.0 5 4 4 101 3",
        "5.0 5 4 600 150 3",  # a new prompt
        "6.0 5 4 4 151 3",
    ]
    path.write_text("\n".join(lines) + "\n")
    assert core_steps.decode_steps(path, 1.5, 9.0, 4) == [5.0, 5.0]
    calls = core_steps.driver_calls(path, 1.5, 9.0, 4)
    assert calls == {"steps": 2, "inline": 1, "background": 3, "before": 100}


def test_a_release_of_the_same_run_gives_the_rates_of_its_own_measurement(monkeypatch, tmp_path):
    steps = {f"steps_{name}_ms": [5.0] for name in ("before", "during", "after", "regain")}
    pressed = {
        "round": 0, "is_pressed": True, "released_bytes": 32 << 30, "regained_bytes": 32 << 30, "pressed_s": 1.0,
        "first_s": 1.01, "seen_s": 1.5, "answered_s": 1.5, "regain_s": 2.0, "regained_s": 2.5, **steps,
    }  # fmt: skip
    asked = []

    def measured(options, _folder):
        asked.append(options)
        return [pressed, {"round": 0, "is_pressed": False, **steps}]

    monkeypatch.setattr("loadtest.bench_release.measure", measured)
    options, progress = parsed(["--model-dir", "m", "--release-rounds", "3"]), Progress(None)
    release(options, tmp_path, progress)
    release(options, tmp_path, progress)
    assert [(each.rounds, each.device, each.model_dir) for each in asked] == [(3, "cuda", "m")]
    found = metrics_from_samples(
        [*served("pages", num_blocks=1, block_tokens=64, used_bytes=0), *progress.samples]
    )
    assert found["release_gib_per_s"] == pytest.approx(64.0)
    assert found["release_step_p99_ratio"] == 1.0
    assert "release" not in missing(options, progress.samples)
    assert check_metrics(found) == []


def test_every_shape_gets_both_engines_and_one_that_fails_loses_only_itself(monkeypatch, tmp_path):
    begun, asked = [], []

    class Waiting:
        def __init__(self, _folder):
            pass

        def begin(self, name, words):
            begun.append((name, words[0], words[-2:]))

        def measure(self, name, _limit_s, *, in_pages):
            asked.append((name, in_pages))
            if name == "34b_tp1-stock":
                raise EngineFailed("no memory")
            return {"samples": [], "num_blocks": 5, "block_tokens": 16, "used_bytes": 9}

        def close(self):
            begun.append("closed")

    monkeypatch.setattr(vmm_capacity, "Waiting", Waiting)
    models = {}
    for shape in ("70b_tp4", "34b_tp1"):
        models[shape] = tmp_path / shape
        models[shape].mkdir()
        (models[shape] / "config.json").write_text(json.dumps(vmm_capacity.SHAPES[shape]))
    rows = list(
        vmm_capacity.measure(
            tmp_path, models, {("70b_tp4", "stock")}, end_s=time.monotonic() + 99, engine_s=9
        )
    )
    assert [name for name, *_ in begun[:-1]] == ["70b_tp4-pages", "34b_tp1-stock", "34b_tp1-pages"]
    assert begun[0][1:] == ("loadtest.pages_engine", ["pages", str(models["70b_tp4"])])
    assert begun[-1] == "closed"
    assert asked == [("70b_tp4-pages", True), ("34b_tp1-stock", False), ("34b_tp1-pages", True)]
    assert [(row["shape"], row["engine"], row["token_bytes"]) for row in rows] == [
        ("70b_tp4", "pages", 81_920), ("34b_tp1", "pages", 245_760),
    ]  # fmt: skip
