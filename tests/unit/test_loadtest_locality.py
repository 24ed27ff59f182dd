"""bench_locality: metrics from samples, equal requests for every arm, capacity, and its figure."""

import pytest

from loadtest import bench_locality, bench_locality_cluster, verify_results
from loadtest.bench_locality import ARMS, Progress, capacity_per_s, metrics_from_samples, sample_of, workload
from loadtest.figures import memserve
from loadtest.locality_cluster import LocalityCluster
from loadtest.outcomes import Outcome
from loadtest.results import check_metrics, load_result
from loadtest.workloads import stats
from loadtest.workloads.request import salted
from shared.settings import read_toml


def outcome(number: int, ttft_ms: float, jct_ms: float = 10.0, **more) -> Outcome:
    one = Outcome(
        number, "s", 0, sent_ms=number * 10.0, ttft_ms=ttft_ms, jct_ms=jct_ms, output_tokens=4, **more
    )
    one.sources, one.instances, one.placement = {"engine": 75, "computed": 25}, ["prefill-1"], "disaggregated"
    return one


def samples() -> list[dict]:
    found: list[dict] = [{"kind": "capacity", "ratio": 2, "capacity_per_s": 8.0}]
    for seed, factor in ((1, 1.0), (2, 2.0), (3, 4.0)):
        for arm, p99 in (("session", 1000.0), ("prompt_tree", 500.0), ("cost", 400.0 * factor)):
            row = sample_of(
                [outcome(0, p99), outcome(1, 1.0)], kind="run", arm=arm, ratio=2, seed=seed, rate_per_s=5.6
            )
            found.append(row)
    return found


def test_ratios_are_medians_of_runs_with_the_same_requests():
    found = metrics_from_samples(samples())
    assert found["p99_ttft_vs_session_ratio"] == found["share2_cost_p99_ttft_vs_session_ratio"] == 0.8
    assert found["share2_prompt_tree_p99_ttft_vs_session_ratio"] == 0.5
    assert found["share2_session_hit_ratio"] == 0.75
    assert found["share2_session_capacity_requests_per_s"] == 8.0
    assert found["failed_requests"] == 0
    assert check_metrics(found) == []
    without_cost = [row for row in samples() if row.get("arm") != "cost"]
    assert metrics_from_samples(without_cost)["p99_ttft_vs_session_ratio"] == 0.5


def test_the_order_on_the_cpu_cluster_is_compared_with_the_figures_where_documents_are_shared():
    rows = samples()  # cost is beside session in its P99, and both arms hit as session does
    found = bench_locality_cluster.metrics_from_samples(rows)
    assert bench_locality_cluster.order_of(found) == {
        "share2 cost: lower P99 of TTFT": True,
        "share2 cost: more hits": False,
        "share2 prompt_tree: lower P99 of TTFT": True,
        "share2 prompt_tree: more hits": False,
    }
    assert found["figure15_order_ratio"] == 0.5
    assert check_metrics(found) == []
    assert found.items() >= metrics_from_samples(rows).items()
    unshared = [row | {"ratio": 1} for row in rows]
    assert "figure15_order_ratio" not in bench_locality_cluster.metrics_from_samples(unshared)


@pytest.mark.parametrize("words", [["--device", "cuda"], ["--simulate", "h200"], ["--cost", "file"]])
def test_the_measurement_on_the_cpu_cluster_refuses_other_places(words):
    with pytest.raises(SystemExit, match="the CPU cluster only"):
        bench_locality_cluster.parse(words)
    assert bench_locality_cluster.parse(["--scale", "0.5"]).max_lag_ms == bench_locality_cluster.MAX_LAG_MS


