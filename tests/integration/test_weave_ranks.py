"""Two ranks that fuse, and weave, in pages say what stock vLLM's two ranks say: tests/support/weave_run.py."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.mempool_rig import MempoolProcess

ROOT = Path(__file__).resolve().parents[2]
SUMS_A_STEP = 12  # two for each of the demo model's six layers

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found():
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    pool = MempoolProcess(folder, **{"capacity-bytes": 64 << 20})
    try:
        words = [sys.executable, "-m", "tests.support.weave_run", pool.socket, folder / "out.json"]
        done = subprocess.run(words, cwd=ROOT, timeout=800, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        kept = [path.read_bytes() for path in folder.glob("weave-*.json")]
        yield {**json.loads((folder / "out.json").read_text()), "kept": kept}
    finally:
        pool.stop()
        shutil.rmtree(folder)


@pytest.mark.parametrize("mode", ["full", "fuse", "off"])
def test_every_answer_equals_stock(found, mode):
    stock = {name: answer for name, answer in found["stock"].items() if not name.startswith("twin")}
    assert found[mode]["crowd"] == stock
    assert found[mode]["alone"] == stock


@pytest.mark.parametrize("mode", ["full", "fuse", "off"])
def test_who_finds_the_blocks_that_its_own_step_computes_says_what_stock_says(found, mode):
    assert found[mode]["twins"] == {name: found["stock"][name] for name in found[mode]["twins"]}


def test_full_computes_steps_in_two_parts_and_fuse_none(found):
    for rank in found["full"]["counters"]:
        assert rank["woven"] > 0
        assert rank["fused"] == rank["whole"] * SUMS_A_STEP, "small steps are fused, too"
    for rank in found["fuse"]["counters"]:
        assert not rank["woven"]
        assert rank["fused"] == rank["whole"] * SUMS_A_STEP > 0
    for rank in found["off"]["counters"]:
        assert not rank["woven"] + rank["fused"]


def test_every_rank_finds_the_same_threshold_in_what_was_measured_and_kept(found):
    measured, read = found["calibrated"]
    assert len({*measured, *read}) == 1, "the second time nothing is measured"
    (kept,) = found["kept"]
    assert [timing["num_tokens"] for timing in json.loads(kept)["timings"]] == [512]
