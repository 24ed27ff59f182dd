"""An engine whose ranks cannot fuse starts again as one that was never asked to: tests/support/weave_refused_run.py."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.mempool_rig import MempoolProcess

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(600)]


def test_a_rank_that_cannot_fuse_costs_a_start_and_the_engine_is_the_one_without_weaving_and_says_which_rank():
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    pool = MempoolProcess(folder, **{"capacity-bytes": 64 << 20})
    try:
        words = [sys.executable, "-m", "tests.support.weave_refused_run", pool.socket, folder / "out.json"]
        done = subprocess.run(words, cwd=ROOT, timeout=500, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        found = json.loads((folder / "out.json").read_text())
    finally:
        pool.stop()
        shutil.rmtree(folder)
    assert found["fuse"]["ranks"] == found["off"]["ranks"]
    assert found["off"]["ranks"] == ["shared.engine.page_worker_cpu.PageCPUWorker", False]
    assert found["fuse"]["answer"] == found["off"]["answer"]
    (line,) = found["fuse"]["said"]
    assert line.endswith("the engine starts again with them: rank 1: made up for this test")
    assert not found["off"]["said"]
