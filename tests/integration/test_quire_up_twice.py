"""Two `quire up`s, and `quire down` beside one: real processes, mock engines."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from deploy.local import config, run_supervisor
from tests.support import patience
from tests.support.local_cluster import free_base_port
from tests.support.processes import descendants

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Quire:
    """Commands of one home, in the background."""

    def __init__(self, home: Path) -> None:
        base = free_base_port()
        self.home, self.url = home, f"http://127.0.0.1:{base + 90}"
        self.up = ("up", "--engine", "mock", "--port", str(base + 90), "--base-port", str(base))
        clean = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        self.env = {**clean, "QUIRE_HOME": str(home), "COLUMNS": "200", **patience.environment()}

    def begin(self, *words: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
        # as at a terminal: under nohup, or behind a shell's &, some signals are ignored, and stay so
        as_at_a_terminal = ["env", "--default-signal=HUP,INT,TERM"]
        return subprocess.Popen(
            [*as_at_a_terminal, sys.executable, "-P", "-m", "deploy.local.cli", *words],
            cwd=REPO,
            env={**self.env, "PYTHONPATH": str(REPO)},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str) -> tuple[int | None, str, str]:
        return said(self.begin(*words))

    def is_served(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as reply:
            return len(json.load(reply)["data"]) == 1


def begun_by(up: "subprocess.Popen[str]") -> int:
    """The supervisor that it starts."""
    while not (found := descendants(up.pid)):
        time.sleep(0.005)
    return found[0]


def said(process: "subprocess.Popen[str]") -> tuple[int | None, str, str]:
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, " ".join(err.split())


@pytest.fixture
def quire(tmp_path):
    found = Quire(tmp_path / "home")
    yield found
    found("down")


def test_of_two_ups_at_once_one_starts_its_cluster_and_the_other_says_that_it_has_not(quire):
    ups = [quire.begin(*quire.up, "--decode", number) for number in ("1", "2")]
    told = [said(up) for up in ups]
    assert sorted(code for code, _, _ in told) == [0, 1], told
    winner = 1 if told[0][0] else 0
    assert "cluster.num_decode" in told[1 - winner][2]
    kept = run_supervisor.read_start(config.paths_of(quire.home))
    assert kept.settings.num_decode == winner + 1
    status = json.loads(quire("status", "--json")[1])
    assert sum(one["name"].startswith("decode-") for one in status["services"]) == winner + 1
    assert quire.is_served()


def test_an_up_during_a_start_is_done_when_it_serves_and_one_during_a_stop_leaves_a_cluster(quire):
    quire.env["QUIRE_WORKER_MOCK_START_MS"] = "6000"
    paths = config.paths_of(quire.home)
    first = quire.begin(*quire.up)
    while not paths.control.exists() and first.poll() is None:
        time.sleep(0.02)
    code, out, err = quire(*quire.up)
    assert (code, quire.is_served()) == (0, True), out + err
    assert said(first)[0] == 0

    old = json.loads(quire("status", "--json")[1])
    os.kill(next(one["pid"] for one in old["services"] if one["name"] == "decode-0"), signal.SIGSTOP)
    down = quire.begin("down")  # which takes the seconds that a service has to end by itself
    while not json.loads(paths.state.read_text())["stopping"]:
        time.sleep(0.02)
    code, out, err = quire(*quire.up)
    assert (code, quire.is_served()) == (0, True), out + err
    assert said(down)[0] == 0
    assert json.loads(quire("status", "--json")[1])["pid"] != old["pid"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_up_that_ends_before_its_supervisor_answers_leaves_none(quire, number):
    up = quire.begin(*quire.up)
    supervisor = begun_by(up)
    up.send_signal(number)
    code, out, err = said(up)
    assert (code, "interrupted" in out) == (130, True), out + err
    assert not Path(f"/proc/{supervisor}").exists()
    assert not run_supervisor.is_locked(config.paths_of(quire.home))


@pytest.mark.parametrize("output", ["full disk", "closed pipe"])
def test_an_up_that_can_tell_nobody_how_it_goes_leaves_no_supervisor(quire, output):
    if output == "full disk":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    up = quire.begin(*quire.up, stdout=stdout)
    os.close(stdout)
    code, _, err = said(up)
    assert (code, err.startswith("error: cannot write the output: ")) == (1, True), err
    assert err.endswith("; what was started is stopped"), err
    assert not run_supervisor.is_locked(config.paths_of(quire.home))


def test_a_down_before_the_supervisor_answers_stops_what_has_begun(quire):
    quire.env["QUIRE_WORKER_MOCK_START_MS"] = "60000"  # it does not serve before the other command asks
    up = quire.begin(*quire.up)
    paths = config.paths_of(quire.home)
    while not run_supervisor.is_locked(paths):
        time.sleep(0.005)
    code, out, err = quire("down")
    assert (code, "stopped in" in out) == (0, True), out + err
    assert said(up)[0] == 1
    assert not run_supervisor.is_locked(paths)


def test_an_up_whose_supervisor_is_stopped_before_it_asks_says_so(quire):
    """The supervisor listens still while its guard ends, and answers nobody."""
    quire.env["QUIRE_WORKER_MOCK_START_MS"] = "60000"
    up = quire.begin(*quire.up)
    paths = config.paths_of(quire.home)
    begun_by(up)
    up.send_signal(signal.SIGSTOP)
    try:
        assert quire("down")[0] == 0
    finally:
        up.send_signal(signal.SIGCONT)
    code, out, err = said(up)
    assert code == 1, out + err
    assert not run_supervisor.is_locked(paths)
