"""Two ranks of a model with experts (Mixtral): fused they say what they say in vLLM's way, and steps stay whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUMS_A_STEP = 4  # two for each of two layers

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    words = [sys.executable, "-m", "tests.support.weave_experts_run", folder]
    done = subprocess.run(words, cwd=ROOT, timeout=800, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6_000:]
    return {**json.loads((folder / "out.json").read_text()), "log": done.stdout + done.stderr}


def test_fused_experts_answer_as_in_vllms_way(found):
    assert found["fuse"]["answers"] == found["full"]["answers"] == found["off"]["answers"]


def test_experts_sums_are_fused_in_every_step_and_no_step_is_cut(found):
    for way in ("fuse", "full"):
        for rank in found[way]["counters"]:
            assert rank["fused"] > 0
            assert rank["fused"] % SUMS_A_STEP == 0
            assert not rank["woven"]
    assert not any(rank["fused"] + rank["woven"] for rank in found["off"]["counters"])


def test_asked_to_weave_experts_say_in_the_log_why_steps_stay_whole(found):
    assert "steps are fused and stay whole: experts get too few tokens" in found["log"]
