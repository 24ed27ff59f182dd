"""A pool of a few dozen pages, real engines and a real mempool: answers stay stock vLLM's, and nothing hangs or leaks.

See tests/support/pressure_run.py. The longest prompt takes nearly every page; while a second engine is attached, which
halves what each may have, it waits, and goes on when that engine was killed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.mempool_rig import MempoolProcess, until
from tests.integration.test_exactness import MODEL, ROOT
from tests.support.exactness_cases import SCHEMA, prompts

CROWD = "crowd-"  # see tests/support/pressure_run.py, which imports vLLM

NUM_PAGES = 48
PAGE_BYTES = 2 * 6 * 2 * 64 * 32 * 4  # K and V, layers, heads, their size, tokens, float32
LONGEST = 1400  # tokens: 45 of the 47 pages that one engine may have

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1000)]


def cases() -> list[dict]:
    texts = prompts(MODEL)
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True, "n": 3}
    stem, other = texts[320], texts[257]
    shared = [[*stem, *texts[n]] for n in (17, 33, 64, 100)] + [
        [*other[:128], *texts[n]] for n in (5, 47, 161)
    ]
    out = [{"id": f"shared-{i}", "prompt": p, "params": greedy} for i, p in enumerate(shared)]
    out += [
        {"id": f"n3-{n}", "prompt": [*stem, *texts[n]], "params": {**sampled, "seed": n}} for n in (9, 65)
    ]
    json_params = {"temperature": 0.0, "max_tokens": 60}
    out += [
        {"id": f"json-{n}", "prompt": texts[n], "params": json_params, "structured": SCHEMA}
        for n in (47, 200)
    ]
    # Eight that run at once (max_num_seqs): their prompts fill 40 pages, their answers would bring them to 56.
    long_answer = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    out += [
        {"id": f"{CROWD}{n}", "prompt": texts[1500][150 * n :][:150], "params": long_answer} for n in range(8)
    ]
    return [*out, {"id": "longest", "prompt": texts[1500][:LONGEST], "params": greedy}]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    pool = MempoolProcess(folder, **{"capacity-bytes": NUM_PAGES * PAGE_BYTES})
    try:
        asked, out = folder / "cases.json", folder / "out.json"
        asked.write_text(json.dumps(cases()))
        words = [sys.executable, "-m", "tests.support.pressure_run", MODEL, pool.socket, asked, out]
        done = subprocess.run(words, cwd=ROOT, timeout=900, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        until(lambda: not pool.status()["attachments"], "everybody has left")
        yield {**json.loads(out.read_text()), "status": pool.status()}
    finally:
        pool.stop()
        shutil.rmtree(folder)


def expected(found, name: str) -> list[list[int]]:
    return [choice["token_ids"] for choice in found["stock"][name]["choices"]]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["alone", "beside-one-that-dies", "alone-again"])
def test_every_answer_is_stock_vllms_whatever_is_preempted_aborted_or_evicted(found, number):
    answers = found["rounds"][number]
    assert sorted(answers) == sorted(name for name in found["stock"] if not name.startswith(CROWD))
    wrong = [name for name, answer in answers.items() if answer != expected(found, name)]
    assert not wrong


def test_the_second_engine_too_answered_as_stock_does_until_it_was_killed(found):
    assert found["b"], "it was to answer something"
    assert not [name for name, answer in found["b"] if answer != expected(found, name)]


def test_running_requests_that_outgrow_the_pages_are_preempted_and_say_the_same(found):
    assert found["counters"]["preempted"] > 0
    assert len(found["crowd"]) == 8
    assert not [name for name, answer in found["crowd"].items() if answer != expected(found, name)]


def test_every_page_and_lease_came_back(found):
    status = found["status"]
    assert found["counters"]["leases"] == 0
    assert (status["num_pinned"], status["num_leases"], status["num_handoffs"]) == (0, 0, 0)
    assert {name for name, count in status["pages_by_state"].items() if count} <= {"free", "sealed"}
    assert sum(status["pages_by_state"].values()) == NUM_PAGES
