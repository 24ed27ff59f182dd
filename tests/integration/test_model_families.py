"""Families of models in the pool's pages equal stock vLLM token for token; what cannot work in pages says so.

Random weights: tests/support/model_families.py.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.mempool_rig import MempoolProcess

ROOT = Path(__file__).resolve().parents[2]
IN_PAGES = ["llama", "qwen2", "qwen3", "mistral", "gemma"]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def found():
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    pool = MempoolProcess(folder, **{"capacity-bytes": 64 << 20})
    try:
        words = [
            sys.executable,
            "-m",
            "tests.support.model_families",
            folder,
            pool.socket,
            folder / "out.json",
        ]
        done = subprocess.run(words, cwd=ROOT, timeout=900, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        yield {**json.loads((folder / "out.json").read_text()), "log": done.stdout + done.stderr}
    finally:
        pool.stop()
        shutil.rmtree(folder)


def assert_as_stock(family: dict) -> None:
    want = {name: [c["token_ids"] for c in one["choices"]] for name, one in family["stock"].items()}
    for answers in family["quire"]:
        assert answers == want


@pytest.mark.parametrize("name", IN_PAGES)
def test_a_family_in_pages_equals_stock(found, name):
    assert found[name]["uses_pool"]
    assert_as_stock(found[name])


def test_sliding_windows_are_hosted_with_vllms_own_cache_and_the_log_says_so(found):
    assert not found["mistral-sliding"]["uses_pool"]
    assert_as_stock(found["mistral-sliding"])
    assert "its attention has sliding windows: vLLM's own cache is used" in found["log"]


@pytest.mark.parametrize(("name", "worker"), [("llama", "PageCPUWorker"), ("mistral-sliding", "CPUWorker")])
def test_top_p_is_mended_when_a_ranks_memory_is_looked_at_whatever_its_worker(found, name, worker):
    assert found[name]["nuclei"] == [[worker, True]]


def test_pages_asked_for_by_name_are_refused_in_words_that_say_what_to_do(found):
    refused = found["mistral-sliding"]["refused"]
    assert "cannot work in the pool's pages, its attention has sliding windows" in refused
    assert "worker.kv_cache = auto" in refused
