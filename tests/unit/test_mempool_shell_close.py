"""A mempool that has been closed: the loop may still call what it had planned."""

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
