"""A mempool that has been closed: the loop may still call what it had planned. And its timer, where it is due now."""

import asyncio

import pytest

from services.mempool.core.actions import PoolLimits, WriteWords
from services.mempool.shell import MempoolShell
from shared.ids import Epoch
from shared.transport.clock import MonotonicClock


async def test_a_death_that_is_told_after_the_close_acts_on_nothing(tmp_path):
    shell = MempoolShell(
        tmp_path / "mempool.sock", PoolLimits(capacity_bytes=1 << 20), Epoch(1), MonotonicClock()
    )
    shell.close()
    shell.perform([WriteWords(space=0, words=[])])  # there is no memory 0


async def test_a_deadline_that_is_due_now_may_be_no_timer_of_the_loop(tmp_path, monkeypatch):
    """uvloop's call_at() answers it with a plain handle, which does not know its time."""
    shell = MempoolShell(
        tmp_path / "mempool.sock", PoolLimits(capacity_bytes=1 << 20), Epoch(1), MonotonicClock()
    )
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_at", lambda _at, act, *args, **_: loop.call_soon(act, *args))
    monkeypatch.setattr(shell.pool, "next_deadline_ms", shell.clock.now_ms)
    shell.perform([])
    await asyncio.sleep(0.005)
    shell.perform([])
    shell.close()


async def test_an_action_that_raises_does_not_keep_later_ones_from_being_performed(tmp_path, monkeypatch):
    shell = MempoolShell(
        tmp_path / "mempool.sock", PoolLimits(capacity_bytes=1 << 20), Epoch(1), MonotonicClock()
    )
    with pytest.raises(KeyError):
        shell.perform([WriteWords(space=0, words=[])])  # there is no memory 0
    done = []
    monkeypatch.setattr(shell, "_perform_one", done.append)
    later = WriteWords(space=1, words=[])
    shell.perform([later])
    assert done == [later]
    shell.close()
