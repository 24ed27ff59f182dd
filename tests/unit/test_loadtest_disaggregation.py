"""bench_disaggregation: every arm the same requests, every layout the same points, figures that follow from samples."""

import json

import pytest

from loadtest import bench_disaggregation as bench
from loadtest.disaggregation_plan import LAYOUTS, RATES, Point, allowance_s, knee, points
from loadtest.figures import memserve_serving
from loadtest.locality_cluster import Start
from loadtest.outcomes import Outcome
from loadtest.progress import Progress
from loadtest.results import check_metrics
from loadtest.workloads import stats
from loadtest.workloads.request import Segment
from services.scheduler import config


def options(*words: str):
    return bench.parse(["--mock", "--knee-seeds", "", *words])


def row(
    arm: str, jct_ms: float, *, rate: float = 1.0, seed: int = 1, tpot_ms: float = 10.0, gpus: int = 2
) -> dict:
    asked = options("--gpus", str(gpus), "--slo-ttft-ms", "500", "--slo-tpot-ms", "25")
    outcomes = [
        Outcome(
            n, "s", 0, ttft_ms=100.0 + n, tpot_ms=tpot_ms, jct_ms=jct_ms + n, output_tokens=4,
            sources={"engine": 60, "computed": 40}, placement="disaggregated" if arm != "colocated" else "colocated",
        )
        for n in range(40)
    ]  # fmt: skip
    layout = next(one for one in LAYOUTS[gpus] if arm in one.arms)
    return bench.row_of(asked, layout, Point(arm, "sharegpt", rate, seed), outcomes)


def test_figures_of_arms_come_from_their_requests_and_compare_with_colocated_and_without_caching():
    samples = [row("1p1d", 500.0), row("1p1d_basic", 800.0), row("colocated", 1_000.0, tpot_ms=30.0)]
    found = bench.metrics_from_samples(samples)
    assert check_metrics(found) == []
    head = "gpus2_sharegpt_rate1"
    assert found[f"{head}_1p1d_jct_mean_ms"] == pytest.approx(519.5)
    assert found[f"{head}_1p1d_jct_mean_low_ms"] < 519.5 < found[f"{head}_1p1d_jct_mean_high_ms"]
    assert found[f"{head}_1p1d_jct_p99_ms"] == 539
    assert found[f"{head}_1p1d_jct_p99_vs_colocated_ratio"] == pytest.approx(539 / 1039)
    assert found[f"{head}_1p1d_jct_p99_vs_basic_ratio"] == pytest.approx(539 / 839)
    assert found[f"{head}_1p1d_goodput_requests_per_s"] == 2.0
    assert found[f"{head}_colocated_goodput_requests_per_s"] == 0.0  # 30 ms a token
    assert found[f"{head}_1p1d_hit_ratio"] == pytest.approx(0.6)
    assert found[f"{head}_1p1d_disaggregated_ratio"] == 1.0
    assert (found["compared_points_count"], found["disaggregation_wins_count"]) == (1, 1)
    assert bench.metrics_from_samples(samples[::-1]) == found
    worse = bench.metrics_from_samples([row("1p1d", 2_000.0), row("colocated", 1_000.0)])
    assert (worse["disaggregation_wins_count"], worse["disaggregation_loses_count"]) == (0, 1)


def test_what_auto_does_is_said_of_points_where_handing_off_wins_and_where_it_loses():
    chosen = row("1p1d_auto", 900.0)
    chosen["disaggregated"] = 10
    samples = [row("1p1d", 2_000.0), chosen, row("colocated", 1_000.0)]
    winning = [
        row("1p1d", 500.0, rate=2.0),
        row("1p1d_auto", 500.0, rate=2.0),
        row("colocated", 1_000.0, rate=2.0),
    ]
    found = bench.metrics_from_samples([*samples, *winning])
    assert found["auto_hands_off_where_it_loses_ratio"] == 0.25
    assert found["auto_hands_off_where_it_wins_ratio"] == 1.0
    assert found["compared_points_count"] == 2
    assert "auto_hands_off_where_it_wins_ratio" not in bench.metrics_from_samples(samples)
    assert check_metrics(found) == []


def test_seeds_of_a_point_count_together_and_failures_against_the_slo():
    both = [row("1p1d", 500.0), row("1p1d", 700.0, seed=2)]
    both[1]["failed"] = 40
    found = bench.metrics_from_samples(both)
    assert found["gpus2_sharegpt_rate1_1p1d_jct_mean_ms"] == pytest.approx(619.5)
    assert found["gpus2_sharegpt_rate1_1p1d_slo_ratio"] == pytest.approx(80 / 120)
    assert found["failed_requests"] == 40


