"""bench_context_reload: metrics follow from the samples, parts add up, ceilings say what is possible."""

import pytest

from loadtest import bench_context_reload as bench
from loadtest import plain_copies
from loadtest.results import check_metrics

GB = 10**9


def reload(tier: str, fetch_ms: float, turn: int = 1) -> dict:
    return {
        "kind": "reload", "tier": tier, "turn": turn, "prompt_tokens": 100_000, "ttft_ms": fetch_ms + 50.0,
        "fetch_ms": fetch_ms, "prefill_ms": 30.0, "queue_ms": 0.1, "sources": {tier: 99_744, "computed": 256},
        "bytes_moved": 13 * GB,
    }  # fmt: skip


def ceiling(tier: str, seconds: float) -> dict:
    return {"kind": "ceiling", "tier": tier, "bytes": 13 * GB, "seconds": seconds}


def test_gain_parts_and_what_is_possible():
    samples = [{"kind": "recompute", "ttft_ms": 10_000.0}, ceiling("peer", 0.04), ceiling("dram", 0.25)]
    samples += [reload("peer", fetch_ms, turn) for turn, fetch_ms in enumerate((40.0, 50.0, 900.0))]
    samples += [reload("dram", 250.0)]
    found = bench.metrics_from_samples(samples)
    assert found["ttft_gain_ratio"] == pytest.approx(300.0 / 100.0)
    assert found["reload_gain_ratio"] == pytest.approx(5.0)
    assert found["peer_ttft_ms"] == pytest.approx(sum(found[f"peer_{name}_ms"] for name in bench.PARTS))
    assert found["peer_ceiling_gb_per_s"] == pytest.approx(325.0)
    assert found["peer_share_of_ceiling_ratio"] == pytest.approx(260.0 / 325.0)
    assert found["possible_ttft_gain_ratio"] == pytest.approx((250.0 + 50.0) / (40.0 + 50.0))
    assert found["recompute_over_peer_ratio"] == pytest.approx(100.0)
    assert found["dram_found_ratio"] == pytest.approx(0.99744)
    assert check_metrics(found) == []


def test_one_tier_alone_has_no_gain():
    found = bench.metrics_from_samples([reload("peer", 40.0)])
    assert "ttft_gain_ratio" not in found
    assert found["peer_ttft_ms"] == 90.0


def test_what_pushes_the_context_out_is_more_than_the_engines_memory():
    options = bench.parse([])
    assert bench.num_fills(options) * options.fill_tokens > options.pool_tokens > options.context_tokens
    assert options.fill_tokens < options.context_tokens


def test_plain_copies_of_host_memory_are_timed_for_both_tiers():
    found = plain_copies.rows("cpu", 3 << 20)
    assert {one["tier"] for one in found} == set(bench.TIERS)
    assert all(one["bytes"] == 3 << 20 and one["seconds"] >= 0 for one in found)
