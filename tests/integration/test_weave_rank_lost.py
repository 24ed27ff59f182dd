"""A rank that is killed, or stopped for good, while another one waits for it in a fused sum ends its engine in time."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.mempool_rig import MempoolProcess

ROOT = Path(__file__).resolve().parents[2]
WAITED_S = 10.0  # TIMEOUT_MS of tests/support/weave_lost_run.py
DETECTION_S = 15.0  # under a second on a quiet machine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run():
    """What was found by fault, and what the processes said."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    pool = MempoolProcess(folder, **{"capacity-bytes": 64 << 20})
    try:
        words = [sys.executable, "-m", "tests.support.weave_lost_run", pool.socket, folder / "out.json"]
        done = subprocess.run(words, cwd=ROOT, timeout=800, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        yield json.loads((folder / "out.json").read_text()), done.stdout + done.stderr
    finally:
        pool.stop()
        shutil.rmtree(folder)


@pytest.mark.parametrize("fault", ["killed", "stopped", "first-stopped"])
def test_an_engine_that_lost_a_rank_ends_in_time_and_every_token_until_then_is_right(run, fault):
    found = run[0][fault]
    assert found["error"] == "PeerGone", "what makes the worker end, and its requests go on elsewhere"
    assert found["ended_s"] < (0.0 if fault == "killed" else WAITED_S) + DETECTION_S
    assert found["begun"]
    assert len(found["begun"]) < len(found["whole"])
    assert found["begun"] == found["whole"][: len(found["begun"])]
    assert not found["left"], "no process of the engine is left"


def test_a_rank_that_is_late_is_waited_for(run):
    found = run[0]["late"]
    assert not found["error"]
    assert found["begun"] == found["whole"]


def test_the_log_says_which_rank_waited_for_its_peers_in_vain(run):
    said = [line for line in run[1].splitlines() if "this engine's ranks are apart" in line]
    assert any("rank 0 of 2 waited for its peers in vain" in line for line in said)
    assert any("rank 1 of 2 waited for its peers in vain" in line for line in said)
