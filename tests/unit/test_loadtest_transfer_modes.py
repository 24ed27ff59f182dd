"""bench_transfer_modes: what its samples become, and the figure that is drawn from them."""

import json

import pytest

from loadtest.bench_transfer_modes import SHORT, metrics_from_samples, moves, parse
from loadtest.figures import sheet
from loadtest.figures.memserve import SHEETS
from loadtest.results import check_metrics
from loadtest.transfer_modes_rig import NUM_LAYERS, ModesRig
from shared.kv.transfer_mode import TransferMode

pytestmark = pytest.mark.slow


def samples():
    rows = []
    for place, mode in enumerate(SHORT):
        head = {"mode": mode.value}
        rows += [
            {**head, "kind": "move", "block_tokens": 16, "tokens": tokens, "exposed_ms": exposed_ms + place,
             "parts": 1, "after_first_ms": 9.0, "bytes": 1, "layer_ms": 1.0}
            for exposed_ms in (4.0, 5.0, 90.0)
            for tokens in (1024, 4096)
        ]  # fmt: skip
        rows.append(
            {**head, "kind": "prompt", "prompt_tokens": 1024, "fetch_ms": 3.0 + place, "handoff_ms": 30.0,
             "recompute_ms": 40.0, "ttft_ms": 70.0}
        )  # fmt: skip
        for rate in (0.5, 8.0):
            columns = {"ttft_ms": [5.0, 7.0], "ttst_ms": [8.0, 9.0], "jct_ms": [10.0, 20.0]}
            rows.append({**head, "kind": "rate", "rate": rate, **columns})
    return rows


def test_metrics_are_medians_of_single_prompts_and_means_under_load():
    found = metrics_from_samples(samples())
    assert not check_metrics(found)
    assert [found[f"{mode}_block16_4096_exposed_ms"] for mode in ("agg", "request", "layer")] == [
        5.0,
        6.0,
        7.0,
    ]
    assert found["layer_1024_fetch_ms"] == 5.0
    assert found["agg_rate8_jct_mean_ms"] == found["layer_rate0p5_jct_mean_ms"] == 15.0


def test_a_run_without_a_part_has_no_metric_of_it():
    assert metrics_from_samples([s for s in samples() if s["kind"] == "prompt"]).keys() == {
        f"{mode}_1024_{what}_ms"
        for mode in SHORT.values()
        for what in ("fetch", "handoff", "recompute", "ttft")
    }


@pytest.mark.parametrize("also", [[], ["transfer-modes"]])
def test_figure_12_is_drawn_once_it_is_measured(tmp_path, also):
    (one,) = [one for one in SHEETS if one.name == "memserve-12"]
    assert sheet.draw(one, sheet.Results(tmp_path), tmp_path, ["svg"]).startswith(
        "not measured: no result file"
    )
    for name in ["h200x2-transfer-modes", *also]:
        head = {
            "name": name,
            "commit": "c" * 40,
            "date": "2026-01-01",
            "machine": {"cpu": "cpu"},
            "metrics": {},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({**head, "samples": samples()}))
    assert sheet.draw(one, sheet.Results(tmp_path), tmp_path, ["svg"]) == "drawn"


async def test_the_rig_moves_every_mode_and_counts_its_transfers():
    async with ModesRig("cpu", 6, 1) as rig:
        parts = {mode: (await rig.move(mode, 4, 1.0)) for mode in SHORT}
        for layer_ms in (10.0, 50.0):  # who stood still while all layers were computed catches up in one part
            if parts[TransferMode.BY_LAYER].parts == 1:
                parts[TransferMode.BY_LAYER] = await rig.move(TransferMode.BY_LAYER, 4, layer_ms)
    assert parts[TransferMode.BY_REQUEST_AGG].parts == 1
    assert parts[TransferMode.BY_REQUEST].parts == NUM_LAYERS
    assert 1 < parts[TransferMode.BY_LAYER].parts <= NUM_LAYERS
    assert {each.num_bytes for each in parts.values()} == {4 * rig.page_bytes}


async def test_a_quick_run_measures_little():
    options = parse(["--quick"])
    assert len(await moves("cpu", options.moves[:1], 1)) == 2 * len(SHORT)
    assert parse(["--device", "cuda"]).prompts[-1] == 32_768
