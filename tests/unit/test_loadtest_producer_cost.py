"""bench_producer_cost: figures come from samples, pieces are known to be finished, children answer or say why not."""

import json

import pytest

from loadtest import bench_producer_cost as bench
from loadtest import producer_cost
from loadtest.child_commands import Child, ChildFailed
from loadtest.figures import aqua_lending, aqua_response, sheet
from loadtest.lending_rig import RigSettings, mempool_words
from loadtest.progress import Progress
from loadtest.results import check_metrics
from services.mempool.config import load

GIB = 1 << 30


def arm(items: float, tpot_ms: float = 0.0) -> dict:
    more = {"tpot_mean_ms": tpot_ms, "tpot_p50_ms": tpot_ms, "tpot_p99_ms": 2 * tpot_ms} if tpot_ms else {}
    return {"items": items, "seconds": 2.0, "is_warm": True, **more}


def round_of(producer: str, mode: str, number: int, off: dict, on: dict) -> dict:
    return {
        "kind": "round", "producer": producer, "mode": mode, "round": number, "off": off, "on": on,
        "unit": "tokens" if producer in ("engine", "tp4") else "images", "moved_bytes": 4e9, "moved_s": 2.0,
        "lent_bytes": 8 * GIB,
    }  # fmt: skip


def reclaim(number: int, seconds: float) -> dict:
    return {
        "kind": "reclaim", "producer": "engine", "mode": "full", "round": number, "bytes": 8 * GIB, "seconds": seconds,
        "copy_bytes": 8 * GIB, "copy_s": 0.19, "step_s": 0.01, "lost": 0,
    }  # fmt: skip


SAMPLES = [
    round_of("engine", "budget", 0, arm(100, 10.0), arm(97, 10.3)),
    round_of("engine", "budget", 1, arm(100, 10.0), arm(99, 10.1)),
    round_of("engine", "budget", 2, arm(100, 10.0), arm(98, 10.2)),
    round_of("diffusion", "budget", 0, arm(10), arm(9.9)),
    round_of("engine", "full", 0, arm(100, 10.0), arm(90, 11.0)),
    {"kind": "ceiling", "producer": "diffusion", "mode": "full", "bytes": 3e11, "seconds": 1.0},
    {"kind": "ceiling", "producer": "audio", "mode": "full", "bytes": 2e10, "seconds": 1.0},
    {"kind": "ceiling", "producer": "engine", "mode": "full", "bytes": 1e10, "seconds": 1.0},
    reclaim(0, 0.1),
    reclaim(1, 0.3),
    reclaim(2, 0.2),
]


def test_ratios_are_medians_over_rounds_and_the_headline_is_the_worst_producer_with_a_budget():
    found = bench.metrics_from_samples(SAMPLES)
    assert found["engine_throughput_ratio"] == pytest.approx(0.98)
    assert found["engine_throughput_worst_ratio"] == pytest.approx(0.97)
    assert found["diffusion_throughput_ratio"] == pytest.approx(0.99)
    assert found["throughput_ratio"] == pytest.approx(0.98)
    assert found["full_throughput_ratio"] == found["engine_full_throughput_ratio"] == pytest.approx(0.9)
    assert found["engine_tpot_mean_ratio"] == pytest.approx(1.02)
    assert found["engine_full_tpot_mean_ratio"] == pytest.approx(1.1)
    assert found["engine_moved_gb_per_s"] == pytest.approx(2.0)
    assert found["copy_alone_gb_per_s"] == pytest.approx(300.0)
    assert check_metrics(found) == []


def test_a_models_first_round_that_began_cold_is_left_out():
    cold = {"items": 3.0, "seconds": 2.0}
    rounds = [round_of("audio", "full", 0, cold, arm(9))]
    rounds += [round_of("audio", "full", number, arm(10), arm(9 + number)) for number in (1, 2)]
    found = bench.metrics_from_samples([*SAMPLES, *rounds])
    assert found["audio_full_rounds_count"] == 2
    assert found["audio_full_throughput_ratio"] == pytest.approx(1.05)
    assert found["audio_full_throughput_best_ratio"] == pytest.approx(1.1)


def test_a_reclaim_is_held_against_its_bytes_over_the_same_copies_rate_and_one_step():
    found = bench.metrics_from_samples(SAMPLES)
    assert found["reclaim_bound_ms"] == pytest.approx(200.0)
    assert found["reclaim_ms"] == pytest.approx(200.0)
    assert found["reclaim_over_bound_ratio"] == pytest.approx(1.0)
    assert found["reclaim_over_bound_worst_ratio"] == pytest.approx(1.5)


def test_a_producer_that_has_no_rounds_with_a_budget_counts_without():
    without = round_of("audio", "full", 0, arm(100), arm(95))
    assert bench.metrics_from_samples([*SAMPLES, without])["throughput_ratio"] == pytest.approx(0.95)
    with pytest.raises(ValueError, match="no rounds"):
        bench.metrics_from_samples(SAMPLES[-3:])


