"""bench_offload: figures come from samples, phases load what they say, and both engines are asked the same way."""

import asyncio
import sys
import textwrap

import pytest

from loadtest import bench_offload, offload_phases
from loadtest.results import check_metrics, load_result

SIZES = offload_phases.Sizes(
    pool=6, prompt_tokens=64, answer_tokens=4, clients=2, seconds=0.05, streams=3,
    stream_prompt_tokens=16, stream_tokens=40, vocabulary=500,
)  # fmt: skip


def transfer(direction: str, num_bytes: int, seconds: float, submit_us: float = 100.0) -> dict:
    return {"direction": direction, "bytes": num_bytes, "s": seconds, "submit_us": submit_us, "copies": 1}


def sample(engine: str, load: str, **fields: object) -> dict:
    head = {"engine": engine, "load": load, "begin_s": 0.0, "end_s": 2.0, "requests": 10, "transfers": []}
    return {**head, "tpot_ms": [10.0], "ttft_ms": [50.0], "gaps_ms": [10.0], **fields}


def test_bandwidth_is_bytes_over_event_time_and_swap_is_beside_its_control():
    samples: list[dict] = [{"engine": "stock", "load": "ready", "num_blocks": 5}]
    for engine, seconds, tpot in (("stock", 0.2, 12.0), ("quire", 0.1, 10.2)):
        moved = [transfer("load", 2_000_000_000, seconds), transfer("load", 2_000_000_000, seconds)]
        samples.append(sample(engine, "reuse", transfers=moved))
        samples.append(sample(engine, "new", transfers=[transfer("store", 1_000_000_000, seconds)]))
        samples += [
            sample(engine, "quiet"),
            sample(engine, "control"),
            sample(engine, "swap", tpot_ms=[tpot]),
        ]
    metrics = bench_offload.metrics_from_samples(samples)
    assert metrics["stock_reuse_load_gb_per_s"] == pytest.approx(10)
    assert metrics["load_of_stock_ratio"] == pytest.approx(2)
    assert metrics["store_of_stock_ratio"] == pytest.approx(2)
    assert metrics["quire_tpot_swap_of_control_ratio"] == pytest.approx(1.02)
    assert metrics["stock_tpot_swap_of_quiet_ratio"] == pytest.approx(1.2)
    assert metrics["quire_reuse_requests_per_s"] == 5
    assert check_metrics(metrics) == []
    assert bench_offload.metrics_from_samples(samples[:1]) == {}


def test_a_line_that_is_still_being_written_is_left_out():
    text = "1.5 load 4096 0.000100000 12.5 3\n1.6 store 81"
    assert bench_offload.transfers_of(text) == [
        {"direction": "load", "bytes": 4096, "s": 0.0001, "submit_us": 12.5, "copies": 3}
    ]


async def test_phases_ask_for_what_they_say():
    asked: list[tuple[int, int]] = []
    prompts: list[tuple[int, ...]] = []

    async def stream(name: str, prompt: list[int], max_tokens: int):
        asked.append((len(prompt), max_tokens))
        prompts.append(tuple(prompt))
        for _ in range(max_tokens):
            await asyncio.sleep(0.001)
            yield 1

    phases = offload_phases.Phases(stream, SIZES)
    await phases.run("fill")
    assert asked == [(64, 1)] * 6 + [(16, 8)]
    pool = prompts[:6]
    prompts.clear()
    found = await phases.run("reuse")
    assert found["requests"] == len(prompts) == len(found["ttft_ms"])
    assert prompts[:6] == pool[: len(prompts)]
    prompts.clear()
    while not prompts:  # a machine may stand still for a whole phase
        await phases.run("new")
    assert not set(prompts) & set(pool)
    for load, beside in (("quiet", set()), ("control", {(16, 1)}), ("swap", {(64, 1)})):
        asked.clear()
        found = await phases.run(load)
        assert asked.count((16, 40)) == 3
        assert set(asked) - {(16, 40)} == beside
        assert found["requests"] == len(asked) - 3
        assert len(found["tpot_ms"]) == 3


@pytest.mark.slow
def test_engines_take_turns_and_one_that_dies_is_reported(tmp_path, monkeypatch, capsys):
    script = tmp_path / "fake_engine.py"
    script.write_text(
        textwrap.dedent("""
        import json, pathlib, sys
        name, model, out = sys.argv[1:4]
        out = pathlib.Path(out)
        assert sys.stdin.readline() == "start\\n"
        def say(sample):
            with out.open("a") as file:
                file.write(json.dumps(sample) + "\\n")
        say({"load": "ready"})
        for line in sys.stdin:
            load = line.strip()
            if load == "end" or (name == "quire" and load == sys.argv[4]):
                break
            with out.with_suffix(".transfers").open("a") as file:
                file.write("1.0 load 1000 0.001 5.0 2\\n")
            say({"load": load, "begin_s": 0.0, "end_s": 1.0, "requests": 3, "ttft_ms": [1.0], "tpot_ms": [2.0],
                 "gaps_ms": [2.0]})
        """)
    )
    real = bench_offload.subprocess.Popen

    def popen(words, **options):
        return real([sys.executable, str(script), *words[3:6], *words[6:7]], **options)

    monkeypatch.setattr(bench_offload.subprocess, "Popen", popen)
    assert bench_offload.main(["--out", str(tmp_path), "--model-dir", "m", "--engine-flags", "never"]) == 0
    written = load_result(tmp_path / "h200-offload.json")
    order = [(row["engine"], row["load"]) for row in written["samples"] if "round" in row]
    assert order[:2] == [("stock", "reuse"), ("quire", "reuse")]
    assert order[8:10] == [("quire", "reuse"), ("stock", "reuse")]
    assert order[-2:] == [("quire", "new"), ("stock", "new")]
    assert all(len(row["transfers"]) == 1 for row in written["samples"] if "round" in row)
    assert (
        bench_offload.main(["--out", str(tmp_path / "b"), "--model-dir", "m", "--engine-flags", "swap"]) == 1
    )
    assert "FAILED: quire: no answer" in capsys.readouterr().out
    assert not (tmp_path / "b").exists()
