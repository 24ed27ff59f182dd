"""A process that lends by its load: when it does, and when it takes everything back."""

import asyncio
import threading
import time
from functools import partial
from unittest.mock import Mock

import pytest

from shared.aqua.lends_when_idle import LendsWhenIdle
from shared.aqua.loop_thread import LoopThread
from shared.errors import PeerGone
from shared.lending.rules import LendingRules

RULES = partial(
    LendingRules, threshold_bytes=0, reserve_share=0.0, steady_ms=0, queue_limit=4, silent_ms=3_600_000,
    reclaim_deadline_ms=700,
)  # fmt: skip


class FakeLender:
    """Refuses once. `fails`: the next take-backs do."""

    def __init__(self):
        self.calls = []
        self.happened = threading.Condition()
        self.refusals, self.fails = 1, 0
        self.rate = self.offered_bytes = 0
        self.left_bytes = None  # of its offer, as its mempool says
        self.error = PeerGone("no coordinator")

    def budget_bytes_per_s(self):
        return self.rate

    def still_offered_bytes(self):
        return self.left_bytes

    def _note(self, *what):
        with self.happened:
            self.calls.append(what)
            self.happened.notify_all()

    def lend(self, num_bytes):
        if self.refusals:
            self.refusals -= 1
            self._note("refused")
            raise self.error
        self._note("lend", num_bytes)
        return num_bytes

    def reclaim(self, deadline_ms, keep_bytes=0):
        if self.fails:
            self.fails -= 1
            self._note("failed", keep_bytes)
            raise self.error
        self.offered_bytes, self.left_bytes = keep_bytes, None
        self._note("reclaim", deadline_ms, keep_bytes)
        return 0.5

    def wait(self, count):
        with self.happened:
            assert self.happened.wait_for(lambda: len(self.calls) >= count, 60), self.calls


def test_memory_is_lent_while_load_is_steady_and_taken_back_when_the_queue_grows():
    lender, now_ms = FakeLender(), 0
    rules = RULES(hold_ms=600_000, window_ms=10_000, peak_ms=10_000)
    idle = LendsWhenIdle(lender, 1_000, rules, clock_ms=lambda: now_ms)
    idle.report(0, 0)
    lender.wait(1)
    while len(lender.calls) < 2:
        now_ms += 2_000  # the pause behind a refusal
        idle.report(0, 0)
        with lender.happened:
            lender.happened.wait(0.05)
    assert lender.calls[:2] == [("refused",), ("lend", 1_000)]
    lender.rate = 500  # measured meanwhile
    while len(lender.calls) < 3:
        idle.report(9, 9)
        with lender.happened:
            lender.happened.wait(0.05)
    idle.close()
    assert lender.calls[2] == ("reclaim", 2_700, 0), "1,000 bytes at the budget, and the rule"
    assert [(reason, seconds) for reason, seconds in idle.reclaims] == [("queue grew to 9", 0.5)]
    assert idle.lent_bytes == 0


def test_what_the_model_needs_itself_is_taken_back_and_the_rest_stays_lent():
    lender, now_ms = FakeLender(), 0
    lender.refusals = 0
    rules = RULES(hold_ms=0, window_ms=10_000, peak_ms=10_000)
    idle = LendsWhenIdle(lender, 1_000, rules, clock_ms=lambda: now_ms)
    for needed_bytes, count in ((0, 1), (300, 2), (0, 2), (600, 3)):
        for _ in range(5):
            now_ms += 20_000
            idle.report(0, 0, needed_bytes)
            while idle._load is not None:
                with lender.happened:
                    lender.happened.wait(0.01)
        lender.wait(count)
    idle.close()
    assert lender.calls == [("lend", 1_000), ("reclaim", 700, 700), ("reclaim", 700, 400)]
    assert idle.lent_bytes == 400


@pytest.mark.parametrize("left_bytes", [0, 400])
def test_what_an_offer_that_ended_elsewhere_left_comes_home_and_all_is_offered_again(left_bytes):
    lender, now_ms = FakeLender(), 0
    lender.refusals = 0
    rules = RULES(hold_ms=0)
    idle = LendsWhenIdle(lender, 1_000, rules, clock_ms=lambda: now_ms)
    idle.report(0, 0)
    lender.wait(1)
    lender.left_bytes = left_bytes
    wanted = [("lend", 1_000), ("reclaim", 700, left_bytes), ("lend", 1_000)][: 2 if left_bytes else 3]
    while len(lender.calls) < len(wanted):
        now_ms += 500
        idle.report(0, 0)
        with lender.happened:
            lender.happened.wait(0.02)
    idle.close()
    assert lender.calls == wanted
    assert idle.lent_bytes == (left_bytes or 1_000)


def test_a_take_back_that_failed_still_takes_all_when_less_is_wanted_behind_it():
    """Its queue wanted everything back, then its requests a part of it: the smaller one was all that was done."""
    lender, now_ms = FakeLender(), 0
    lender.refusals = 0
    rules = RULES(hold_ms=600_000, window_ms=1_000, peak_ms=1_000)
    idle = LendsWhenIdle(lender, 1_000, rules, clock_ms=lambda: now_ms)

    def say(*load):
        nonlocal now_ms
        now_ms += 300
        idle.report(*load)
        while idle._load is not None:
            time.sleep(0.01)

    say(0, 0)
    lender.wait(1)
    lender.fails = 1
    while lender.fails:
        say(9, 9)
    for _ in range(8):  # the queue stays as it is; the pause behind a failure passes
        say(9, 0, 300)
    lender.wait(3)
    idle.close()
    assert lender.calls == [("lend", 1_000), ("failed", 0), ("reclaim", 700, 0)]
    assert idle.lent_bytes == 0


@pytest.mark.parametrize("error", [OSError("disk"), TimeoutError()])
def test_whatever_fails_it_lends_and_takes_back_later(error):
    lender, now_ms = FakeLender(), 0
    lender.fails, lender.error = 1, error
    idle = LendsWhenIdle(lender, 1_000, RULES(), clock_ms=lambda: now_ms)
    for count, load in ((2, (0, 0)), (4, (9, 9))):
        while len(lender.calls) < count:
            assert idle._thread.is_alive()
            now_ms += 2_000
            idle.report(*load)
            time.sleep(0.03)
    idle.close()
    assert [what for what, *_ in lender.calls] == ["refused", "lend", "failed", "reclaim"]


def test_an_answer_that_comes_in_the_moment_in_which_its_time_is_over_is_the_answer(monkeypatch):
    loop, late = LoopThread("t"), Mock()
    late.cancel.return_value, late.result.side_effect = False, (TimeoutError, "answer")
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", lambda *_: late)
        assert loop.call(None, 1.0) == "answer"
    loop.close()
