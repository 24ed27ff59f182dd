"""What the driver's file says of its run, how a run ends that is interrupted, and what no run is begun with."""

import signal
import subprocess
import sys
import time

import pytest

from loadtest import drive
from loadtest.outcomes import read_run
from loadtest.registry import ROOT
from loadtest.reports import render
from loadtest.reports.summary import Slo, summarise
from tests.support.serving_stub import serving

SHORT = ("--workload", "azure-conv", "--requests", "4", "--scale", "0.01", "--max-lag-ms", "20000")


def driven(stub, out, *words):
    assert drive.main(["--url", stub.url, "--rate", "100", *SHORT, "--out", str(out), *words]) == 0
    return read_run(out).head


def test_a_second_run_asks_other_prompts_unless_it_is_told_the_firsts_salt(tmp_path):
    with serving() as stub:
        first = driven(stub, tmp_path / "1.jsonl")
        second = driven(stub, tmp_path / "2.jsonl")
        driven(stub, tmp_path / "3.jsonl", "--salt", first["salt"])
        driven(stub, tmp_path / "4.jsonl", "--salt", "")
        driven(stub, tmp_path / "5.jsonl", "--salt", "")
    assert first["salt"] != second["salt"]
    asked = [sorted(body["prompt"] for body in stub.bodies[begin : begin + 4]) for begin in range(0, 20, 4)]
    assert [len(prompt) for prompt in asked[0]] == [len(prompt) for prompt in asked[2]]
    assert asked[0] == asked[2]
    assert asked[3] == asked[4]
    assert asked[1] not in (asked[0], asked[3])
    assert asked[0] != asked[3]


def test_a_runs_head_says_how_it_was_driven_and_never_the_key(tmp_path):
    with serving() as stub:
        head = driven(
            stub, tmp_path / "1.jsonl", "--bearer", "sk-secret", "--context", "64", "--seconds", "30"
        )
    told = head["driver"]
    assert (told["context"], told["seconds"], told["requests"], told["text"]) == (64, 30.0, 4, False)
    assert {"output_scale", "tokens", "token_ids", "max_in_flight", "speed"} <= set(told)
    assert "sk-secret" not in (tmp_path / "1.jsonl").read_text()


def test_the_rate_of_the_head_is_the_one_that_was_offered(tmp_path):
    trace = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 10, "output_length": 1}\n'
    trace.write_text("".join(row % (number * 1000) for number in range(5)))
    options = drive._parser().parse_args(["--workload", "react"])
    assert drive.rate_per_s(options, []) == 1.0
    options = drive._parser().parse_args(["--trace", str(trace), "--speed", "20"])
    requests, _ = drive._requests(options)
    assert drive.rate_per_s(options, requests) == 20.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speed", "2"], "--speed 2"), (["--trace", "TRACE", "--set", "think_ms=1"], "--set think_ms=1"),
        (["--trace", "TRACE", "--history", "real"], "--history real"),
        (["--text", "--tokens", "300:400"], "--tokens 300:400"),
    ],
)  # fmt: skip
def test_options_without_an_effect_are_refused(tmp_path, capsys, words, said):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 1}\n')
    words = [str(trace) if word == "TRACE" else word for word in words]
    out = ["--out", str(tmp_path / "run.jsonl")]
    assert drive.main(["--url", "http://127.0.0.1:9", "--model", "m", *out, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "no effect" in line


def test_an_interrupted_run_keeps_what_it_has_and_says_that_it_was_cut_short(tmp_path):
    out = tmp_path / "run.jsonl"
    with serving() as stub:
        stub.delay_s = 0.2
        command = [sys.executable, "-m", "loadtest.drive", "--url", stub.url, "--workload", "azure-conv"]
        more = ["--rate", "20", "--seconds", "600", "--scale", "0.01", "--max-lag-ms", "20000", "--out", out]
        running = subprocess.Popen(
            [*command, *map(str, more)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until_s = time.monotonic() + 60
        while stub.num_answered < 5 and time.monotonic() < until_s:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    assert "cut short" in errors
    run = read_run(out)
    assert run.head["cut_short"]
    assert 5 <= len(run.outcomes) == len({one.request_id for one in run.outcomes}) < 1_000
    assert all(one.ok or one.cut_off for one in run.outcomes), "those that were not sent are left out"
    found = summarise(run, Slo())
    assert "goodput" in said
    assert any("cut short" in text for text in render.warnings([found]))
