"""`make figures` draws every figure of the list from result files alone, the same bytes each time, or says why not."""

import json

import pytest

from loadtest import bench_burst, bench_context_reload, bench_footprint, bench_long_prompt, bench_offload
from loadtest.figures import sheet, tokenweave, vattention, vattention_tables
from loadtest.figures.__main__ import SHEETS, main
from loadtest.registry import MEASURES, RESULTS

pytestmark = pytest.mark.slow

FOOTPRINT = [
    {"ready_s": 20.0, "failed": 0, "pss_bytes": {"gateway": 10 << 20, "decode-0": 900 << 20}},
    {"ready_s": 30.0, "failed": 0, "pss_bytes": {"gateway": 20 << 20, "decode-0": 900 << 20}},
]
PROMISED = {
    *(f"memserve-{number:02}" for number in (8, 9, 10, 11, 12, 13, 14, 15)),
    *(f"vattention-{number:02}" for number in (2, 3, *range(7, 16))),
    *(f"vattention-table-{number}" for number in (6, 7)),
    *(f"aqua-{number:02}" for number in (1, 4, *range(7, 14))),
    *(f"tokenweave-{number:02}" for number in (1, 4, *range(9, 17))),
    "pr38460-handler",
    "pr38460-serving",
}


def test_no_figure_waits_in_words_for_a_result_that_is_there():
    for one in SHEETS:
        for name in (*one.needs, *one.also):
            if (RESULTS / f"{name}.json").is_file():
                assert f"once {name}" not in f"{one.ours} {one.differs} {one.reason}", one.name


def result(name: str, samples: list[dict], **fields: object) -> dict:
    machine = {"cpu": "cpu", "gpu": ["gpu", "gpu"]}
    head = {"name": name, "commit": "c" * 40, "date": "2026-01-01", "machine": machine, "metrics": {}}
    return {**head, "samples": samples, **fields}


def write(folder, name: str, samples: list[dict], **fields: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result(name, samples, **fields)))


def contiguous() -> list[dict]:
    rows: list[dict] = [{"part": "kernel", "variant": "plain.flash3", "kind": "check", "error": 0.0}]
    for cache in ("plain", "paged16", "token-major", "layer-major"):
        for kernel in ("flash3",) if cache == "plain" else ("flash3", "torch_flash2"):
            head = {"part": "kernel", "variant": f"{cache}.{kernel}"}
            rows.append({**head, "kind": "prefill", "tokens": 16384, "layer_ms": 2.0, "tflop": 1.0})
            rows.append({**head, "kind": "decode", "batch": 8, "tokens": 16384, "ms": 3.0, "gb": 1.0})
    for engine in ("paged16", "token-major"):
        head = {"part": "serving", "engine": engine, "kernel": "flash3"}
        rows.append({**head, "kind": "prefill", "tokens": 16384, "ttft_ms": 900.0})
        rows.append({**head, "kind": "decode", "batch": 8, "tokens": 16384, "gap_ms": 12.0})
    return rows


def test_every_promised_figure_is_in_the_list_once_and_says_what_it_is():
    names = [one.name for one in SHEETS]
    assert len(names) == len(set(names))
    assert set(names) >= PROMISED
    for one in SHEETS:
        assert {*one.needs, *one.also} <= {*MEASURES, "h200-contiguous"}, one.name
        if one.name in PROMISED:
            assert one.paper, one.name
            assert (one.ours and one.differs and one.draw) or one.reason, one.name


