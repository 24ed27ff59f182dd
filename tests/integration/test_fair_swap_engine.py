"""Twelve requests in memory for four take turns: their blocks leave for swap space, and nothing is computed twice.

See tests/support/swap_run.py. Among the twelve are prompts that share pages, sampled ones and one with a grammar.
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
from tests.integration.test_pages_under_pressure import PAGE_BYTES
from tests.support.exactness_cases import SCHEMA, prompts

NUM_PAGES = 46
DRAM_PAGES = 400
ANSWER_TOKENS = 48

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def cases() -> list[dict]:
    texts = prompts(MODEL)
    greedy = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    shared = [[*texts[257], *texts[n]] for n in (5, 17, 33)]
    out = [{"id": f"shared-{i}", "prompt": prompt, "params": greedy} for i, prompt in enumerate(shared)]
    own = [texts[1500][310 * n :][: 300 - 13 * n] for n in range(4)] + [texts[n] for n in (257, 200)]
    out += [{"id": f"greedy-{i}", "prompt": prompt, "params": greedy} for i, prompt in enumerate(own)]
    out += [{"id": f"seeded-{n}", "prompt": texts[n], "params": {**sampled, "seed": n}} for n in (320, 400)]
    json_params = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}
    return [*out, {"id": "json", "prompt": texts[161], "params": json_params, "structured": SCHEMA}]


@pytest.fixture(scope="module")
def found():
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    limits = {"capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": DRAM_PAGES * PAGE_BYTES}
    pool = MempoolProcess(folder, **limits, **{"dram-for-host": "true"})
    try:
        asked, out = folder / "cases.json", folder / "out.json"
        asked.write_text(json.dumps(cases()))
        words = [sys.executable, "-m", "tests.support.swap_run", MODEL, pool.socket, asked, out]
        done = subprocess.run(words, cwd=ROOT, timeout=280, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        until(lambda: not pool.status()["attachments"], "everybody has left")
        print({name: part["counts"] for name, part in json.loads(out.read_text()).items()})
        yield {**json.loads(out.read_text()), "status": pool.status()}
    finally:
        pool.stop()
        shutil.rmtree(folder)


def test_twelve_requests_in_memory_for_four_leave_and_come_back_and_nothing_is_computed_twice(found):
    counts = found["cfs"]["counts"]
    assert len(found["cfs"]["crowd"]) == 12
    assert counts["times_parked"] >= 24
    assert counts["swapped_out_blocks"] >= 100
    assert counts["swapped_in_blocks"] >= 100
    assert counts["recomputed_tokens"] == 0
    assert counts.get("times_dropped", 0) == 0
    assert counts.get("swap_blocks_lost", 0) == 0
    assert found["fcfs"]["counts"] == {}


def test_every_answer_is_that_of_the_order_of_arrival(found):
    assert found["cfs"]["crowd"] == found["fcfs"]["crowd"]


def test_clients_that_leave_while_their_blocks_are_away_change_no_answer(found):
    assert found["cfs"]["again"] == found["fcfs"]["crowd"]
    assert found["cfs"]["counts_again"]["swapped_in_blocks"] > found["cfs"]["counts"]["swapped_in_blocks"]


def test_every_page_pin_and_lease_came_back_and_pages_add_up(found):
    status = found["status"]
    assert found["cfs"]["leases"] == 0
    assert (status["num_pinned"], status["num_leases"], status["num_handoffs"]) == (0, 0, 0)
    assert {name for name, count in status["pages_by_state"].items() if count} <= {"free", "sealed"}
    assert sum(status["pages_by_state"].values()) == status["num_pages"]