SWEEP = {
    "kind": "sweep", "producer": "audio", "mode": "full", "unit": "clips",
    "rows": [{"batch": n, "items_per_s": 2.0 * n, "used_bytes": n * GIB, "total_bytes": 140 * GIB} for n in (1, 2, 4)],
}  # fmt: skip


@pytest.mark.parametrize("one", aqua_lending.SHEETS, ids=lambda one: one.name)
def test_figures_of_lending_are_drawn_of_what_there_is_and_say_what_lacks(tmp_path, one):
    (name,) = one.needs
    head = {"name": name, "commit": "c" * 40, "date": "2026-01-01", "machine": {"cpu": "c", "gpu": ["g"]}}
    course = {"course": [[1.0, 9], [2.0, 4]]}
    samples = [one | course if one["kind"] == "reclaim" else one for one in SAMPLES]
    samples += [SWEEP, round_of("tp4", "full", 0, arm(100, 10.0), arm(97, 10.3))]
    for folder, found in (("full", samples), ("empty", [])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(head | {"samples": found}))
    assert sheet.draw(one, sheet.Results(tmp_path / "full"), tmp_path, ["svg"]) == "drawn"
    assert "has no" in sheet.draw(one, sheet.Results(tmp_path / "empty"), tmp_path, ["svg"])


def test_figure_1_needs_a_seed_that_all_systems_have(tmp_path):
    (one,) = aqua_response.SHEETS
    head = {
        "name": "h200x2-burst",
        "commit": "c" * 40,
        "date": "2026-01-01",
        "machine": {"cpu": "c", "gpu": ["g"]},
    }
    points = [
        {"kind": "point", "workload": "sharegpt", "load": "burst", "system": system, "seed": seed, "at_ms": [0.0, 9.0],
         "ttft_ms": [5.0, 6.0], "rct_ms": [50.0, 60.0], "burst_from_ms": 4.0}
        for system, seed in (("fcfs", 1), ("cfs_dram", 1), ("cfs_peer", 2), ("cfs_peer", 1))
    ]  # fmt: skip
    for folder, found in (("full", points), ("less", points[:3])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "h200x2-burst.json").write_text(json.dumps(head | {"samples": found}))
    assert sheet.draw(one, sheet.Results(tmp_path / "full"), tmp_path, ["svg"]) == "drawn"
    assert "no seed" in sheet.draw(one, sheet.Results(tmp_path / "less"), tmp_path, ["svg"])


def test_a_piece_is_finished_when_all_of_its_rounds_and_reclaims_are_kept(tmp_path):
    plan = bench.plan_of("engine", "cuda", quick=False)
    keep = tmp_path / "keep.jsonl"
    progress = Progress(keep, bench.said)
    for number in range(plan.rounds):
        progress.add(round_of("engine", "full", number, arm(100), arm(99)))
    assert not bench.is_finished("engine", "full", plan, progress)
    for number in range(plan.reclaims):
        progress.add(reclaim(number, 0.2))
    again = Progress(keep, bench.said)
    assert bench.is_finished("engine", "full", plan, again)
    assert not bench.is_finished("engine", "budget", plan, again)
    assert not bench.is_finished("audio", "full", bench.plan_of("audio", "cuda", quick=False), again)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("producer", [*producer_cost.MAIN, "tp4"])
def test_every_plan_lends_whole_batches_that_host_memory_has_room_for(device, producer):
    plan = bench.plan_of(producer, device, quick=False)
    assert plan.lend_bytes % (plan.page_bytes * plan.batch_pages) == 0
    assert plan.dram_bytes >= plan.lend_bytes
    assert bench.plan_of(producer, device, quick=True).rounds == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_mempool_of_a_measurement_takes_its_flags(device, tmp_path):
    settings = RigSettings(device, 1 << 30, 1 << 28, budget_bytes_per_s=5, pin_host=True)
    found = load(mempool_words(settings, tmp_path, "http://127.0.0.1:1", "127.0.0.1:0"))
    assert found.lending_budget_bytes_per_s == 5
    assert found.pin_host
    assert found.dram_for_host == (device == "cpu")


def test_a_child_answers_and_a_failure_is_an_error_with_its_words(tmp_path):
    child = Child("echo", ["tests.support.answering_child"], tmp_path / "log")
    try:
        assert child.ask("echo", number=1) == {"number": 1}
        with pytest.raises(ChildFailed, match=r"(?s)told so.*why it died\nand its configuration"):
            child.ask("fail")
        with pytest.raises(ChildFailed, match=r"ended|does not listen"):
            child.ask("echo")
    finally:
        child.close()
    assert "for the log" in (tmp_path / "log").read_text()