def test_every_arm_gets_the_same_requests_in_tokens_of_its_own():
    options = bench_locality.parse(["--sessions", "10"])
    one, other = (workload(options, 2, 1, 5.0, arm) for arm in ("session", "cost"))
    for a, b in zip(one, other, strict=True):
        assert (a.arrival_ms, a.session, a.depends_on, a.output_tokens) == (
            b.arrival_ms, b.session, b.depends_on, b.output_tokens
        )  # fmt: skip
        assert a.prompt_tokens == b.prompt_tokens
        assert {part.content for part in a.prompt}.isdisjoint(part.content for part in b.prompt)
    assert stats.cached_tokens(one, 32) == stats.cached_tokens(other, 32)
    assert salted(one, "x") == salted(one, "x") != salted(one, "y")
    again = workload(options, 2, 2, 5.0, "session")
    assert [r.arrival_ms for r in again] != [r.arrival_ms for r in one]


def test_capacity_leaves_out_the_last_lonely_answers():
    ended = [outcome(number, 1.0, jct_ms=1_000 - number * 10 + number * 100) for number in range(10)]
    assert capacity_per_s([*ended[:9], outcome(9, 1.0, jct_ms=99_999)]) == pytest.approx(9 / 1.8)
    with pytest.raises(RuntimeError, match="no request was answered: refused"):
        capacity_per_s([Outcome(0, "s", 0, error="refused")])


def test_finished_runs_are_kept_between_calls(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    first = Progress(path)
    for row in samples()[:2]:
        first.add(row)
    second = Progress(path)
    assert second.samples == samples()[:2]
    assert second.has(kind="run", arm="session", ratio=2, seed=1) is not None
    assert second.has(kind="run", arm="session", ratio=2, seed=2) is None
    assert "p99" in capsys.readouterr().out


def test_arms_are_known_policies_and_an_unknown_one_is_refused():
    from services.scheduler import config

    for arm in ARMS.values():
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in arm.settings.items()]
        assert config.load([f"--policy={arm.policy}", *flags]).policy == arm.policy
    with pytest.raises(SystemExit):
        bench_locality.parse(["--arms", "nonsense"])


def test_a_change_of_policy_is_a_change_of_one_section_of_the_clusters_file(tmp_path):
    cluster = LocalityCluster(
        tmp_path, [], {"worker": {"load_format": "dummy", "threads": 2}}, ARMS["session"]
    )
    cluster._write(ARMS["cost"])
    found = read_toml(tmp_path / "locality.toml")
    assert found == {
        "worker": {"load_format": "dummy", "threads": 2},
        "scheduler": {"policy": "cost", "kv_fetch": "auto"},
    }


@pytest.mark.slow
def test_the_simulator_runs_the_same_arms_and_finds_more_by_prompt_tree_than_by_session(tmp_path):
    words = [
        "--simulate",
        "h200",
        "--sessions",
        "24",
        "--ratios",
        "2",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert bench_locality.main([*words, "--arms", "session,prompt_tree,cost"]) == 0
    found = load_result(tmp_path / "simulated-locality.json")
    assert verify_results.problems_of(tmp_path / "simulated-locality.json", root=tmp_path) == []
    metrics = found["metrics"]
    assert metrics["share2_prompt_tree_hit_ratio"] > metrics["share2_session_hit_ratio"] + 0.05
    assert metrics["share2_cost_hit_ratio"] > metrics["share2_session_hit_ratio"] + 0.05
    again = tmp_path / "again"
    assert bench_locality.main([*words[:-1], str(again), "--arms", "session,prompt_tree,cost"]) == 0
    assert load_result(again / "simulated-locality.json")["samples"] == found["samples"]


def test_the_figure_is_drawn_from_the_metrics_of_what_there_is():
    rows = samples()
    result = {"samples": rows, "metrics": metrics_from_samples(rows)}
    for pair, num_axes in (((result, None), 2), ((result, result), 4)):
        figure = memserve.locality(*pair)
        assert not isinstance(figure, str)
        assert len(figure.axes) == num_axes
        legends = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
        texts = {text.get_text() for legend in legends for text in legend.get_texts()}
        assert texts == {"session", "prompt tree", "cost (eq 1 and 2)"}
    assert "make measure" in str(memserve.locality(None, None))
