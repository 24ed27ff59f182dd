"""The open-loop driver against a cluster of mock engines, and its honesty about itself."""

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest import drive, report, systems
from loadtest.http_client import Client
from loadtest.open_loop import OpenLoop, Plan, lag_p99_ms, verdict
from loadtest.outcomes import read_run
from loadtest.processes import Fleet
from loadtest.registry import ROOT
from loadtest.workloads.catalogue import Options, build
from loadtest.workloads.request import scaled
from shared.testing.cluster import Cluster
from tests.support import patience

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "quire-demo"
STEP_MS = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = patience.flags({"worker": ["--mock-step-ms", "4"]})
    with Cluster(MODEL, log_dir=tmp_path_factory.mktemp("cluster"), num_prefill=2, flags=flags) as found:
        yield found


@pytest.fixture
def upstream(tmp_path):
    with Fleet(tmp_path / "logs") as fleet:
        yield systems.start_upstream(fleet, name="upstream", step_ms=STEP_MS)


def test_agents_run_causally_with_real_answers_and_receipts_and_make_a_report(cluster, tmp_path, capsys):
    out = tmp_path / "react.jsonl"
    flags = [
        "--url",
        cluster.url,
        "--workload",
        "react",
        "--rate",
        "12",
        "--requests",
        "40",
        "--scale",
        "0.2",
    ]
    assert drive.main([*flags, "--set", "think_ms=20", "--out", str(out), "--max-lag-ms", "20000"]) == 0
    found = read_run(out)
    assert found.head["model"] == cluster.model_name
    by_session: dict[str, list] = {}
    for one in found.outcomes:
        assert one.ok, one.error
        assert one.output_tokens == one.planned_output_tokens
        assert one.prompt_tokens == one.planned_prompt_tokens  # real answers have the planned lengths
        assert sum(one.sources.values()) == one.prompt_tokens
        assert 0 < one.ttft_ms <= one.jct_ms
        by_session.setdefault(one.session, []).append(one)
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.sent_ms >= before.ended_ms
    later = [one for one in found.outcomes if one.turn]
    assert later
    assert sum(one.sources.get("computed", 0) for one in later) < 0.7 * sum(
        one.prompt_tokens for one in later
    )
    hits = 1 - sum(one.sources.get("computed", 0) for one in found.outcomes) / sum(
        one.prompt_tokens for one in found.outcomes
    )
    assert hits <= found.head["hit_bound"] + 0.02  # whole blocks at both ends, but for partial last ones
    assert {one.placement for one in found.outcomes} <= {"disaggregated", "colocated"}
    assert report.main([str(out), "--out", str(tmp_path / "report")]) == 0
    assert "Hit rates by tier" in (tmp_path / "report" / "report.md").read_text()
    assert "goodput" in capsys.readouterr().out


async def test_a_client_at_its_bound_and_a_late_client_say_so(upstream):
    requests = scaled(build("azure-conv", Options(rate_per_s=100, num_requests=30)), 0.1)
    plan = Plan(model="mock", text=True, receipts=False, max_in_flight=3)
    client = Client(upstream.base_url)
    loop = OpenLoop(client, plan)
    outcomes = await loop.run(requests)
    assert loop.most_in_flight == 3
    skipped = [one for one in outcomes if one.skipped]
    assert skipped
    assert all("client's bound" in one.error for one in skipped)
    assert f"{len(skipped)} requests were not sent" in verdict(outcomes, plan)
    late = Plan(model="mock", text=True, receipts=False, max_lag_ms=1e-6)
    outcomes = await OpenLoop(client, late).run(requests[:5])
    client.close()
    assert all(one.ok for one in outcomes)
    assert lag_p99_ms(outcomes) > 0
    assert "late" in verdict(outcomes, late)


async def test_turns_after_a_failure_are_not_sent_and_histories_need_token_ids():
    requests = build("sharegpt", Options(rate_per_s=500, num_requests=12, seed=3, think_ms=0))
    assert any(one.turn for one in requests)
    nobody = Client("http://127.0.0.1:9")
    outcomes = await OpenLoop(nobody, Plan(model="m", real_history=True)).run(requests)
    for one in outcomes:
        assert not one.ok
        assert one.skipped == (one.turn > 0)
        assert ("turn before" in one.error) == (one.turn > 0)


