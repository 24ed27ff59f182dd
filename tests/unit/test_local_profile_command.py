"""`quire profile` as a user types it: the file, the table, exit codes, and refusals before any time is spent."""

import json
import sys

import pytest
from typer.testing import CliRunner

from deploy.local.cli import app
from loadtest.profiler.core.profile import Profile, decode, encode

pytestmark = pytest.mark.slow

GB = 10**9
FAST = (
    "--simulate", "llama-8b", "--rates", "8:16", "--max-rate", 16, "--step", 8, "--repeats", 1, "--seconds", 2,
    "--requests", 16, "--burst", "2", "--burst-s", 3, "--context", 2048,
)  # fmt: skip


def quire(*words):
    return CliRunner().invoke(app, ["profile", *map(str, words)])


def test_a_simulated_model_gets_a_file_a_table_plots_and_the_same_as_json(tmp_path):
    target, plots = tmp_path / "p.json", tmp_path / "plots"
    told = quire(*FAST, "--out", target, "--plots", plots)
    assert told.exit_code == 0, told.output
    found = decode(target.read_bytes())
    assert (found.model, found.tp, found.role) == ("llama-8b", 1, "producer")
    assert found.settings["bursts"] == [2.0]
    assert found.machine["cpu"]
    assert "lends" in told.stdout.splitlines()[-2]
    assert "swap need at 2x" in told.stdout
    assert {path.stem for path in plots.iterdir()} == {"profile-requests", "profile-rates", "profile-bursts"}
    read = json.loads(quire(*FAST, "--out", target, "--json").stdout)
    assert (read["bytes_per_gpu"], read["stable_rate_per_s"]) == (
        found.bytes_per_gpu,
        found.stable_rate_per_s,
    )
    assert "runs" not in read


def test_the_placer_reads_what_a_lender_and_a_borrower_were_found_to_be(tmp_path):
    for name, role, count in (
        ("rich", "producer", 40 * GB),
        ("poor", "consumer", -6 * GB),
        ("idle", "neutral", 0),
    ):
        found = Profile(
            model=name, tp=1, role=role, bytes_per_gpu=count, stable_rate_per_s=1.0, pool_bytes=0, peak_kv_bytes=0,
            free_bytes=0,
        )  # fmt: skip
        (tmp_path / f"{name}.json").write_bytes(encode(found))
    lines = ["[[servers]]", 'name = "a"', "gpus = 3", 'gpu_memory_bytes = "141 GB"']
    for name in ("rich", "poor", "idle"):
        lines += ["[[models]]", f'profile = "{name}.json"']
    (tmp_path / "q.toml").write_text("\n".join(lines))
    told = CliRunner().invoke(app, ["place", str(tmp_path / "q.toml"), "--json"])
    assert told.exit_code == 0, told.output + str(told.exception)
    placed = json.loads(told.stdout)
    assert {one["model"]: one["role"] for one in placed["instances"]} == {
        "rich": "producer", "poor": "consumer", "idle": "neutral"
    }  # fmt: skip
    assert len(placed["pairs"]) == 1


