"""The measuring clients against a server of known times: loadtest/mock_upstream.py."""

import csv
import json
import random
import subprocess
import sys

import pytest

from loadtest import load, systems
from loadtest.http_client import Client
from loadtest.outcomes import read_run
from loadtest.processes import Fleet, StartFailed, family, pss_bytes
from loadtest.registry import ROOT

STEP_MS = 20.0


@pytest.fixture
def upstream(tmp_path):
    with Fleet(tmp_path / "logs") as fleet:
        yield fleet, systems.start_upstream(fleet, name="upstream", step_ms=STEP_MS)


async def test_the_lean_client_sees_every_event_at_its_time(upstream):
    _, system = upstream
    client = Client(system.base_url)
    on_time = 0
    # all but the first use the first one's connection; a busy machine may be late now and then
    for _ in range(60):
        request = load.chat(system, client, "hello", max_tokens=6, stream=True)
        reply = await client.post(request)
        assert reply.ok
        assert reply.num_events == 6 + 3  # role, finish, [DONE]
        took_ms = (reply.pieces[-1][0] - reply.started) * 1000
        on_time += 0 < reply.ttft_ms() < STEP_MS and 4 * STEP_MS <= took_ms < 12 * STEP_MS
        if on_time == 2:
            break
    assert on_time == 2
    whole = await client.post(load.chat(system, client, "hello", max_tokens=6, stream=False))
    assert whole.ok
    assert json.loads(whole.body)["choices"][0]["finish_reason"] == "length"
    client.close()


async def test_paced_streams_count_the_window_only(upstream):
    fleet, system = upstream
    client = Client(system.base_url)
    for _ in range(30):  # a busy machine may stop either end for a part of the window, but not each time
        requests = [load.chat(system, client, "x", max_tokens=200, stream=True) for _ in range(10)]
        found = await load.paced_streams(client, requests, 1.0, lambda: fleet.cpu_us("upstream"))
        assert found["failed"] == 0
        assert 0 <= found["cpu_us"] < 1e6
        if found["count"] == pytest.approx(10 * 1000 / STEP_MS, rel=0.15):
            break
    assert found["count"] == pytest.approx(10 * 1000 / STEP_MS, rel=0.15)
    client.close()


async def test_loops_send_everything_and_count_failures(upstream):
    _, system = upstream
    client = Client(system.base_url)
    rng = random.Random(1)
    requests = [
        load.chat(system, client, load.message(rng, 200), max_tokens=1, stream=True) for _ in range(40)
    ]
    assert len(set(requests)) == 40
    _, failed = await load.closed_loop(client, requests, 8)
    assert failed == 0
    ttft_ms, failed = await load.open_loop(client, requests, 400.0, rng, max_lag_ms=60_000.0)
    assert (len(ttft_ms), failed) == (40, 0)
    client.close()
    nobody = Client("http://127.0.0.1:9")
    assert (await load.closed_loop(nobody, requests[:3], 2))[1] == 3


def test_processes_are_weighed_and_nothing_is_left(upstream):
    fleet, _ = upstream
    pid = fleet.pid("upstream")
    assert family(pid) == [pid]
    assert pss_bytes(pid) > 1 << 20
    fleet.stop("upstream")
    assert pss_bytes(pid) == 0


def test_a_process_that_does_not_start_shows_its_log(tmp_path):
    with Fleet(tmp_path) as fleet, pytest.raises(StartFailed, match="no such thing"):
        fleet.start(
            "bad", [sys.executable, "-c", "raise SystemExit('no such thing')"], ready_url="tcp://127.0.0.1:9"
        )


@pytest.mark.slow
def test_locust_reports_the_servers_own_times_and_a_line_per_request(upstream, tmp_path):
    _, system = upstream
    for seconds in (3, 3, 12, 48):  # a busy machine may need as long to start, and be late itself
        lines = locust_lines(system, tmp_path, seconds)
        assert {line.error for line in lines} <= {""}
        with (tmp_path / "load_stats.csv").open() as stats:  # written once a second
            rows = {row["Name"]: row for row in csv.DictReader(stats)}
        if is_right := len(lines) >= 4 and are_the_servers(lines) and {"ttft", "tpot", "e2e"} <= set(rows):
            break
    assert is_right, (lines, rows)
    assert int(rows["ttft"]["Failure Count"]) == 0
    assert (tmp_path / "load.html").stat().st_size > 10_000


def are_the_servers(lines):
    """Whether the times are those that the server takes."""
    middle = sorted(lines, key=lambda line: line.tpot_ms)[len(lines) // 2]
    return middle.tpot_ms == pytest.approx(STEP_MS, rel=0.25) and 0 < middle.ttft_ms < STEP_MS


def locust_lines(system, tmp_path, seconds):
    command = [
        sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-u", "2", "-r", "2",
        "-t", f"{seconds}s", "-H", system.base_url, "--max-tokens", "8", "--csv", str(tmp_path / "load"),
        "--html", str(tmp_path / "load.html"), "--jsonl", str(tmp_path / "load.jsonl"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    path = tmp_path / "load.jsonl"
    return [one for one in read_run(path).outcomes if not one.cut_off] if path.exists() else []
