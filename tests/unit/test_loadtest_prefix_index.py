"""bench_prefix_index: its figures come from its samples, and both caches see the same prompts."""

from types import SimpleNamespace

import pytest

from loadtest import bench_prefix_index as bench
from loadtest.results import check_metrics


def rows(step: str, quire: float, vllm: float | None, tokens: int = 4096, blocks: int = 1024) -> list[dict]:
    pairs = [("quire", quire)] if vllm is None else [("quire", quire), ("vllm", vllm)]
    return [
        {"cache": name, "step": step, "tokens": tokens, "blocks": blocks, "round": n, "us": us + n}
        for name, us in pairs
        for n in (-1, 0, 1)
    ]


def test_check_is_hashing_and_looking_up_and_the_worst_size_counts():
    samples = []
    for blocks, more in ((1024, 0), (65536, 100)):
        for step, quire, vllm in (
            ("hash", 100, 300),
            ("match_new", 10, 20),
            ("insert", 80, 160),
            ("match", 20, 80),
        ):
            samples += rows(step, quire + more, vllm + more, blocks=blocks)
        samples += rows("hash_seen", 5, None, blocks=blocks)
    metrics = bench.metrics_from_samples(samples)
    assert metrics["quire_check_4k_ms"] == pytest.approx(0.31)
    assert metrics["vllm_check_4k_ms"] == pytest.approx(0.52)
    assert metrics["check_of_vllm_ratio"] == pytest.approx(310 / 520)
    assert metrics["insert_of_vllm_ratio"] == pytest.approx(180 / 260)
    assert metrics["quire_hash_seen_4k_ms"] == pytest.approx(0.005)
    assert check_metrics(metrics) == []


@pytest.mark.slow
def test_caches_take_turns_on_a_cache_that_stays_as_full(monkeypatch):
    # what the test process has frozen stays so: other tests' garbage, thawed, would be found here
    still = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr(bench, "gc", still)
    ours, other = bench.RadixCache(600, 16), bench.RadixCache(600, 16)
    other.name = "vllm"
    samples = bench.measure([ours, other], (10, 300), (64, 4096), 2, 2)
    assert (len(ours), len(other)) == (300, 300)
    assert {(s["cache"], s["step"]) for s in samples} >= {
        (n, s) for n in ("quire", "vllm") for s in bench.STEPS
    }
    assert len(samples) == 2 * 2 * 2 * 2 * 5
    assert bench.metrics_from_samples(samples)["check_of_vllm_ratio"] > 0


def test_a_wrong_answer_is_no_measurement(monkeypatch):
    cache = bench.RadixCache(600, 16)
    monkeypatch.setattr(cache, "match", lambda prompt: 1)
    with pytest.raises(RuntimeError, match="found 1 and 1 of 4 blocks"):
        bench.one_prompt(cache, list(range(64)))
