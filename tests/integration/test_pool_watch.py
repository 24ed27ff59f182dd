"""When an engine answers what the mempool asks for between its steps: a reader waits for the pages."""

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from shared import vital_thread
from shared.engine import pool_watch
from shared.engine.pool_watch import PoolWatch
from shared.mempool.slab_unmaps import IDLE_S
from shared.vital_thread import EXIT_BUG
from shared.wire.mempool import Holding

PATIENCE_S = 10.0


class Watch(PoolWatch):
    """Asked for pages until it answers; its next step is always due."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.looked = threading.Event()
        self.requests: dict[str, Any] = {"one": object()}
        self._stepped_s = time.monotonic() + 3_600
        self._turn = threading.RLock()
        self.quota = SimpleNamespace(closed=False, lost=False, wait_asked=self.wait_asked, num_asked=0)  # type: ignore[assignment]
        self.pages = SimpleNamespace(give_spare=self.give_spare)  # type: ignore[assignment]
        self.stock = 0
        self.given: list[int] = []

    def wait_asked(self, timeout_s: float) -> bool:
        self.looked.set()
        return timeout_s > 0 or self.quota.num_asked > 0

    def give_spare(self) -> None:
        self.given.append(min(self.stock, self.quota.num_asked))
        self.quota.num_asked -= self.given[-1]

    def _answer_pool(self) -> None:
        self.quota.closed = True
        self.answered.set()


def test_an_engine_without_requests_gives_pages_back_however_recent_its_last_step():
    watch = Watch()
    thread = threading.Thread(target=watch._stay_attached)
    thread.start()
    assert watch.looked.wait(PATIENCE_S)
    assert not watch.answered.is_set()
    watch.requests = {}
    assert watch.answered.wait(PATIENCE_S)
    thread.join(PATIENCE_S)


def test_one_with_requests_does_so_in_its_steps_unless_it_has_got_none_for_a_while():
    watch = Watch()
    watch._stepped_s = time.monotonic()
    assert not watch._is_idle()
    watch._stepped_s -= 2 * IDLE_S
    assert watch._is_idle()


def test_a_prompts_pages_come_out_of_the_stock_while_a_step_runs_and_the_rest_with_the_next_step():
    watch = Watch()
    watch.stock = watch.quota.num_asked = 16
    assert watch._spare()
    watch.quota.num_asked = 17
    assert not watch._spare()
    assert watch.given == [16, 16]


def test_many_pages_are_the_next_steps_to_give_as_this_one_would_take_longer():
    watch = Watch()
    watch.stock = watch.quota.num_asked = pool_watch.SPARED_PAGES + 1
    assert not watch._spare()
    assert not watch.given


def test_an_engine_with_more_pages_than_it_can_report_begins_anew_at_once_and_says_why(monkeypatch, caplog):
    """It said "not back yet" for ever, and was killed for its silence."""
    pages = pool_watch.MOST_HOLDING_BYTES // 80 + 1
    hashes = bytes(32 * pages)
    holding = Holding(
        sealed_pages=hashes[: 4 * pages], sealed_epochs=hashes[: 8 * pages], sealed_hashes=hashes,
        sealed_parents=hashes, sealed_valid_tokens=hashes[: 4 * pages],
    )  # fmt: skip
    watch = Watch()
    watch.leases, watch._ended_leases = {}, deque()
    watch.quota = SimpleNamespace(lost=True, reattach=lambda holding: True)  # type: ignore[assignment]
    watch.pages = SimpleNamespace(absorb=lambda: None, holding=lambda leases: holding)  # type: ignore[assignment]
    ended: list[int] = []
    monkeypatch.setattr(pool_watch.os, "_exit", ended.append)
    PoolWatch._answer_pool(watch)
    assert ended == [pool_watch.EXIT_MEMORY_LOST]
    assert f"{pages} sealed pages" in caplog.text
    holding = Holding(sealed_pages=hashes[:4])
    PoolWatch._answer_pool(watch)
    assert len(ended) == 1


def test_an_engine_that_cannot_hear_the_mempool_by_a_bug_ends(monkeypatch):
    """Its thread was gone: idle, it gave no page back, and it did not go on with the mempool's successor."""
    ended = threading.Event()
    monkeypatch.setattr(vital_thread.os, "_exit", lambda status: status == EXIT_BUG and ended.set())
    watch = Watch()
    watch.requests = {}

    def bug() -> None:
        raise KeyError("our bug")

    monkeypatch.setattr(watch, "_answer_pool", bug)
    watch._watch_pool()
    assert ended.wait(PATIENCE_S)
