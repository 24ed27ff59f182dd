"""Twelve requests by real engines in fair slices and in order of arrival: what tests/support/fair_run.py finds."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.integration.mempool_rig import MempoolProcess, until
from tests.integration.test_exactness import MODEL, ROOT
from tests.integration.test_pages_under_pressure import PAGE_BYTES
from tests.support.exactness_cases import SCHEMA, prompts

NUM_PAGES = 46
DRAM_PAGES = 400
ANSWER_TOKENS = 48
ANY_RATE = 1e6  # GB/s: whatever the machine does, switching pays
WORKER = {"kv_space": "own", "max_model_len": 480, "fair_swap_gb_per_s": ANY_RATE}


def mixed_cases(greedy: list[list[int]], seeded: tuple[int, ...], answer_tokens: int) -> list[dict[str, Any]]:
    """Three prompts that share pages, these greedy ones, sampled ones of these lengths, and one with a grammar."""
    texts = prompts(MODEL)
    plain = {"temperature": 0.0, "max_tokens": answer_tokens, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": answer_tokens, "ignore_eos": True}
    shared = [[*texts[257], *texts[n]] for n in (5, 17, 33)]
    out = [{"id": f"shared-{i}", "prompt": prompt, "params": plain} for i, prompt in enumerate(shared)]
    out += [{"id": f"greedy-{i}", "prompt": prompt, "params": plain} for i, prompt in enumerate(greedy)]
    out += [{"id": f"seeded-{n}", "prompt": texts[n], "params": {**sampled, "seed": n}} for n in seeded]
    json_params = {"temperature": 0.0, "max_tokens": answer_tokens}
    return [*out, {"id": "json", "prompt": texts[161], "params": json_params, "structured": SCHEMA}]


def twelve_cases() -> list[dict[str, Any]]:
    """What in_memory_for_four() asks."""
    texts = prompts(MODEL)
    greedy = [texts[1500][310 * n :][: 300 - 13 * n] for n in range(4)] + [texts[n] for n in (257, 200)]
    return mixed_cases(greedy, (320, 400), ANSWER_TOKENS)


@contextmanager
def in_memory_for_four(
    rules: dict[str, Any] | None = None,
    policies: tuple[str, ...] = ("fcfs", "cfs"),
    beside: Callable[[MempoolProcess], AbstractContextManager[Any]] = nullcontext,
    dram_pages: int = DRAM_PAGES,
) -> Iterator[dict[str, Any]]:
    """Both policies' twelve requests in pages for four of them and host memory for all; fair slices by `rules`.

    Args: beside: entered before the engines start, left when they have ended; dram_pages: of host memory, all fit.
    """
    limits = {"capacity-bytes": NUM_PAGES * PAGE_BYTES, "dram-bytes": dram_pages * PAGE_BYTES}
    pool = {**limits, "dram-for-host": "true"}
    with both_policies(twelve_cases(), pool, WORKER | (rules or {}), policies, beside) as found:
        yield found


@contextmanager
def both_policies(
    cases: list[dict[str, Any]],
    pool_flags: dict[str, Any],
    worker: dict[str, Any],
    policies: tuple[str, ...] = ("fcfs", "cfs"),
    beside: Callable[[MempoolProcess], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[dict[str, Any]]:
    """What fair_run found of these policies, and the mempool's "status" when all engines have left."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    patience = dict.fromkeys(("offer-patience-ms", "copy-timeout-ms", "out-timeout-ms"), 60_000)
    pool = MempoolProcess(folder, **patience | pool_flags)
    try:
        asked, out = folder / "cases.json", folder / "out.json"
        asked.write_text(json.dumps(cases))
        words = [
            sys.executable,
            "-m",
            "tests.support.fair_run",
            MODEL,
            pool.socket,
            asked,
            out,
            json.dumps(worker),
            *policies,
        ]
        with beside(pool):
            done = subprocess.run(words, cwd=ROOT, timeout=800, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6_000:]
        until(lambda: not pool.status()["attachments"], "everybody has left")
        found = json.loads(out.read_text())
        print({name: part["counts"] for name, part in found.items()})
        yield {**found, "status": pool.settled()}
    finally:
        pool.stop()
        shutil.rmtree(folder)


def assert_everything_came_back(found: dict[str, Any]) -> None:
    """No page is in use, pinned or lost, and no lease is left."""
    status = found["status"]
    assert found["cfs"]["leases"] == 0
    assert (status["num_pinned"], status["num_leases"], status["num_handoffs"]) == (0, 0, 0)
    assert {name for name, count in status["pages_by_state"].items() if count} <= {"free", "sealed"}
    assert sum(status["pages_by_state"].values()) == status["num_pages"]