def test_every_layout_begins_with_the_same_points_and_auto_comes_last():
    for gpus, layouts in LAYOUTS.items():
        for layout in layouts:
            assert layout.num_instances == (2 if gpus == 2 else 3)
            mine = list(points(layout, RATES["cuda"], [1]))
            plain = [(p.workload, p.rate) for p in mine if not p.arm.endswith("_auto")]
            assert plain == [
                (p.workload, p.rate) for p in points(layouts[1], RATES["cuda"], [1])
            ]  # colocated's
            assert [p.arm.endswith("_auto") for p in mine] == sorted(p.arm.endswith("_auto") for p in mine)
            assert len(plain) == sum(len(some) for some in RATES["cuda"].values())
            for name in layout.arms:
                arm = layout.arm(name)
                flags = [f"--{key}={value}" for key, value in arm.settings.items()]
                assert config.load([f"--policy={arm.policy}", *flags]).policy == "cost"
    assert allowance_s(90.0, 3) == 30.0
    assert knee({1.0: 1.0, 2.0: 0.95, 4.0: 0.5}) == 2.0
    assert knee({1.0: 0.1}) is None


def test_every_arm_gets_the_same_requests_in_tokens_of_its_own():
    for name in RATES["cpu"]:
        one, other = (
            bench.workload(options(), Point(arm, name, 2.0, 1), 4.0, 20.0) for arm in ("1p1d", "colocated")
        )
        assert len(one) > 20
        assert [(r.arrival_ms, r.depends_on, r.prompt_tokens, r.output_tokens) for r in one] == [
            (r.arrival_ms, r.depends_on, r.prompt_tokens, r.output_tokens) for r in other
        ]
        assert stats.cached_tokens(one, 32) == stats.cached_tokens(other, 32)
        contents = [
            {p.content for r in of for p in r.prompt if isinstance(p, Segment)} for of in (one, other)
        ]
        assert contents[0].isdisjoint(contents[1])


def test_finished_points_are_not_measured_again_and_layouts_share_the_time(tmp_path, monkeypatch):
    asked = options(
        "--rates", "sharegpt=1,2", "--budget-s", "300", "--point-s", "10", "--layouts", "1p1d,colocated"
    )
    progress = Progress(tmp_path / "runs.jsonl", bench.said)
    progress.add(row("1p1d", 500.0, rate=2.0))
    seen, now = [], [0.0]

    def measured(_options, layout, left, progress, end_s):
        seen.append((layout.name, [(p.arm, p.rate) for p in left], end_s))
        now[0] = end_s
        for point in left:
            progress.add(row(point.arm, 500.0, rate=point.rate, seed=point.seed))

    monkeypatch.setattr(bench, "measure_layout", measured)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    assert bench.measure(asked, progress)
    pairs = [("1p1d", 1.0), ("1p1d_auto", 1.0), ("1p1d_auto", 2.0)]
    assert seen == [("1p1d", pairs, 150.0), ("colocated", [("colocated", 1.0), ("colocated", 2.0)], 300.0)]
    again = Progress(tmp_path / "runs.jsonl", bench.said)
    assert bench.measure(asked, again)
    assert len(seen) == 2
    asked.knee_seeds, now[0] = [2], 0.0
    assert bench.measure(asked, again)
    assert [points for _, points, _ in seen[2:]] == [
        [("1p1d", 2.0), ("1p1d_auto", 2.0)],
        [("colocated", 2.0)],
    ]


def test_a_result_file_keeps_its_points_of_other_numbers_of_gpus(tmp_path):
    path = tmp_path / "h200-disaggregation.json"
    old = [row("1p1d", 1.0), row("1p2d", 1.0, gpus=4)]
    path.write_text(json.dumps({"samples": old}))
    assert bench.kept(path, [row("1p1d", 2.0)]) == [old[1]]
    assert bench.kept(tmp_path / "none.json", old) == []


def test_gpus_get_the_8b_shape_with_random_weights_and_cpus_the_demo_model(tmp_path):
    asked = bench.parse(["--worker", "enforce_eager=true"])
    start = Start(asked.device, asked.engine, "", 0, asked.set, asked.worker)
    flags = start.flags(tmp_path, LAYOUTS[2][0].words)
    assert flags == start.flags(tmp_path, LAYOUTS[2][0].words)  # a second start finds the folder there
    assert json.loads((tmp_path / "model-8b" / "config.json").read_text())["num_hidden_layers"] == 32
    assert "kv_space=own" not in flags
    worker = start.sections()["worker"]
    assert (worker["load_format"], worker["enforce_eager"], worker["max_num_seqs"]) == ("dummy", True, 256)
    on_cpu = Start("cpu", "vllm")
    assert on_cpu.sections() == {}
    assert "kv_space=own" in on_cpu.flags(tmp_path, [])
    with pytest.raises(SystemExit):
        bench.parse(["--layouts", "3p1d"])


def test_the_figure_has_a_row_a_workload_and_a_line_an_arm():
    samples = [row(arm, 500.0, rate=rate) for arm in ("1p1d", "colocated") for rate in (1.0, 2.0)]
    result = {"samples": samples, "metrics": bench.metrics_from_samples(samples)}
    figure = memserve_serving.end_to_end(result)
    assert len(figure.axes) == len(memserve_serving.PANELS)
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["PD-CC (colocated)", "1P1D-CC"]
