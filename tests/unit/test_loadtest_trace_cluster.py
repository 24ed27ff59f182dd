"""bench_trace_cluster: which part of a trace is sent, and that its figures come from its samples."""

import pytest

from loadtest import bench_trace_cluster as bench
from loadtest.outcomes import Outcome
from loadtest.results import check_metrics
from loadtest.simulator.request import InfiniteCache, from_workload, infinite_cache
from loadtest.workloads.trace_files import TraceError, read
from tests.support.simulated import mooncake_lines


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(3, count=120, groups=30)))
    return read(path)


def test_whole_sessions_go_in_the_traces_order_scaled_so_that_its_blocks_are_the_engines(trace):
    found = bench.part_of(trace, 3, seconds=0.5)
    sessions = {one.session for one in found}
    whole = [one.request_id for one in trace if one.session in sessions]
    assert [one.request_id for one in found] == whole
    assert 0 < len(found) < len(trace)
    assert found[0].arrival_ms == 0
    assert found[-1].arrival_ms == pytest.approx(500)
    scaled = {one.request_id: one for one in found}
    for one in trace:
        if one.request_id in scaled:
            mine = scaled[one.request_id]
            assert mine.prompt_tokens == pytest.approx(one.prompt_tokens / bench.SCALE, abs=len(one.prompt))
            assert mine.prompt_tokens + mine.output_tokens < bench.CONTEXT_TOKENS


def test_scaling_keeps_what_an_infinite_cache_would_hit(trace):
    before = infinite_cache(from_workload(trace, bench.BLOCK_TOKENS * bench.SCALE), 512)
    found = bench.part_of(trace, 1, seconds=1000.0)
    assert len(found) == len(trace)
    after = infinite_cache(from_workload(found, bench.BLOCK_TOKENS), bench.BLOCK_TOKENS)
    assert after.hit_ratio == pytest.approx(before.hit_ratio, abs=0.02)


def test_a_trace_of_which_nothing_is_left_is_refused(trace):
    with pytest.raises(TraceError, match="none of its sessions"):
        bench.part_of(trace[:1], 1 << 30, seconds=1.0)


def test_figures_are_of_the_largest_memory_and_of_each():
    def outcome(computed: int, pool: int) -> Outcome:
        return Outcome(0, "s", 0, ttft_ms=20.0, jct_ms=50.0, output_tokens=4,
                       sources={"computed": computed, "pool": pool})  # fmt: skip

    bound = InfiniteCache(prompt_tokens=100, hit_tokens=60, footprint_tokens=40)
    failed = Outcome(1, "s", 1, error="overloaded")
    samples = [
        bench.sample_of(2.0, 80, bound, [outcome(40, 60), outcome(44, 56), failed]),
        bench.sample_of(0.1, 8, bound, [outcome(90, 10)]),
    ]
    metrics = bench.metrics_from_samples(samples)
    assert check_metrics(metrics) == []
    assert metrics["memory_2_hit_percent"] == pytest.approx(58.0)
    assert metrics["memory_0_1_hit_percent"] == pytest.approx(10.0)
    assert metrics["hit_rate_gap_points"] == pytest.approx(2.0)
    assert metrics["failed_requests"] == 1


def test_without_a_trace_it_says_where_to_get_one(tmp_path, capsys):
    assert bench.main([]) == 2
    assert "FAST25-release" in capsys.readouterr().err
    assert bench.main(["--trace", str(tmp_path / "nothing.jsonl")]) == 2
