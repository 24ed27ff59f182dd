"""bench_trace_replay: its figures come from its samples, and a small trace goes through all of it."""

import pytest

from loadtest import bench_trace_replay as bench
from loadtest.results import check_metrics
from loadtest.simulator.request import from_workload
from loadtest.workloads.trace_files import read
from tests.support.simulated import mooncake_lines


@pytest.mark.slow
def test_a_small_trace_shows_hits_that_shrink_with_memory_and_never_pass_the_bounds(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(3, count=80, groups=10)))
    requests = from_workload(read(path), 512)
    samples = bench.measure(requests, (2.0, 1.0, 0.1), ("cost", "session", "least_load"))
    metrics = bench.metrics_from_samples(samples)
    assert check_metrics(metrics) == []
    hits = [metrics[f"cost_memory_{m}_hit_percent"] for m in ("2", "1", "0_1")]
    assert hits[0] >= hits[2]
    assert max(hits) <= metrics["infinite_cache_hit_percent"]
    assert metrics["one_lru_memory_2_hit_percent"] == pytest.approx(metrics["infinite_cache_hit_percent"])
    assert metrics["hit_rate_gap_points"] == pytest.approx(metrics["infinite_cache_hit_percent"] - hits[1])
    assert "memory 0.1 least_load" in capsys.readouterr().out


def test_without_a_trace_it_says_where_to_get_one(tmp_path, capsys):
    assert bench.main([]) == 2
    assert "FAST25-release" in capsys.readouterr().err
    assert bench.main(["--trace", str(tmp_path / "nothing.jsonl")]) == 2
