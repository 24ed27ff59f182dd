"""bench_mempool_api: its figures come from its samples, the worst cached ratio counts, and what it measures works."""

from loadtest import bench_mempool_api as bench
from loadtest.results import check_metrics


def sample(what: str, us: float, cached: float | None = None, number: int = 0) -> dict:
    return {"what": what, "blocks": 256, "cached": cached, "round": number, "us": us}


def test_metrics_are_medians_of_rounds_at_the_worst_ratio():
    samples = [sample(what, 256.0) for what in ("alloc", "free", "hash", "hash_seen")]
    for what in ("insert", "match", "insert_call", "match_call"):
        samples += [sample(what, 10 * (ratio + 1) + n, ratio, n) for ratio in bench.RATIOS for n in range(3)]
    metrics = bench.metrics_from_samples(samples)
    assert metrics["alloc_us_per_block"] == 1.0
    assert metrics["insert_4k_ms"] == 0.021
    assert "vllm_hash_4k_ms" not in metrics
    assert check_metrics(metrics) == []
    with_vllm = bench.metrics_from_samples([*samples, sample("vllm_hash", 400.0)])
    assert with_vllm["vllm_hash_4k_ms"] == 0.4


def test_a_measured_pool_is_as_full_after_a_round_as_before(monkeypatch):
    monkeypatch.setattr(bench, "NUM_PAGES", 256)
    monkeypatch.setattr(bench, "PROMPTS_THERE", 0)
    pool = bench.Bench()
    samples = bench.measure(pool, 1, 2, (4,))
    assert {s["what"] for s in samples} >= {"alloc", "free", "insert", "match", "hash", "hash_seen"}
    assert (pool.hbm.num_free, len(pool.hbm.index)) == (256, 0)
    assert len(pool.match_call(pool.partly_cached(4, 0.5))) == 2 * 24
