"""bench_killed: figures come from samples, a late word fails the bench, so does a writer that nobody saw write."""

import json
import os

import pytest

from loadtest import bench_killed as bench
from loadtest import killed_engine
from loadtest.killed_rig import OWN_WORD, SOURCE
from loadtest.results import check_metrics
from loadtest.vmm_children import HOST_BYTE, WRITTEN_WORDS
from shared.kernels.nvrtc import CompilerUnavailable, compile_source

GIB = 1 << 30


def killed(kind: str, number: int = 0, *, stopped: bool = False, dead_ms: float = 10.0, **more) -> dict:
    return {
        "kind": kind, "stopped": stopped, "round": number, "wrote_before": True, "wrote_before_words": 9,
        "wrote_on": True, "dead_ms": dead_ms, "filled_ms": 1.0, "freed_ms": dead_ms + 2, "late_words": 0,
        "late_first": [], "looked_at_bytes": GIB,
    } | more  # fmt: skip


def engine(number: int, dead_ms: float) -> dict:
    return {
        "kind": "engine", "round": number, "dead_ms": dead_ms, "held_bytes": 20 * GIB, "later_bytes": GIB,
        "heirs": number, "command": "core",
    }  # fmt: skip


def whole_round(**more) -> list[dict]:
    return [killed(kind, stopped=stopped, **more) for kind in bench.KINDS for stopped in (False, True)]


def test_figures_are_medians_and_maxima_of_each_kind_and_counts_of_all_writers():
    rows = [
        killed("kernel", dead_ms=10.0), killed("kernel", 1, dead_ms=30.0, filled_ms=4.0),
        killed("kernel", stopped=True, dead_ms=20.0), killed("copies", stopped=True, wrote_on=False, dead_ms=5.0),
        killed("copies", dead_ms=6.0, freed_ms=None, late_words=3),
        engine(0, 100.0), engine(1, 300.0), engine(2, 200.0),
    ]  # fmt: skip
    found = bench.metrics_from_samples(rows)
    assert check_metrics(found) == []
    assert (found["kernel_dead_ms"], found["kernel_dead_max_ms"]) == (20.0, 30.0)
    assert (found["copies_dead_ms"], found["copies_dead_max_ms"]) == (5.0, 6.0)
    assert (found["engine_dead_ms"], found["engine_dead_max_ms"]) == (200.0, 300.0)
    assert (found["rounds_count"], found["looked_at_bytes"], found["late_words_count"]) == (5, 5 * GIB, 3)
    assert (found["stopped_rounds_count"], found["stopped_wrote_on_count"]) == (2, 1)
    assert (found["kernel_freed_ms"], found["copies_freed_ms"], found["unfreed_count"]) == (22.0, 7.0, 1)
    assert found["fill_max_ms"] == 4.0
    assert (found["engine_held_bytes"], found["engine_heirs_count"]) == (20 * GIB, 2)


def test_a_writer_that_was_not_seen_to_write_is_an_error():
    with pytest.raises(ValueError, match="proves nothing"):
        bench.metrics_from_samples([killed("kernel", wrote_before=False)])


@pytest.mark.parametrize(("late", "status"), [(0, 0), (1, 1)])
def test_one_late_word_makes_the_exit_status_1(tmp_path, late, status):
    """All is measured already, so that no GPU is asked for."""
    rows = whole_round()
    rows[-1]["late_words"] = late
    keep = tmp_path / "kept.jsonl"
    keep.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--rounds", "1", "--keep", str(keep), "--out", str(tmp_path), "--commit", "abc"]
    assert bench.main(words) == status
    written = json.loads((tmp_path / "h200-killed.json").read_text())
    assert written["metrics"]["late_words_count"] == late


def test_what_lacks_is_each_kind_running_and_stopped_and_the_engines_that_were_asked_for():
    options = bench.parsed(["--rounds", "2", "--engine"])
    lacking = bench.missing(options, [*whole_round(), engine(0, 1.0), engine(1, 1.0)])
    assert [key["round"] for key in lacking] == [1, 1, 1, 1, 2]
    assert lacking[-1] == {"kind": "engine", "round": 2}
    assert {(key["kind"], key.get("stopped")) for key in lacking[:-1]} == {
        (kind, stopped) for kind in bench.KINDS for stopped in (False, True)
    }


def test_a_round_that_fails_is_said_and_lacks(capsys):
    def fails() -> dict:
        raise RuntimeError("the writer's words were not seen")

    progress = bench.Progress(None, bench.said)
    bench._try({"kind": "copies", "stopped": True, "round": 3}, progress, fails)
    assert progress.samples == []
    assert "FAILED copies stopped 3: RuntimeError: the writer's words" in capsys.readouterr().out


def test_an_engine_decodes_when_its_last_whole_step_is_fresh_and_has_a_token_of_each_request():
    now = 100.0
    steps = "99.1 5.0 32 8192 0 0\n99.5 5.0 32 32 0 0\n"
    assert killed_engine.decodes(steps, now)
    assert killed_engine.decodes(steps + "99.6 5.0 3", now), "a line that is not whole yet is not read"
    assert not killed_engine.decodes(steps, now + killed_engine.FRESH_S), "too old"
    assert not killed_engine.decodes(steps + "99.6 5.0 31 31 0 0\n", now)
    assert not killed_engine.decodes("99.5 5.0 32 4096 0 0\n", now), "a prompt"
    assert not killed_engine.decodes("", now)


def test_who_has_the_gpus_file_open_is_found_and_the_dead_are_passed_over(tmp_path, monkeypatch):
    file = tmp_path / "gpu"
    file.touch()
    monkeypatch.setattr(killed_engine, "GPU_FILE", str(file))
    dead = 1 << 30  # above any pid
    assert killed_engine.with_gpu([dead, os.getpid()]) == []
    with file.open():
        assert killed_engine.with_gpu([dead, os.getpid()]) == [os.getpid()]


def test_no_word_of_a_writer_can_be_the_lenders():
    assert OWN_WORD & 1 << 31
    assert not any(word & 1 << 31 for word in (*WRITTEN_WORDS, HOST_BYTE << 24))


def test_the_endless_kernel_compiles_and_each_of_its_stores_is_made():
    try:
        ptx = compile_source(SOURCE, "sm_90").ptx
    except CompilerUnavailable as error:
        pytest.skip(error.message)
    assert "st.volatile.global.u32" in ptx
    assert "ret;" not in ptx, "it has a way out"
