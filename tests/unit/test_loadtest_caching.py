"""bench_caching: which points it runs, what its figures say, and that they are drawn."""

import pytest
from matplotlib import pyplot as plt

from loadtest import bench_caching as bench
from loadtest.figures.caching import DRAWN_PANELS, savings, through_the_cluster
from loadtest.results import check_metrics


def samples(device: str) -> list[dict]:
    """As if a token took 0.1 ms to compute, and 0.02 ms to come from host memory."""
    plan, rows = bench.PLANS[device], []
    for block in plan.blocks:
        for point in plan.points(block):
            ms = 5 + point.batch * 0.1 * (point.tokens - point.cached)
            ms += 0.02 * point.cached if point.place == "dram" else 0.0
            row = {"tokens": point.tokens, "cached": point.cached, "batch": point.batch, "place": point.place}
            rows += [{**row, "block_tokens": block, "round": n, "ms": ms + n} for n in range(2)]
    return rows


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_cached_part_is_of_whole_blocks_of_every_size_and_all_four_panels_have_points(device):
    plan = bench.PLANS[device]
    for block in plan.blocks:
        points = list(plan.points(block))
        assert len(points) == len(set(points))
        assert all(point.cached % block == 0 and point.cached < point.tokens for point in points)
        assert {point.cached * 8 // point.tokens for point in points} == set(bench.EIGHTHS)
    first = list(plan.points(plan.blocks[0]))
    assert {point.tokens for point in first} == {*plan.lengths}
    assert plan.middle in plan.lengths
    assert plan.batch_tokens in plan.lengths
    assert {point.batch for point in first} == {1, *plan.batches}
    assert {point.place for point in first} == {"engine", "dram"}


def test_figures_are_of_the_fastest_rounds():
    metrics = bench.metrics_from_samples(samples("cpu"))
    assert check_metrics(metrics) == []
    assert metrics["tokens1024_batch1_block32_engine_nothing_cached_ms"] == pytest.approx(5 + 102.4)
    saved = metrics["tokens1024_batch1_block32_engine_cached50_saved_percent"]
    assert saved == pytest.approx(100 * 51.2 / 107.4)
    assert metrics["tokens1024_batch1_block32_dram_cached50_saved_percent"] < saved
    assert metrics["tokens512_batch8_block32_engine_cached87_5_saved_percent"] > 0
    assert metrics["dram_pays_from_cached_percent"] == 25


def test_a_place_that_never_pays_is_not_said_to():
    slow = [{**row, "ms": row["ms"] + 1_000 * (row["place"] == "dram")} for row in samples("cpu")]
    assert "dram_pays_from_cached_percent" not in bench.metrics_from_samples(slow)


def test_every_panel_has_its_lines_and_they_begin_at_nothing():
    rows = samples("cuda")
    figure, panels = plt.subplots(1, DRAWN_PANELS)
    through_the_cluster(panels, {"samples": rows}, "H200")
    # beside each panel's own lines there is the one at zero
    assert [len(axes.lines) - 1 for axes in panels] == [3, 4, 3, 2]
    for axes in panels:
        assert all(line.get_xdata()[0] == line.get_ydata()[0] == 0 for line in axes.lines[:-1])
    plt.close(figure)
    shares, saved = savings(rows[:2], lambda row: False)
    assert (shares, saved) == ([0.0], [0.0])
