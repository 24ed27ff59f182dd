"""bench_beside_stock: sides ask for the same at the same time, GPUs change, ratios are those of a round."""

import json

import pytest

from loadtest import bench_beside_stock as bench
from loadtest.bench_disaggregation import workload
from loadtest.disaggregation_plan import Point
from loadtest.progress import Progress
from loadtest.results import check_metrics

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # pipes of sides that ended


def row(side: str, number: int, ttft_ms: float, *, workload: str = "loogle", failed: int = 0) -> dict:
    return {
        "side": side, "round": number, "workload": workload, "rate": 24.0, "on": "0,1", "requests": 3, "failed": failed,
        "ttft_ms": [ttft_ms, ttft_ms, 2 * ttft_ms], "tpot_ms": [5.0, 5.0, 0.0], "jct_ms": [100.0, 100.0, 100.0],
        "sources": {"engine": 60, "computed": 40},
    }  # fmt: skip


def test_ratios_are_of_the_same_round_and_their_median_is_the_figure():
    samples = [
        row("quire", 0, 30.0), row("stock", 0, 40.0), row("quire", 1, 66.0), row("stock", 1, 60.0),
        row("quire", 2, 60.0), row("stock", 2, 60.0), row("quire", 3, 1.0),
    ]  # fmt: skip
    found = bench.metrics_from_samples(samples)
    assert check_metrics(found) == []
    assert found["loogle_ttft_mean_ratio"] == pytest.approx(1.0), (
        "0.75, 1.1, 1.0; a round without its other side is none"
    )
    assert found["loogle_ttft_mean_worst_ratio"] == pytest.approx(1.1)
    assert found["loogle_quire_ttft_p99_ms"] == 120.0
    assert found["loogle_stock_tpot_mean_ms"] == 5.0, "an answer of one token has no time a token"
    assert found["loogle_quire_hit_ratio"] == pytest.approx(0.6)
    assert found["failed_requests"] == 0.0
    assert bench.metrics_from_samples(samples[::-1]) == found
    assert bench.metrics_from_samples([row("stock", 0, 1.0, failed=2)])["failed_requests"] == 2.0


def test_sides_change_gpus_with_every_round_and_ask_for_the_same_at_the_same_times():
    options = bench.parse(["--instances", "2"])
    assert [bench.gpus_of(options, number) for number in range(3)] == [
        {"quire": "0,1", "stock": "2,3"}, {"quire": "2,3", "stock": "0,1"}, {"quire": "0,1", "stock": "2,3"},
    ]  # fmt: skip
    assert bench.rates_of(options) == [("loogle", "24"), ("sharegpt", "16"), ("react", "12")]
    ours, theirs = (workload(options, Point(side, "loogle", 24.0, 1), 48.0, 5.0) for side in bench.SIDES)
    assert [one.arrival_ms for one in ours] == [one.arrival_ms for one in theirs]
    assert [one.prompt_tokens for one in ours] == [one.prompt_tokens for one in theirs]
    for side in bench.SIDES:
        options.side = side
        layout = bench.layout_of(options)
        assert (layout.num_instances, layout.is_stock, layout.arm(side).policy) == (
            2,
            side == "stock",
            "cost",
        )


def test_both_sides_begin_a_point_before_either_is_waited_for(tmp_path, monkeypatch, capsys):
    """Two processes that each wait until the other has begun: neither would end if one came after the other."""
    child = tmp_path / "side.py"
    child.write_text(
        "import json, pathlib, sys, time\n"
        "side, here = sys.argv[sys.argv.index('--side') + 1], pathlib.Path(sys.argv[5])\n"
        "print('loading', flush=True); print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    number = line.strip(); (here / f'{side}-{number}').touch()\n"
        "    while len(list(here.glob(f'*-{number}'))) < 2: time.sleep(0.01)\n"
        f"    row = {row('', 0, 10.0)!r} | {{'workload': ['loogle', 'react'][int(number)]}}\n"
        "    print('sample ' + json.dumps(row), flush=True)\n"
    )
    monkeypatch.setattr(bench, "DIE_WITH_PARENT", child)  # which would begin the side
    options = bench.parse(["--device", "cpu", "--rates", "loogle=1", "--rates", "react=1"])
    progress = Progress(tmp_path / "kept.jsonl", bench.said)
    bench.measure_round(options, [str(tmp_path)], progress, 0)
    assert [(one["workload"], one["side"]) for one in progress.samples] == [
        ("loogle", "quire"), ("loogle", "stock"), ("react", "quire"), ("react", "stock"),
    ]  # fmt: skip
    assert "quire: loading" in capsys.readouterr().out
    bench.measure_round(options, [str(tmp_path)], progress, 0)
    assert len(progress.samples) == 4, "what is there is not measured again"


def test_a_side_that_ends_says_so(tmp_path, monkeypatch):
    child = tmp_path / "side.py"
    child.write_text("import sys; sys.exit(7)")
    monkeypatch.setattr(bench, "DIE_WITH_PARENT", child)  # which would begin the side
    with bench.Side("stock", [], "", 0) as side, pytest.raises(RuntimeError, match="stock ended with 7"):
        side.hear(bench.READY)


def test_rounds_that_are_left_are_said_by_the_exit_status(tmp_path, monkeypatch):
    def measured(options, _argv, progress, number):
        for side in bench.SIDES:
            progress.add(row(side, number, 10.0))

    monkeypatch.setattr(bench, "measure_round", measured)
    kept = tmp_path / "kept.jsonl"
    words = ["--rates", "loogle=24", "--resume", str(kept), "--out", str(tmp_path), "--commit", "abc"]
    assert bench.main([*words, "--rounds", "2"]) == 0
    assert len(kept.read_text().splitlines()) == 4
    found = json.loads((tmp_path / "h200-beside-stock.json").read_text())
    assert found["metrics"]["loogle_ttft_mean_ratio"] == 1.0
    assert bench.main([*words, "--rounds", "3", "--budget-s", "-1"]) == 3
    with pytest.raises(SystemExit):
        bench.parse(["--rates", "nothing=1"])