def test_a_client_that_is_the_bottleneck_has_its_own_exit_status(upstream, tmp_path, capsys):
    flags = [
        "--url",
        upstream.base_url,
        "--model",
        "mock",
        "--text",
        "--workload",
        "azure-conv",
        "--rate",
        "200",
    ]
    more = ["--requests", "30", "--max-in-flight", "2", "--out", str(tmp_path / "run.jsonl")]
    assert drive.main([*flags, *more]) == drive.CLIENT_BOUND
    assert "the client was the bottleneck" in capsys.readouterr().err
    assert read_run(tmp_path / "run.jsonl").head["client_verdict"]


def test_a_workload_becomes_a_trace_and_the_trace_is_replayed(upstream, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    assert (
        drive.main(["--workload", "mooncake-synthetic", "--requests", "20", "--write-trace", str(trace)]) == 0
    )
    flags = ["--url", upstream.base_url, "--model", "mock", "--text", "--trace", str(trace), "--speed", "20"]
    assert (
        drive.main([*flags, "--scale", "0.01", "--max-lag-ms", "20000", "--out", str(tmp_path / "run.jsonl")])
        == 0
    )
    found = read_run(tmp_path / "run.jsonl")
    assert (len(found.outcomes), found.head["workload"]) == (20, "trace.jsonl")
    assert drive.main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert drive.main(["--workload", "react", "--set", "share_ratio=2"]) == 2
    assert drive.main(["--list"]) == 0
    assert "mooncake-conversation" in capsys.readouterr().out


def test_locust_users_play_the_same_sessions_with_receipts_and_make_a_report(cluster, tmp_path, capsys):
    for seconds in (6, 20, 60):  # a busy machine may need as long to start
        out = tmp_path / f"load-{seconds}.jsonl"
        command = [
            sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-u", "2", "-r", "2",
            "-t", f"{seconds}s", "-H", cluster.url, "--workload", "loogle", "--scale", "0.2", "--jsonl", str(out),
        ]  # fmt: skip
        began_s = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        took_ms = (time.monotonic() - began_s) * 1e3
        assert done.returncode == 0, done.stderr[-2000:]
        every = read_run(out).outcomes if out.exists() else []
        lines = [one for one in every if not one.cut_off]
        if len(lines) >= 2:
            break
    assert len(lines) >= 2
    assert {line.error for line in lines} == {""}
    assert len({line.request_id for line in lines}) == len(lines)
    for line in lines:
        assert sum(line.sources.values()) == line.prompt_tokens > 0
        assert line.instances
        assert line.output_tokens == line.planned_output_tokens
        assert 0 < line.ttft_ms <= line.jct_ms
        assert 0 < line.sent_ms <= line.ended_ms <= took_ms
    assert report.main([str(out), "--out", str(tmp_path / "report")]) == 0
    assert "Hit rates by tier" in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "distributions.svg").stat().st_size > 1_000
    assert f"load-{seconds}: {len(every)} requests" in (told := capsys.readouterr().out)
    assert "goodput" in told


LOCUST = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-u", "2", "-r", "2"]


def test_locust_users_play_a_trace_to_its_end(upstream, tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "load.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 400, "output_length": 50, "hash_ids": [number]}
        for number in range(5)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [
        "-t",
        "180s",
        "-H",
        upstream.base_url,
        "--trace",
        str(trace),
        "--scale",
        "0.1",
        "--jsonl",
        str(out),
    ]
    done = subprocess.run(
        [*LOCUST, *more], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = read_run(out)
    assert [line.error for line in found.outcomes] == [""] * 5
    assert (found.head["workload"], found.head["num_users"]) == ("trace.jsonl", 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "none.jsonl"], "none.jsonl"), (["--set", "share_ratio=2"], "--set wants a --workload"),
        (["--workload", "react", "--set", "share_ratio=2"], "no use for share_ratio"),
        (["--workload", "loogle", "--set", "x"], "want NAME=VALUE"),
        (["--workload", "loogle", "--trace", "t.csv"], "leave --workload"),
    ],
)  # fmt: skip
def test_locust_says_what_cannot_be_played(upstream, words, said):
    done = subprocess.run(
        [*LOCUST, "-H", upstream.base_url, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
