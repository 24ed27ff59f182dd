"""The mover's thread: what is posted runs in order, pulls are driven to their end, what must settle is handed over."""

import sys
import threading
import time

import pytest

from services.mempool import mover_thread
from services.mempool.mover_thread import PullThread
from shared.transfer.errors import TransferTimeout
from shared.transfer.interface import Moved, PathName
from shared.transfer.transfer_job import DrivenFuture

PATIENCE_S = 60


class Pull(DrivenFuture):
    """Ends when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end, self.given, self.steps = threading.Event(), threading.Event(), 0
        self.drive, self.rest = self._step, self.given.set

    def _step(self, _now_s: float) -> bool:
        self.steps += 1
        if self.may_end.is_set():
            self.set_result(Moved(PathName.IMPORTED, 1, 1))
        return self.done()


@pytest.fixture
def thread():
    made = PullThread()
    yield made
    made.close()


def test_actions_run_in_order_and_before_the_end(thread):
    seen = []
    for number in range(100):
        thread.post(lambda number=number: seen.append(number))
    thread.close()
    assert seen == list(range(100))
    assert not thread._thread.is_alive(), "it waited for more behind the end"


@pytest.mark.parametrize("spin_s", [0.0, 60.0])
def test_a_pull_is_driven_to_its_end_here_however_long_it_takes(thread, monkeypatch, spin_s):
    monkeypatch.setattr(mover_thread, "SPIN_S", spin_s)
    pull, other = Pull(), threading.Event()
    thread.post(lambda: thread.watch(pull))
    while not pull.steps:
        time.sleep(0.001)
    thread.post(other.set)
    assert other.wait(PATIENCE_S), "a pull under way holds nothing up"
    pull.may_end.set()
    while not pull.done():
        time.sleep(0.001)
    assert not pull.given.is_set()


def test_a_pull_that_failed_and_one_that_is_left_at_the_end_are_handed_over(thread):
    failed, left = Pull(), Pull()
    failed.drive = lambda _now_s: failed.done() or failed.set_exception(TransferTimeout("late")) or False
    thread.post(lambda: (thread.watch(failed), thread.watch(left)))
    assert failed.given.wait(PATIENCE_S)
    assert not left.given.is_set()
    thread.close()
    assert left.given.is_set()


def test_what_is_awaited_runs_once_it_is_true_beside_pulls(thread):
    pull, is_ready, ran = Pull(), threading.Event(), threading.Event()
    thread.post(lambda: (thread.watch(pull), thread.when(is_ready.is_set, ran.set)))
    assert not ran.wait(0.02)
    is_ready.set()
    assert ran.wait(PATIENCE_S)
    pull.may_end.set()


def test_a_loop_that_computes_gives_way_to_it_at_once_and_as_by_default_when_it_has_ended():
    """A copy begins while the loop deals with a thousand pages, not 5 ms later."""
    before_s = sys.getswitchinterval()
    made = PullThread()
    assert sys.getswitchinterval() == pytest.approx(mover_thread.SWITCH_S)
    assert before_s > 10 * mover_thread.SWITCH_S
    made.close()
    assert sys.getswitchinterval() == pytest.approx(before_s)


def test_beside_a_large_copy_it_looks_seldom_and_beside_a_small_one_all_the_time(thread):
    assert thread._nap_s(1.0) is None, "nothing is under way"
    thread._watched.append(Pull())
    naps = [thread._nap_s(waited_s) for waited_s in (0.0, 0.0002, 0.0004, 0.003, 1.0)]
    thread._watched.clear()
    assert naps == pytest.approx([0.0, 0.0, mover_thread.MIN_LOOK_S, 0.0003, mover_thread.MAX_LOOK_S])
