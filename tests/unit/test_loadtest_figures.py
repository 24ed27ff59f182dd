"""loadtest/figures.py draws from result files alone, the same bytes each time."""

from loadtest import bench_footprint, bench_gateway, figures, results

GATEWAY = [
    {"system": "quire", "series": "closed_loop", "count": 10, "cpu_us": 3_000, "wall_s": 0.5, "failed": 0},
    {"system": "quire", "series": "streams", "count": 10, "cpu_us": 200, "wall_s": 0.5, "failed": 0},
    {"system": "vllm_router", "series": "streams", "count": 10, "cpu_us": 120, "wall_s": 0.5, "failed": 0},
    {"system": "direct", "series": "ttft", "count": 2, "rate_per_s": 9, "failed": 0, "ttft_ms": [1.0, 2.0]},
]
FOOTPRINT = [
    {"ready_s": 20.0, "failed": 0, "pss_bytes": {"gateway": 10 << 20, "decode-0": 900 << 20}},
    {"ready_s": 30.0, "failed": 0, "pss_bytes": {"gateway": 20 << 20, "decode-0": 900 << 20}},
]


def test_every_known_result_gives_an_svg_and_a_png_that_are_reproducible(tmp_path):
    for name, module, samples in (
        ("gateway-cpu", bench_gateway, GATEWAY),
        ("cluster-footprint", bench_footprint, FOOTPRINT),
    ):
        results.write_result(
            name,
            claim="c",
            command="x",
            settings={},
            metrics=module.metrics_from_samples(samples),
            samples=samples,
            folder=tmp_path,
        )
    for target in ("a", "b"):
        assert figures.main([str(tmp_path), str(tmp_path / target)]) == 0
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {f"{name}.{kind}" for name in figures.DRAW for kind in ("svg", "png")}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_footprint_is_the_median_start_and_the_largest_memory():
    assert bench_footprint.metrics_from_samples(FOOTPRINT) == {
        "ready_s": 20.0,
        "ready_max_s": 30.0,
        "pss_bytes": float(920 << 20),
        "failed_requests": 0.0,
    }
