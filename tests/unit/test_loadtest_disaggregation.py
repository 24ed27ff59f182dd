"""bench_disaggregation: every arm the same requests, every layout the same points, figures that follow from samples."""

import json

import pytest

from loadtest import bench_disaggregation as bench
from loadtest.disaggregation_plan import LAYOUTS, RATES, Point, by_layout, groups, knee, num_fitting
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
    placement = "colocated" if arm in ("colocated", "stock") else "disaggregated"
    outcomes = [
        Outcome(
            n, "s", 0, ttft_ms=100.0 + n, tpot_ms=tpot_ms, jct_ms=jct_ms + n, output_tokens=4,
            sources={"engine": 60, "computed": 40}, placement=placement,
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


def test_arms_are_compared_with_plain_vllm_as_well_as_with_our_colocated_engines():
    samples = [row("1p1d", 500.0), row("colocated", 1_000.0), row("stock", 400.0)]
    found = bench.metrics_from_samples(samples)
    assert check_metrics(found) == []
    head = "gpus2_sharegpt_rate1"
    assert found[f"{head}_1p1d_jct_p99_vs_stock_ratio"] == pytest.approx(539 / 439)
    assert found[f"{head}_1p1d_jct_p99_vs_colocated_ratio"] == pytest.approx(539 / 1039)
    assert found[f"{head}_colocated_jct_p99_vs_stock_ratio"] == pytest.approx(1039 / 439)
    assert (found["compared_points_count"], found["disaggregation_wins_count"]) == (1, 1)
    assert found["compared_points_vs_stock_count"] == 1  # colocated is no disaggregation
    assert (
        found["disaggregation_wins_vs_stock_count"], found["disaggregation_loses_vs_stock_count"]
    ) == (0, 1)  # fmt: skip


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


@pytest.mark.parametrize("what", [{"commit": "1078da8"}, {"cards": ["NVIDIA H200"]}])
def test_points_that_were_not_measured_together_are_not_compared(what):
    samples = [row("1p1d", 500.0), {**row("colocated", 1_000.0), **what}, {**row("stock", 400.0), **what}]
    found = bench.metrics_from_samples(samples)
    head = "gpus2_sharegpt_rate1"
    assert {f"{head}_{arm}_jct_p99_ms" for arm in ("1p1d", "colocated", "stock")} <= found.keys()
    assert f"{head}_colocated_jct_p99_vs_stock_ratio" in found
    assert not [name for name in found if name.startswith(f"{head}_1p1d") and "_vs_" in name]
    assert "compared_points_count" not in found


def test_seeds_of_a_point_count_together_and_failures_against_the_slo():
    both = [row("1p1d", 500.0), row("1p1d", 700.0, seed=2)]
    both[1]["failed"] = 40
    found = bench.metrics_from_samples(both)
    assert found["gpus2_sharegpt_rate1_1p1d_jct_mean_ms"] == pytest.approx(619.5)
    assert found["gpus2_sharegpt_rate1_1p1d_slo_ratio"] == pytest.approx(80 / 120)
    assert found["failed_requests"] == 40


def test_every_group_has_a_point_of_each_layout_and_what_auto_does_comes_last():
    for gpus, layouts in LAYOUTS.items():
        found = list(groups(layouts, RATES["cuda"], [1]))
        num_rates = sum(len(some) for some in RATES["cuda"].values())
        pairs = {2: ["1p1d"], 4: ["1p2d", "2p1d"]}[gpus]
        wanted = (
            [{*pairs, "colocated", "stock"}] * num_rates
            + [{f"{name}_basic" for name in pairs}] * num_rates
            + [{f"{name}_auto" for name in pairs}] * 2 * len(RATES["cuda"])
        )
        assert [{point.arm for _, point in group} for group in found] == wanted
        assert all(len({(p.workload, p.rate, p.seed) for _, p in group}) == 1 for group in found)
        first = [(group[0][1].workload, group[0][1].rate) for group in found[:num_rates]]
        assert first[:4] == [("sharegpt", 16), ("loogle", 8), ("react", 4), ("sharegpt", 24)]
        assert len(set(first)) == num_rates
        for layout in layouts:
            assert layout.num_instances == (2 if gpus == 2 else 3)
            for name in layout.arms if not layout.is_stock else ():
                arm = layout.arm(name)
                flags = [f"--{key}={value}" for key, value in arm.settings.items()]
                assert config.load([f"--policy={arm.policy}", *flags]).policy == "cost"
    assert knee({1.0: 1.0, 2.0: 0.95, 4.0: 0.5}) == 2.0
    assert knee({1.0: 0.1}) is None


def test_a_short_call_measures_whole_groups_and_counts_the_starts_of_engines():
    found = list(groups(LAYOUTS[2], RATES["cuda"], [1]))
    # 3 starts and 3 points; 3 more points are 609 s
    assert num_fitting(found, 540.0, 75.0, lambda _: 64.0) == 1
    assert num_fitting(found, 609.0, 75.0, lambda _: 64.0) == 2
    assert num_fitting(found, 540.0, 75.0, lambda _: 49.0) == 2
    assert num_fitting(found, 10.0, 75.0, lambda _: 64.0) == 1  # it goes on when called again
    assert num_fitting(found, 1e9, 75.0, lambda _: 64.0) == len(found)
    assert num_fitting([], 540.0, 75.0, lambda _: 64.0) == 0
    chosen = by_layout(found[:2])
    assert [(layout.name, [p.workload for p in some]) for layout, some in chosen] == [
        (name, ["sharegpt", "loogle"]) for name in ("1p1d", "colocated", "stock")
    ]


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


def test_calls_measure_whole_groups_and_start_each_layout_once_until_nothing_is_left(tmp_path, monkeypatch):
    asked = bench.parse(["--budget-s", "540", "--resume", str(tmp_path / "runs.jsonl"), "--knee-seeds", ""])
    seen, now = [], [0.0]

    def measured(_options, layout, left, progress, end_s):
        now[0] += 75.0
        done = []
        for point in left:
            if now[0] + 64.0 > end_s:
                break
            now[0] += 64.0
            done.append((point.workload, point.rate, point.arm))
            progress.add({**row(point.arm, 500.0, rate=point.rate), "workload": point.workload})
        seen.append((layout.name, done))

    monkeypatch.setattr(bench, "measure_layout", measured)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    assert not bench.measure(asked, Progress(asked.resume, bench.said))
    assert seen == [
        ("1p1d", [("sharegpt", 16, "1p1d")]),
        ("colocated", [("sharegpt", 16, "colocated")]),
        ("stock", [("sharegpt", 16, "stock"), ("loogle", 8, "stock")]),
    ]
    calls = 1
    while calls < 40:
        begin, now[0] = len(seen), 0.0
        calls += 1
        is_whole = bench.measure(asked, Progress(asked.resume, bench.said))
        names = [name for name, _ in seen[begin:]]
        assert len(names) == len(set(names))  # engines start once
        assert all(done for _, done in seen[begin:])  # and never for nothing
        if is_whole:
            break
    points = [point for _, done in seen for point in done]
    wanted = [(p.workload, p.rate, p.arm) for group in groups(LAYOUTS[2], asked.rates, [1]) for _, p in group]
    assert sorted(points) == sorted(wanted)
    begin = len(seen)
    assert bench.measure(asked, Progress(asked.resume, bench.said))
    assert len(seen) == begin


def test_the_knee_is_measured_again_with_other_seeds_and_a_mock_has_no_plain_vllm(tmp_path, monkeypatch):
    asked = options("--rates", "sharegpt=1,2", "--knee-seeds", "2", "--layouts", "1p1d,colocated,stock")
    seen = []

    def measured(_options, layout, left, progress, end_s):
        seen.append((layout.name, [(p.arm, p.rate, p.seed) for p in left]))
        for point in left:
            progress.add(row(point.arm, 500.0, rate=point.rate, seed=point.seed))

    monkeypatch.setattr(bench, "measure_layout", measured)
    progress = Progress(tmp_path / "runs.jsonl", bench.said)
    progress.add(row("1p1d", 500.0, rate=2.0))
    assert bench.measure(asked, progress)
    assert seen == [
        ("1p1d", [("1p1d", 1.0, 1), ("1p1d_auto", 1.0, 1), ("1p1d_auto", 2.0, 1)]),
        ("colocated", [("colocated", 1.0, 1), ("colocated", 2.0, 1)]),
        ("1p1d", [("1p1d", 2.0, 2), ("1p1d_auto", 2.0, 2)]),
        ("colocated", [("colocated", 2.0, 2)]),
    ]


def test_no_knee_is_measured_again_while_a_point_was_never_measured(tmp_path, monkeypatch):
    asked = bench.parse(["--rates", "sharegpt=1,2", "--budget-s", "400", "--layouts", "1p1d,colocated,stock"])
    progress, seen, now = Progress(tmp_path / "runs.jsonl", bench.said), [], [0.0]
    for arm, rate in (("1p1d", 1.0), ("colocated", 1.0), ("stock", 2.0)):
        progress.add(row(arm, 500.0, rate=rate))

    def measured(_options, layout, left, progress, end_s):
        seen.append((layout.name, [(p.rate, p.seed) for p in left]))
        now[0] += 75.0 + 64.0 * len(left)
        for point in left:
            progress.add(row(point.arm, 500.0, rate=point.rate, seed=point.seed))

    monkeypatch.setattr(bench, "measure_layout", measured)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    assert not bench.measure(asked, progress)
    assert seen == [("stock", [(1.0, 1)])]


def test_a_result_file_keeps_the_points_that_a_call_did_not_measure_with_the_commit_that_they_are_of(
    tmp_path,
):
    path = tmp_path / "h200-disaggregation.json"
    old = [
        row("1p1d", 1.0), row("1p1d", 1.0, rate=2.0), {**row("1p1d", 1.0, seed=2), "commit": "1078da8"},
        row("1p2d", 1.0, gpus=4),
    ]  # fmt: skip
    path.write_text(json.dumps({"commit": "c3620031" * 5, "samples": old}))
    found = bench.kept(path, [row("1p1d", 2.0)])
    assert found == [
        {**one, "commit": commit}
        for one, commit in zip(old[1:], ("c362003", "1078da8", "c362003"), strict=True)
    ]
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
    for wrong in (["--layouts", "3p1d"], ["--arms", "1p1d,3p1d"]):
        with pytest.raises(SystemExit):
            bench.parse(wrong)


def test_a_call_may_leave_out_what_a_free_choice_does(tmp_path, monkeypatch):
    asked = options("--rates", "sharegpt=1,2", "--arms", "1p1d,colocated")
    seen = []

    def measured(_options, layout, left, progress, end_s):
        seen.append((layout.name, [(p.arm, p.rate) for p in left]))
        for point in left:
            progress.add(row(point.arm, 500.0, rate=point.rate))

    monkeypatch.setattr(bench, "measure_layout", measured)
    assert bench.measure(asked, Progress(tmp_path / "runs.jsonl", bench.said))
    assert seen == [
        ("1p1d", [("1p1d", 1.0), ("1p1d", 2.0)]),
        ("colocated", [("colocated", 1.0), ("colocated", 2.0)]),
    ]


def test_the_figure_has_a_row_a_workload_and_a_line_an_arm():
    samples = [row(arm, 500.0, rate=rate) for arm in ("1p1d", "colocated", "stock") for rate in (1.0, 2.0)]
    result = {"samples": samples, "metrics": bench.metrics_from_samples(samples)}
    figure = memserve_serving.end_to_end(result)
    assert len(figure.axes) == len(memserve_serving.PANELS)
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "PD-CC (colocated)",
        "1P1D-CC",
        "vLLM (colocated)",
    ]
