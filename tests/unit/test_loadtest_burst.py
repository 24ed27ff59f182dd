"""bench_burst: metrics follow from the samples, systems get the same requests, one point after the other."""

import json

import pytest

from loadtest import bench_burst, burst_plan
from loadtest.burst_plan import BURST, DRAM, FCFS, PEER, STABLE, SYSTEMS, Point, Stable
from loadtest.progress import Progress
from loadtest.results import check_metrics
from loadtest.workloads.tokens import TokenRange, prompt_ids

PAIRS = burst_plan.lengths("sharegpt", 0.1, 512)
SIZES = {"factor": 2.0, "burst_s": 5.0, "stable_s": 5.0}


def row(
    system: str, ttft_ms: list[float], *, load: str = BURST, seed: int = 1, rct_ms: float = 100.0
) -> dict:
    count = len(ttft_ms)
    return {
        "kind": "point", "workload": "sharegpt", "load": load, "system": system, "seed": seed, "failed": 0,
        "burst_from_ms": 10.0 if load == BURST else 0.0, "at_ms": [10.0 * i for i in range(count)],
        "ttft_ms": ttft_ms, "rct_ms": [rct_ms] * count, "tpot_ms": [{FCFS: 1.0, DRAM: 4.0, PEER: 2.0}[system]] * count,
        "tbt_p99_ms": 9.0, "peak_kv_bytes": 10**9, "counts": {"swapped_out_bytes": 2 * 10**9},
    }  # fmt: skip


def test_gain_is_of_the_bursts_arrivals_and_of_the_seeds_that_both_systems_have():
    samples = [
        {"kind": "stable", "workload": "sharegpt"},
        row(FCFS, [1.0, 400.0, 600.0]), row(PEER, [900.0, 20.0, 30.0], rct_ms=110.0), row(DRAM, [1.0, 100.0, 300.0]),
        row(FCFS, [1.0, 100.0, 100.0], seed=2), row(PEER, [1.0, 10.0, 10.0], seed=2),
        row(FCFS, [1.0, 9.0, 9e9], seed=3),
        row(FCFS, [5.0, 5.0], load=STABLE), row(PEER, [5.0, 5.0], load=STABLE, rct_ms=101.0),
    ]  # fmt: skip
    found = bench_burst.metrics_from_samples(samples)
    assert found["ttft_p90_gain_ratio"] == pytest.approx((20.0 + 10.0) / 2)
    assert found["worst_ttft_p90_gain_ratio"] == pytest.approx(10.0)
    assert found["seeds_count"] == 2
    assert found["rct_ratio"] == pytest.approx(1.05)
    assert found["tpot_of_dram_ratio"] == pytest.approx(0.5)
    assert found["uncontended_ratio"] == pytest.approx(1.01)
    assert found["burst_cfs_peer_ttft_p90_ms"] == 30.0
    assert check_metrics(found) == []


def test_another_workload_has_names_of_its_own():
    samples = [row(FCFS, [1.0, 8.0]) | {"workload": "arxiv"}, row(PEER, [1.0, 2.0]) | {"workload": "arxiv"}]
    found = bench_burst.metrics_from_samples(samples)
    assert found["arxiv_ttft_p90_gain_ratio"] == 4.0
    assert "ttft_p90_gain_ratio" not in found


def test_a_file_without_points_has_no_ratio():
    assert bench_burst.metrics_from_samples([{"kind": "stable"}]) == {"failed_requests": 0.0}


def test_systems_are_asked_the_same_at_the_same_times_in_other_tokens():
    every = [burst_plan.requests(Point("sharegpt", BURST, name, 1), PAIRS, 4.0, **SIZES) for name in SYSTEMS]
    shape = [[(one.arrival_ms, one.prompt_tokens, one.output_tokens) for one in some] for some in every]
    assert shape[0] == shape[1] == shape[2]
    first = [tuple(prompt_ids(some[0].prompt, TokenRange())) for some in every]
    assert len(set(first)) == 3


def test_a_burst_doubles_the_rate_behind_25_prompts():
    found = burst_plan.requests(
        Point("sharegpt", BURST, FCFS, 1), PAIRS, 4.0, factor=2.0, burst_s=100.0, stable_s=0.0
    )
    burst = [one for one in found if one.arrival_ms > found[24].arrival_ms]
    assert found[-1].arrival_ms <= found[24].arrival_ms + 100_000
    assert 650 < len(burst) < 950
    assert 3.0 < 24_000 / (found[24].arrival_ms - found[0].arrival_ms) < 6.0


def test_every_point_is_there_once_and_a_seeds_bursts_come_first():
    every = list(burst_plan.points("sharegpt", [1, 2, 3], SYSTEMS))
    assert len(set(every)) == len(every) == 3 * 5
    assert [(one.load, one.system) for one in every[:3]] == [(BURST, name) for name in SYSTEMS]
    assert [one.seed for one in every] == sorted(one.seed for one in every)


def test_arxivs_lengths_fit_the_context_and_have_the_papers_median():
    pairs = sorted(burst_plan.lengths("arxiv", 1.0, 16_384).pairs)
    assert all(prompt + output <= 16_384 for prompt, output in pairs)
    assert 6_000 < pairs[len(pairs) // 2][0] < 8_000


def test_the_pool_is_what_the_profile_found_and_three_tenths(tmp_path):
    path = tmp_path / "p.json"
    case = {"stable_rate_per_s": 5.0, "peak_kv_bytes": 1_000, "case": "x"}
    path.write_text(json.dumps({"samples": [case]}))
    found = burst_plan.stable_from(path, "x", "sharegpt")
    assert (found.rate_per_s, found.pool_bytes, found.source) == (5.0, 1_300, "p:x")


def test_what_is_finished_is_not_measured_again(tmp_path):
    options = bench_burst.parse(["--device", "cpu", "--quick"])
    file = tmp_path / "points.jsonl"
    first = row(FCFS, [1.0])
    file.write_text(json.dumps(first) + "\n")
    stable = Stable("sharegpt", 4.0, 1_000, "test")
    points = bench_burst.Measuring(options, stable, Progress(file), tmp_path, 0.0).points()
    assert len(points) == 4
    assert Point("sharegpt", BURST, FCFS, 1) not in points
    assert [point.engine for point in points] == ["cfs", "cfs", "cfs", "fcfs_beside"]  # one start of each


def test_nothing_begins_that_would_end_too_late(tmp_path, capsys):
    options = bench_burst.parse(["--device", "cpu", "--quick"])
    stable = Stable("sharegpt", 4.0, 1_000, "test")
    assert not bench_burst.Measuring(options, stable, Progress(None), tmp_path, 0.0).run()
    assert "the time is up" in capsys.readouterr().out
