"""How a run of Locust's users ends: with answers on their way, and with no server."""

import subprocess
import sys

import pytest

from loadtest import systems
from loadtest.outcomes import read_run
from loadtest.processes import Fleet
from loadtest.registry import ROOT
from loadtest.reports.summary import Slo, summarise

LOCUST = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-u", "2", "-r", "2"]


def locust(*words):
    return subprocess.run(
        [*LOCUST, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_requests_that_the_runs_end_cuts_off_are_in_its_file(tmp_path):
    out = tmp_path / "load.jsonl"
    with Fleet(tmp_path / "logs") as fleet:
        upstream = systems.start_upstream(fleet, name="upstream", step_ms=20)
        for seconds in (2, 8, 32):  # a busy machine may need as long to start
            done = locust(
                "-t", f"{seconds}s", "-H", upstream.base_url, "--max-tokens", 60_000, "--jsonl", out
            )
            assert done.returncode == 0, done.stderr[-2000:]
            found = read_run(out)
            if len(found.outcomes) == 2 and all(one.ttft_ms for one in found.outcomes):
                break
    assert len(found.outcomes) == 2
    for one in found.outcomes:
        assert (one.cut_off, one.error, one.ok) == (True, "", False)
        assert 0 < one.ttft_ms < one.jct_ms < seconds * 1e3
    assert summarise(found, Slo()).num_cut_off == 2


@pytest.mark.parametrize("model", ["", "m"])
def test_users_without_a_server_say_its_address_once_and_end(model):
    done = locust("-t", "60s", "-H", "http://127.0.0.1:9", "--model", model, "-u", 4, "-r", 4)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.count("http://127.0.0.1:9/v1/models") == 1
    assert "Traceback" not in done.stderr
