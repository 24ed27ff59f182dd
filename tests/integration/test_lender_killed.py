"""A lender gets SIGKILL while a real engine's blocks lie in its pages, in the middle of answers: every token is stock
vLLM's, and its pages come home.

What lies there: blocks of parked requests (fair slices: twelve requests take turns in memory for four) and blocks that
a prompt longer than the engine's memory reads in place (far). Cached blocks: test_lender_killed_overflow.py. Once its
death is known the pages are asked for, with time to copy (`reloaded`) or with none (`recomputed`).
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fair_rig import NUM_PAGES as PAGES_FOR_FOUR
from tests.integration.fair_rig import assert_everything_came_back, in_memory_for_four, twelve_cases
from tests.integration.killed_lender import KilledLender, killed_lender
from tests.integration.mempool_rig import MempoolProcess, until
from tests.integration.test_exactness import MODEL, ROOT
from tests.integration.test_far_prompts import DRAM_PAGES, NUM_PAGES, POLICIES, WORKER, cases
from tests.integration.test_pages_under_pressure import PAGE_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_LENT = 24  # pages on loan to the crowd
NUM_USED = 4  # of these with parked blocks when the lender dies
NUM_FAR_LENT = 8
PLENTY_MS = 600_000
MAX_RUNS = 5


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stock")
    asked, out = folder / "cases.json", folder / "out.json"
    asked.write_text(json.dumps(twelve_cases()))
    words = [sys.executable, "-m", "tests.support.stock_reference", str(MODEL), str(asked), str(out)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=600)
    return {
        name: [choice["token_ids"] for choice in found["choices"]]
        for name, found in json.loads(out.read_text()).items()
    }


def parked_blocks(status: Any, device: str) -> int:
    """Blocks of parked requests that lie there."""
    return sum(space.num_pinned for space in status.spaces if space.devices == [device])


def some_are_lent(status: Any) -> bool:
    return parked_blocks(status, "cpu:loan") >= NUM_USED


def lent_ones_are_nowhere_else(status: Any) -> bool:
    """So many are parked after them that the engine's memory, which forgets in order, has none of them."""
    return (
        parked_blocks(status, "cpu:loan") >= NUM_USED and parked_blocks(status, "cpu:dram") >= PAGES_FOR_FOUR
    )


def crowd_of_a_killed_lender(
    is_used: Callable[[Any], bool], deadline_ms: int, at_rest: str = ""
) -> dict[str, Any]:
    """Again where the moment to kill it was not seen: others may have had the cores."""
    made: list[KilledLender] = []

    @contextmanager
    def beside(pool: MempoolProcess):
        with killed_lender(pool, "cfs", NUM_LENT, is_used, deadline_ms, at_rest) as lender:
            made.append(lender)
            yield

    while True:
        with in_memory_for_four(policies=("cfs",), beside=beside) as found:
            if made[-1].exit_status or len(made) == MAX_RUNS:
                return {**found, "lender": made[-1]}


def assert_stocks(found: dict[str, Any], stock: dict[str, Any]) -> None:
    found["lender"].assert_it_was_killed_and_its_pages_came_home()
    for turn in ("crowd", "again"):
        for name, answer in found["cfs"][turn].items():
            assert answer == stock[name], (turn, name)
    assert_everything_came_back(found)


def test_parked_requests_of_a_killed_lender_go_on_from_host_memory_with_stocks_tokens(stock):
    found = crowd_of_a_killed_lender(some_are_lent, PLENTY_MS)
    assert_stocks(found, stock)
    counts = found["cfs"]["counts_again"]
    assert found["status"]["counters"]["swap_blocks_in_dram"] > 0
    assert counts["recomputed_tokens"] == 0, counts
    assert counts.get("swap_blocks_lost", 0) == 0


def test_parked_requests_of_a_killed_lender_whose_blocks_are_lost_are_computed_again_with_stocks_tokens(
    stock,
):
    """The engine stands still meanwhile: else it may have taken its blocks before they are lost, as chance has it.
    Again where all that lay there was shared with a request that ran, and so was in the engine's memory, too.
    """
    for _ in range(MAX_RUNS):
        found = crowd_of_a_killed_lender(lent_ones_are_nowhere_else, 0, "tests.support.fair_run")
        assert_stocks(found, stock)
        assert found["status"]["counters"]["lending_blocks_dropped"] > 0
        counts = found["cfs"]["counts_again"]
        if counts["swap_blocks_lost"]:
            break
    assert counts["swap_blocks_lost"] > 0, counts
    assert counts["recomputed_tokens"] > 0, counts


def test_a_prompt_longer_than_memory_goes_on_with_stocks_tokens_when_the_lender_of_its_far_blocks_is_killed():
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    limits = {"capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": DRAM_PAGES * PAGE_BYTES}
    patience = dict.fromkeys(("offer-patience-ms", "copy-timeout-ms", "out-timeout-ms"), 60_000)
    pool = MempoolProcess(folder, **limits, **patience, **{"dram-for-host": "true"})
    try:
        found = far_run(pool, folder)
    finally:
        pool.stop()
        shutil.rmtree(folder)
    for when in ("alone", "crowd"):
        for name, answer in found[when].items():
            assert answer == [choice["token_ids"] for choice in found["stock"][name]["choices"]], (when, name)
    assert found["counts"]["blocks_out_peer"] > 0
    assert found["counts"].get("blocks_lost", 0) == 0
    status = found["status"]
    assert status["counters"].get("far_engines_killed", 0) == 0
    assert (status["num_pinned"], status["num_leases"], status["num_handoffs"]) == (0, 0, 0)


def far_run(pool: MempoolProcess, folder: Path) -> dict[str, Any]:
    """As test_far_prompts.py; the lender lends before the first prompt comes."""
    asked, out, log = folder / "cases.json", folder / "out.json", folder / "log"
    asked.write_text(json.dumps(cases()))
    settings = json.dumps({**WORKER, **POLICIES["fcfs"]})
    words = [sys.executable, "-m", "tests.support.far_run", MODEL, pool.socket, asked, out, settings]

    def is_read(status: Any) -> bool:
        return status.counters.get("far_blocks_out_peer", 0) >= NUM_USED

    with (
        log.open("w") as errors,
        killed_lender(pool, "far", NUM_FAR_LENT, is_read, PLENTY_MS) as lender,
        subprocess.Popen(
            list(map(str, words)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as engine,
    ):
        try:
            assert engine.stdout is not None
            assert engine.stdin is not None
            while (line := engine.stdout.readline()) != b"ready\n":
                assert line, log.read_text()[-6_000:]
            assert lender.lends.wait(60)
            engine.stdin.write(b"go\n")
            engine.stdin.close()
            assert engine.wait(800) == 0, log.read_text()[-6_000:]
        finally:
            engine.kill()
    lender.assert_it_was_killed_and_its_pages_came_home()
    until(lambda: not any("far" in name for name in pool.status()["attachments"]), "the engine has left")
    return {**json.loads(out.read_text()), "status": pool.status()}
