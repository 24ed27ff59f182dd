"""Threads whose process is of no use without them."""

import logging
import subprocess
import sys
import threading

import pytest

from services.mempool.mover_thread import PullThread
from shared import vital_thread
from shared.mempool.slab_unmaps import SlabUnmaps
from shared.vital_thread import EXIT_BUG, start_vital

PATIENCE_S = 30.0
BROKEN = """
import time
from shared.vital_thread import start_vital
start_vital(lambda: {}["our bug"], name="vital", loss="nothing would be done")
time.sleep(30)
"""


def test_a_bug_in_one_ends_the_process_and_says_what_nobody_would_do_any_more():
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == EXIT_BUG
    assert "thread vital ended by a bug: nothing would be done" in done.stderr
    assert "KeyError: 'our bug'" in done.stderr


def test_one_that_returns_ends_nothing(monkeypatch):
    ended = []
    monkeypatch.setattr(vital_thread.os, "_exit", ended.append)
    start_vital(lambda: None, name="vital", loss="").join(PATIENCE_S)
    assert not ended


def test_a_process_that_is_not_ours_is_not_ended(monkeypatch, caplog):
    ended, told = [], threading.Event()
    monkeypatch.setattr(vital_thread.os, "_exit", ended.append)
    with caplog.at_level(logging.CRITICAL):
        start_vital(lambda: {}["bug"], name="vital", loss="lost", on_bug=told.set).join(PATIENCE_S)
    assert told.is_set()
    assert not ended
    assert "lost" in caplog.text


class BrokenUnmapper:
    """Raises what no driver raises."""

    def unmap(self, slabs, bytes_per_s=0):
        raise KeyError("our bug")


@pytest.mark.parametrize("what", ["mover", "unmaps"])
def test_neither_the_mempools_copies_nor_a_ranks_unmapping_end_alone(what, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(vital_thread.os, "_exit", lambda status: status == EXIT_BUG and ended.set())
    made = PullThread() if what == "mover" else SlabUnmaps(BrokenUnmapper(), lambda _: None)
    try:
        if isinstance(made, PullThread):
            made.post(lambda: {}["our bug"])
        else:
            made.add([1])
        assert ended.wait(PATIENCE_S)
    finally:
        made.close()
