"""Two ranks of each family beside Llama: fused and woven they say what they say in vLLM's way; experts stay whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUMS_A_STEP = 4  # two for each of two layers
DENSE = ["qwen2", "qwen3", "mistral"]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.whole_machine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    words = [sys.executable, "-m", "tests.support.weave_families_run", folder]
    done = subprocess.run(words, cwd=ROOT, timeout=800, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6_000:]
    return {**json.loads((folder / "out.json").read_text()), "log": done.stdout + done.stderr}


@pytest.mark.parametrize("family", ["mixtral", *DENSE])
def test_every_family_answers_fused_and_asked_to_weave_as_in_vllms_way(found, family):
    ways = found[family]
    assert ways["fuse"]["answers"] == ways["full"]["answers"] == ways["off"]["answers"]
    assert ways["alone"]["answers"] != ways["off"]["answers"], "what is said depends on the sums"


@pytest.mark.parametrize("family", DENSE)
def test_steps_of_a_dense_model_are_computed_in_two_parts_and_fused_ones_whole(found, family):
    for rank in found[family]["full"]["counters"]:
        assert rank["woven"] > 0
        assert rank["fused"] == rank["whole"] * SUMS_A_STEP
    for rank in found[family]["fuse"]["counters"]:
        assert not rank["woven"]
        assert rank["fused"] == rank["whole"] * SUMS_A_STEP > 0
    assert not any(rank["fused"] + rank["woven"] for rank in found[family]["off"]["counters"])


def test_experts_sums_are_fused_in_every_step_and_no_step_is_cut(found):
    for way in ("fuse", "full"):
        for rank in found["mixtral"][way]["counters"]:
            assert rank["fused"] > 0
            assert rank["fused"] % SUMS_A_STEP == 0
            assert not rank["woven"]
    assert not any(rank["fused"] + rank["woven"] for rank in found["mixtral"]["off"]["counters"])


def test_asked_to_weave_experts_say_in_the_log_why_steps_stay_whole(found):
    assert "steps are fused and stay whole: experts get too few tokens" in found["log"]
