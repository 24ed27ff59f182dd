"""bench_slot_mapping and bench_slot_batch: figures come from samples, and what is counted is what the slots do."""

from random import Random

import pytest

from loadtest import bench_slot_batch, bench_slot_mapping
from loadtest.results import check_metrics


@pytest.mark.slow
def test_mapping_ahead_leaves_no_call_on_the_path_of_decode(monkeypatch):
    monkeypatch.setattr(bench_slot_mapping, "MODEL_S", 0.0005)
    monkeypatch.setattr(bench_slot_mapping, "REQUESTS", 4)
    rig = bench_slot_mapping.Host()
    rows = [bench_slot_mapping.decode(rig, "token-major", way, 70, 1) for way in bench_slot_mapping.WAYS]
    rows += [bench_slot_mapping.prefill(rig, "token-major", way, 2) for way in ("fresh", "leftover")]
    metrics = bench_slot_mapping.metrics_from_samples(rows)
    assert metrics["decode_token_major_background_inline_count"] == 0
    assert metrics["decode_token_major_on_the_path_inline_count"] >= 4
    assert metrics["prefill_token_major_leftover_us"] < metrics["prefill_token_major_fresh_us"]
    assert check_metrics(metrics) == []


def test_no_request_is_lost_and_the_batch_never_outgrows_the_memory():
    server = bench_slot_batch.Server(64, Random(2), kv_bytes=200 * 64 * bench_slot_batch.LLAMA_8B.token_bytes)
    for _ in range(300):
        server.admit()
        assert server.step() > 0
        held = sum(-(-server.lens[slot] // 64) for slot in server.left)
        assert held <= 200
        assert set(server.left) == {slot for slot, tokens in enumerate(server.lens) if tokens}
    assert server.preempted > 0
    server.table.check()


def test_shares_are_of_the_batch_without_fragmentation():
    samples = [
        {"case": case, "seed": seed, "page_tokens": 1, "preempted": 0, "batch": batch}
        for case, batch in (("exact", [10, 30]), ("2048 KiB", [5, 11]))
        for seed in (0, 1)
    ]
    metrics = bench_slot_batch.metrics_from_samples(samples)
    assert metrics["batch_2048kib_of_exact_ratio"] == pytest.approx(0.4)
    assert metrics["batch_exact_max_count"] == 30
    assert check_metrics(metrics) == []


def test_larger_pages_never_hold_more_requests():
    tokens = bench_slot_batch.page_tokens()
    assert tokens == {"exact": 1, "64 KiB": 32, "128 KiB": 64, "256 KiB": 128, "2048 KiB": 1024, "slice": 64}
