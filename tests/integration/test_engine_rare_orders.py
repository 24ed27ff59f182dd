"""Orders of events in an engine that are rare: each lost an answer, a lease, a block or the engine once.

Those of the schedulers are played in tests/support/rare_engine_orders.py and rare_far_orders.py, in a process of its
own, because importing vLLM takes longer than they do.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from shared.engine import pool
from shared.engine.block_copy import BlockCopier
from shared.engine.connector_meta import LoadBlocks, StepPlan
from shared.engine.connector_scheduler import SchedulerSide
from shared.engine.connector_worker import WorkerSide

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    """How, by the scenario's name."""
    words = [sys.executable, "-m", "tests.support.rare_engine_orders"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-8_000:]
    return json.loads(done.stdout.splitlines()[-1])


def holds(name: str, failed: dict[str, str]) -> None:
    assert not failed[name], failed[name]


def test_a_long_prompt_with_a_lease_waits_for_the_step_under_way_that_fills_its_blocks(failed):
    holds("fills_its_blocks_in_the_step_under_way", failed)


def test_a_lease_that_leaves_too_few_pages_for_a_prompts_steps_ends(failed):
    holds("lease_leaves_too_few_pages", failed)


def test_a_block_that_is_just_going_far_stays_for_who_comes_with_a_lease_of_it(failed):
    holds("leased_while_going_far", failed)


def test_what_the_mempool_asks_back_behind_the_plan_of_turns_takes_no_page_of_who_runs(failed):
    holds("asked_for_pages_behind_the_plan", failed)


def test_who_loses_a_block_in_the_step_in_which_it_gets_its_slot_is_computed_again(failed):
    holds("lost_in_the_step_of_its_turn", failed)


def test_who_is_parked_and_needs_no_page_does_not_wait_with_who_finds_none(failed):
    holds("parked_with_one_beginning", failed)


def test_an_engine_ends_with_its_mempool_while_a_step_knows_far_places_that_nobody_has_any_more(failed):
    holds("leaves_with_the_mempool", failed)


def test_an_engine_whose_mempool_is_lost_while_it_is_answered_does_not_take_far_blocks_along(failed):
    holds("lost_while_it_is_answered", failed)


def test_parked_requests_whose_blocks_may_not_leave_make_way_as_soon_as_nobody_can_run(failed):
    holds("parked_that_may_not_leave", failed)


def test_an_engine_that_lost_pages_for_good_waits_for_them_once_before_the_parked_make_way(failed):
    holds("parked_where_pages_are_gone_for_good", failed)


def test_a_newcomer_whose_hits_make_way_for_it_looks_for_them_again(failed):
    holds("lease_ends_under_hits", failed)


def test_leases_of_those_that_wait_in_fair_slices_end_one_after_the_other(failed):
    holds("leases_of_those_that_wait", failed)


def test_a_mempool_that_is_lost_while_it_is_answered_is_asked_again_for_what_is_away(failed):
    holds("mempool_lost_while_it_is_answered", failed)


def test_a_lease_that_comes_behind_its_request_is_taken_and_that_of_an_aborted_one_is_not(failed):
    holds("lease_comes_behind_its_request", failed)


def test_a_request_that_ends_while_its_blocks_are_loaded_leaves_no_word_of_it():
    """In `kv_cache = "copy"`: as many were kept as clients had left."""
    may_load = threading.Event()

    def page_view(_: int) -> memoryview:
        may_load.wait(10.0)
        return memoryview(bytearray(4096))

    attachment: Any = SimpleNamespace(page_view=page_view, is_sealed=lambda *_: False)
    worker = WorkerSide(BlockCopier({"layer": torch.zeros(8, 16)}), attachment, 1_000)
    scheduler = SchedulerSide(4, 64, None)
    for name in ("leaves", "stays"):
        request: Any = SimpleNamespace(
            request_id=name, kv_transfer_params={}, num_prompt_tokens=8, prompt_token_ids=[1] * 8
        )
        scheduler.on_new_request(request)
        worker.start_loads(StepPlan(loads=[LoadBlocks(name, [0], [1], [1])]))
        if name == "leaves":
            scheduler.finished(request)
    may_load.set()
    worker.close()
    scheduler.loads_ended(worker.take_received())
    try:
        assert (pool.fetch_ms.keys(), pool.failed_blocks) == ({"stays"}, {"stays": 1})
        assert scheduler.finished(request)["failed_blocks"] == 1
        assert (pool.fetch_ms, pool.failed_blocks) == ({}, {})
    finally:
        pool.fetch_ms.clear()
        pool.failed_blocks.clear()
