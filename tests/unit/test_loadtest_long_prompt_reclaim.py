"""bench_long_prompt_reclaim: rates by where blocks lay, reclaims and the lender's cost follow from the samples."""

import json

import pytest

from loadtest import bench_long_prompt_reclaim as bench
from loadtest import long_prompt_reclaim as found_in
from loadtest.figures import aqua_reclaim, sheet
from loadtest.reclaim_rig import words_of
from loadtest.results import check_metrics
from services.mempool.config import load

GB = 1_000_000_000


def row(at_s: float, peer: float, dram: float, aside: float, reclaims: int = 0, back: int = 0) -> list[float]:
    return [at_s, peer * GB, dram * GB, aside * GB, reclaims, 0, back, 0]


# lent from 10 s, wanted back at 20.0, back at 20.1, lent again at 30, the blocks there from 31
COURSE = [
    row(9.0, 0, 0, 8), row(10.0, 2, 0, 8), row(20.0, 2, 0, 8, 1), row(20.05, 2, 2, 8, 1), row(20.1, 0, 2, 0, 1),
    row(29.5, 0, 2, 8, 1), row(30.0, 0.5, 1.5, 8, 1, 32), row(31.0, 2, 0, 8, 1, 128),
]  # fmt: skip
TOKENS = (
    [[10.0 + 0.02 * n, 1] for n in range(500)]  # 50/s until 19.98
    + [[20.2 + 0.1 * n, 1] for n in range(98)]  # 10/s until 29.9
    + [[31.0 + 0.02 * n, 1] for n in range(200)]
)


def window(kind: str, phase: str, tokens: int, **more: float) -> dict:
    return {
        "kind": kind, "phase": phase, "clients": 8, "asked_s": 20.0, "begin_s": 21.0, "items": tokens, "seconds": 4.0,
        "tpot_mean_ms": 10.0, "tpot_p50_ms": 10.0, "tpot_p99_ms": 12.0, "most_waiting": 0, **more,
    }  # fmt: skip


SAMPLES = [
    window("alone", "quiet", 4_000, offered_bytes=0),
    window("alone", "loaded", 8_000, offered_bytes=0),
    {"kind": "prompt", "prompt_tokens": 100, "begin_s": 9.0, "ttft_s": 1.0},
    window("phase", "quiet", 3_900),
    window("phase", "loaded", 8_000),
    window("phase", "quiet_again", 3_960),
    {"kind": "course", "rows": COURSE},
    {"kind": "tokens", "rows": TOKENS},
    {"kind": "ceiling", "tier": "dram", "bytes": 50 * GB, "seconds": 1.0},
    {"kind": "ceiling", "tier": "peer", "bytes": 400 * GB, "seconds": 1.0},
]


def test_tokens_per_second_are_told_apart_by_where_the_blocks_lay_all_the_while():
    found = bench.metrics_from_samples(SAMPLES)
    assert found["peer_tokens_per_s"] == pytest.approx(50.0, rel=0.01)
    assert found["dram_tokens_per_s"] == pytest.approx(10.0, rel=0.02)
    assert found["throughput_gain_ratio"] == pytest.approx(5.0, rel=0.02)
    assert found["again_tokens_per_s"] == pytest.approx(50.0, rel=0.01)
    assert found["back_ms"] == pytest.approx(1_000.0)
    assert check_metrics(found) == []


def test_a_reclaim_ends_when_the_lender_has_every_page_and_is_held_against_bytes_over_bandwidth_and_a_step():
    found = bench.metrics_from_samples(SAMPLES)
    assert found["reclaims_count"] == 1
    assert found["reclaim_ms"] == pytest.approx(100.0)
    assert found["reclaim_bound_ms"] == pytest.approx(2 / 50 * 1e3 + 20.0)
    assert found["reclaim_over_bound_ratio"] == pytest.approx(100 / 60)
    assert found["reclaim_lost_count"] == 0


def test_the_lender_is_held_against_the_same_load_alone():
    found = bench.metrics_from_samples(SAMPLES)
    assert found["producer_quiet_throughput_ratio"] == pytest.approx(0.975)
    assert found["producer_loaded_throughput_ratio"] == pytest.approx(1.0)
    assert found["producer_quiet_again_throughput_ratio"] == pytest.approx(0.99)
    assert found["producer_quiet_alone_offered_gb"] == 0.0


def test_a_reclaim_that_never_ended_and_no_samples_at_all_are_no_metrics():
    assert bench.metrics_from_samples([]) == {}
    cut = [{"kind": "course", "rows": COURSE[:4]}]
    assert "reclaim_ms" not in bench.metrics_from_samples(cut)
    assert found_in.state_at(COURSE, 0.0) == "none"
    assert found_in.state_at(COURSE, 30.5) == "both"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_lent_has_room_for_all_that_is_far_and_the_lender_has_it_to_spare(device, tmp_path):
    options = bench.parse(["--device", device])
    assert options.lent_bytes >= (options.prompt_tokens - options.own_tokens) * options.token_bytes
    assert options.lender_bytes * 0.9 > 1.1 * options.lent_bytes, "beside the reserve and what requests hold"
    settings = load(words_of(options, tmp_path, "http://127.0.0.1:1", "127.0.0.1:0"))
    assert settings.lending == "auto"
    assert settings.lending_threshold_bytes == options.lent_bytes
    assert settings.dram_bytes > options.far_bytes
    assert options.loaded_clients - options.lender_slots > settings.lending_queue_limit


def test_a_prompt_that_fits_is_refused():
    with pytest.raises(SystemExit):
        bench.parse(["--ratio", "1.0"])


@pytest.mark.slow
def test_figure_12_is_drawn_of_a_course_and_says_what_lacks(tmp_path):
    (one,) = aqua_reclaim.SHEETS
    head = {"commit": "c" * 40, "date": "2026-01-01", "machine": {"cpu": "c", "gpu": ["g", "g"]}}
    for folder, samples in (("full", SAMPLES), ("empty", [])):
        (tmp_path / folder).mkdir()
        body = head | {"name": bench.NAME, "samples": samples}
        (tmp_path / folder / f"{bench.NAME}.json").write_text(json.dumps(body))
    assert sheet.draw(one, sheet.Results(tmp_path / "full"), tmp_path, ["svg", "png"]) == "drawn"
    assert "no course" in sheet.draw(one, sheet.Results(tmp_path / "empty"), tmp_path, ["svg"])