def test_a_rate_that_nothing_keeps_is_exit_code_one_and_the_file_says_why(tmp_path):
    target = tmp_path / "p.json"
    told = quire(*FAST, "--slo-ttft-ms", 0.001, "--out", target)
    assert told.exit_code == 1
    assert "none" in told.stdout
    assert decode(target.read_bytes()).stable_rate_per_s == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--simulate", "gpt-9"), "gpt-9"),
        (("--simulate", "llama-8b", "--gpu", "tpu"), "no data sheet"),
        (("--simulate", "llama-8b", "--callable", "a:b"), "one of"),
        (("--simulate", "llama-8b", "--url", "http://127.0.0.1:9"), "one of"),
        (("--simulate", "llama-8b", "--burst", "two"), "--burst two"),
        (("--simulate", "llama-8b", "--burst", "0.5"), "above 1"),
        (("--simulate", "llama-8b", "--rates", "4"), "LOW:HIGH"),
        (("--simulate", "llama-8b", "--rates", "9:2"), "rates must be"),
        (("--simulate", "llama-8b", "--step", "0"), "rates must be"),
        (("--simulate", "llama-8b", "--repeats", "2"), "odd"),
        (("--simulate", "llama-8b", "--slo-tbt-ms", "-1"), "above 0 ms"),
        (("--simulate", "llama-8b", "--ttft-share", "2"), "shares"),
        (("--simulate", "llama-8b", "--threshold-bytes", "-1"), "threshold"),
        (("--simulate", "llama-8b", "--lengths", "nothing"), "no workload"),
        (("--simulate", "llama-8b", "--trace", "none.csv"), "cannot be read"),
        (("--simulate", "llama-8b", "--tp", "0"), "--tp"),
        (("--simulate", "llama-8b", "--scale", "-1"), "factors"),
        (("--simulate", "llama-8b", "--context", "1"), "context"),
        (("--simulate", "llama-8b", "--seconds", "0"), "longer than 0"),
        (("--simulate", "llama-8b", "--out", "no/such/folder/p.json"), "--out"),
        (("--simulate", "llama-8b", "--cost", "none.json"), "cannot be read"),
        (("--simulate", "llama-8b", "--memory-tokens", "100"), "has no room"),
        (("--url", "http://127.0.0.1:9"), "--status"),
        (
            ("--url", "http://127.0.0.1:9", "--status", "http://127.0.0.1:abc/status"),
            "no address of a server",
        ),
        (("--url", "127.0.0.1:9", "--status", "http://127.0.0.1:9/status"), "no address of a server"),
        (("--url", "http://127.0.0.1:9", "--status", "http://127.0.0.1:9/status"), "does not answer"),
        (("--callable", "nothing", "--device", "cpu"), "MODULE:FUNCTION"),
        (("--callable", "json:dumps", "--max-batch", "0"), "largest batch"),
    ],
)
def test_what_cannot_be_done_is_said_and_no_file_is_written(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    done = quire(*words)
    assert done.exit_code != 0
    assert says in done.output + str(getattr(done.exception, "message", done.exception))
    assert not list(tmp_path.iterdir())


def test_a_callables_batches_are_profiled_where_the_command_is_run(tmp_path, monkeypatch):
    (tmp_path / "quire_profiled_model.py").write_text(
        "held = []\ndef batch(size):\n    if size > 2:\n        raise MemoryError\n    held.append(size)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ("--callable", "quire_profiled_model:batch", "--device", "cpu", "--threshold-bytes", 0)
    told = quire(*words, "--plots", "plots")
    assert told.exit_code == 0, told.output
    found = decode((tmp_path / "profile.json").read_bytes())
    assert (found.model, found.role) == ("quire_profiled_model:batch", "producer")
    assert 0 < found.bytes_per_gpu == found.free_bytes < found.pool_bytes
    assert [one["batch"] for one in found.batches] in ([1], [1, 2])
    assert "items/s" in told.stdout
    assert (tmp_path / "plots" / "profile-batches.svg").is_file()
    neutral = quire(*words[:-1], 1 << 60)
    assert neutral.exit_code == 0
    assert decode((tmp_path / "profile.json").read_bytes()).role == "neutral"


def test_help_says_what_exit_codes_mean():
    told = CliRunner().invoke(app, ["profile", "--help"], env={"COLUMNS": "200"}).stdout
    assert "Exit codes: 0 ok" in told
    for option in (
        "--slo-ttft-ms",
        "--slo-tbt-ms",
        "--step",
        "--burst",
        "--threshold-bytes",
        "--out",
        "--plots",
    ):
        assert option in told


def test_with_fair_slices_bursts_are_run_in_turns_too_and_their_swap_space_is_told(tmp_path):
    target = tmp_path / "p.json"
    told = quire(*FAST, "--memory-tokens", 24_000, "--chunk", 2048, "--local-policy", "cfs", "--out", target)
    assert told.exit_code == 0, told.output
    (burst,) = decode(target.read_bytes()).bursts
    assert 0 < burst["turns_ttft_ms"] < burst["ttft_ms"]
    assert burst["turns_swap_bytes"] > 0
    assert "in fair slices at 2x" in told.stdout
    assert quire(*FAST, "--memory-tokens", 24_000, "--chunk", 2048, "--out", target).exit_code == 0
    (plain,) = decode(target.read_bytes()).bursts
    assert plain == {**burst, "turns_ttft_ms": 0.0, "turns_swap_bytes": 0}


def test_turns_of_a_running_cluster_and_swap_space_without_a_rate_are_refused():
    told = quire("--local-policy", "cfs")
    assert told.exit_code != 0
    assert "--local-policy cfs is of simulated engines" in str(told.exception)
    told = quire(*FAST, "--local-policy", "cfs", "--swap-gb-per-s", 0)
    assert "--swap-gb-per-s 0: above 0; try 200" in str(told.exception)