def test_without_results_every_figure_says_why_it_is_not_there(tmp_path, capsys):
    wanted = ["memserve-12", "vattention-02", "vattention-12", "cluster-footprint"]
    assert main([str(tmp_path), str(tmp_path / "out"), "--kinds", "svg", "--only", ",".join(wanted)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == sorted(wanted, key=[one.name for one in SHEETS].index)
    assert all("not measured: " in line for line in said)
    assert any("no result file slot-mapping" in line for line in said)


def test_the_same_results_give_the_same_bytes(tmp_path):
    write(tmp_path, "cluster-footprint", FOOTPRINT, metrics=bench_footprint.metrics_from_samples(FOOTPRINT))
    for target in ("a", "b"):
        assert main([str(tmp_path), str(tmp_path / target), "--only", "cluster-footprint,memserve-12"]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


WITHOUT_BLOCKS = [*vattention.SHEETS, *vattention_tables.SHEETS]
MODEL = {"model": {"num_hidden_layers": 32}}


@pytest.mark.parametrize("name", [one.name for one in WITHOUT_BLOCKS if "h200-contiguous" in one.needs])
def test_figures_of_kernels_without_a_block_table_are_drawn_once_they_are_measured(tmp_path, name):
    write(tmp_path, "h200-contiguous", contiguous(), settings=MODEL)
    (one,) = [one for one in SHEETS if one.name == name]
    assert sheet.draw(one, sheet.Results(tmp_path), tmp_path, ["svg"]) == "drawn"
    write(tmp_path, "h200-contiguous", [], settings=MODEL)
    assert "has no samples" in sheet.draw(one, sheet.Results(tmp_path), tmp_path, ["svg"])


def test_a_prompts_time_stands_beside_the_attention_of_all_its_layers():
    found = result("h200-contiguous", contiguous(), settings=MODEL)
    axes = vattention_tables.prefill(found).axes[0]
    cells = {cell.get_text().get_text() for cell in axes.tables[0].get_celld().values()}
    assert "0.90 (0.06)" in cells, "900 ms, 32 layers of 2 ms"


def woven() -> dict[str, list[dict]]:
    """Samples of h200-fused-norm and h200-weave."""
    kernel = [
        {"world": world, "who": who, "tokens": tokens, "bytes": tokens << 14, "sms": sms, "us": [us * tokens / 512]}
        for world in (2, 4)
        for tokens in (512, 4096)
        for who, sms, us in (
            ("ours", 0, 50.0), ("nccl", 0, 90.0), ("torch two-shot", 0, 70.0),
            ("two_shot/bulk", 0, 50.0), ("two_shot/bulk", 16, 60.0), ("two_shot/plain", 16, 65.0),
        )
    ]  # fmt: skip
    steps = [
        {"kind": "step", "shape": "70b", "layers": 4, "ranks": 4, "tokens": tokens, "mode": mode, "ms": ms * tokens}
        for tokens in (4096, 8192)
        for mode, ms in (
            ("stock", 1.0), ("stock-alone", 0.8), ("off", 1.1), ("fuse", 0.95), ("full", 0.9), ("alone", 0.85),
        )
    ]  # fmt: skip
    served = [
        {"kind": "serving", "shape": "70b", "layers": 4, "ranks": 4, "workload": "sharegpt", "step_tokens": chunk,
         "mode": mode, "tokens": 1000, "s": s}
        for chunk in (1024, 2048)
        for mode, s in (("stock", 1.2), ("fuse", 1.1), ("full", 1.0))
    ]  # fmt: skip
    cut = [
        {"kind": "ffn", "shape": "70b", "layers": 4, "ranks": 4, "tokens": tokens,
         "us": {"whole": [10.0], "equal": [12.0], "smart": [10.5]}}
        for tokens in (1024, 2048)
    ]  # fmt: skip
    failed = {"kind": "failed", "engine": "stock-fused"}
    return {"h200-fused-norm": kernel, "h200-weave": [*steps, *served, *cut, failed]}


@pytest.mark.parametrize("one", [one for one in tokenweave.SHEETS if one.needs], ids=lambda one: one.name)
def test_figures_of_woven_steps_are_drawn_once_they_are_measured(tmp_path, one):
    (name,) = one.needs
    write(tmp_path / "full", name, woven()[name])
    assert sheet.draw(one, sheet.Results(tmp_path / "full"), tmp_path, ["svg"]) == "drawn"
    write(tmp_path / "empty", name, [])
    assert "has no" in sheet.draw(one, sheet.Results(tmp_path / "empty"), tmp_path, ["svg"])


def test_the_footprint_is_the_median_start_and_the_largest_memory():
    assert bench_footprint.metrics_from_samples(FOOTPRINT) == {
        "ready_s": 20.0,
        "ready_max_s": 30.0,
        "pss_bytes": float(920 << 20),
        "failed_requests": 0.0,
    }


def test_the_serving_table_has_a_row_for_each_measured_figure(tmp_path):
    moved = [{"direction": "load", "bytes": 1_000_000_000, "s": 0.025, "submit_us": 90.0, "copies": 9}]
    rows = [
        {"engine": engine, "load": "reuse", "begin_s": 0.0, "end_s": 1.0, "requests": 5, "ttft_ms": [30.0],
         "tpot_ms": [9.0], "gaps_ms": [9.0], "transfers": moved}
        for engine in ("stock", "quire")
    ]  # fmt: skip
    write(tmp_path, "h200-offload", rows, metrics=bench_offload.metrics_from_samples(rows))
    (one,) = [one for one in SHEETS if one.name == "pr38460-serving"]
    assert sheet.draw(one, sheet.Results(tmp_path), tmp_path, ["svg", "png"]) == "drawn"


def drawn(folder, name: str) -> str:
    (folder / "results").mkdir(exist_ok=True)
    (found,) = [one for one in SHEETS if one.name == name]
    return sheet.draw(found, sheet.Results(folder / "results"), folder / "drawn", ("svg",))


def point(workload: str, system: str, seed: int = 1) -> dict:
    return {
        "kind": "point", "workload": workload, "load": "burst", "system": system, "seed": seed, "failed": 0,
        "burst_from_ms": 15.0, "at_ms": [0.0, 10.0, 20.0], "ttft_ms": [5.0, 9.0, 70.0], "rct_ms": [9.0, 9.0, 90.0],
        "tpot_ms": [1.0, 2.0, 3.0], "tbt_p99_ms": 4.0, "peak_kv_bytes": 1, "counts": {},
    }  # fmt: skip


def test_bursts_are_drawn_of_a_seed_that_all_systems_have_and_long_ones_say_what_is_missing(tmp_path):
    systems = ("fcfs", "cfs_dram", "cfs_peer")
    samples = [point("sharegpt", name) for name in systems] + [point("arxiv", "fcfs")]
    metrics = bench_burst.metrics_from_samples(samples)
    write(tmp_path / "results", "h200x2-burst", samples, metrics=metrics)
    assert drawn(tmp_path, "aqua-01") == drawn(tmp_path, "aqua-08") == "drawn"
    assert "arxiv" in drawn(tmp_path, "aqua-13")


def test_a_reload_is_drawn_with_its_parts_and_its_ceilings(tmp_path):
    head = {"kind": "reload", "prompt_tokens": 100, "ttft_ms": 9.0, "queue_ms": 0.0}
    row = {**head, "fetch_ms": 5.0, "prefill_ms": 3.0, "bytes_moved": 10**9}
    samples = [row | {"tier": tier, "sources": {tier: 90}} for tier in ("peer", "dram")]
    assert "not measured" in drawn(tmp_path, "aqua-09")
    metrics = bench_context_reload.metrics_from_samples(samples)
    write(tmp_path / "results", "h200x2-context-reload", samples, metrics=metrics)
    found = sheet.Results(tmp_path / "results")
    (one,) = [one for one in SHEETS if one.name == "aqua-09"]
    assert sheet.draw(one, found, tmp_path / "drawn", ("svg",)) == "drawn"


def test_long_prompts_are_drawn_at_the_lengths_that_both_places_had(tmp_path):
    row = {"kind": "decode", "prompt_tokens": 90, "ttft_ms": 9.0, "decode_tokens": 10, "tier_bytes": 10**9}
    samples = [
        {
            **row,
            "tier": tier,
            "ratio": ratio,
            "decode_ms": took_ms,
            "far_bytes": 10**9 if tier != "own" else 0,
        }
        for tier, ratio, took_ms in (("own", 0.5, 9.0), ("dram", 2.0, 90.0), ("dram", 3.0, 95.0))
    ]
    assert "not measured" in drawn(tmp_path, "aqua-09b")
    metrics = bench_long_prompt.metrics_from_samples(samples)
    write(tmp_path / "results", "h200x2-long-prompt", samples, metrics=metrics)
    assert "both places" in drawn(tmp_path, "aqua-09b")
    samples.append({**samples[1], "tier": "peer", "decode_ms": 20.0})
    metrics = bench_long_prompt.metrics_from_samples(samples)
    write(tmp_path / "results", "h200x2-long-prompt", samples, metrics=metrics)
    assert drawn(tmp_path, "aqua-09b") == "drawn"
