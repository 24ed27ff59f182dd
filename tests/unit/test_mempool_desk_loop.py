"""The desk's loop excuses what it was late by, and nothing else."""

import asyncio
from types import SimpleNamespace

from services.mempool.desk_loop import DeskLoop
from shared.transport.clock import ManualClock

INTERVAL_MS = 10


async def test_time_in_which_the_loop_stood_still_is_excused_and_the_interval_is_not():
    clock, excused, decided = ManualClock(1_000), [], asyncio.Event()

    def decide_market(now_ms):
        decided.set()
        return [], []

    shell = SimpleNamespace(
        pool=SimpleNamespace(learn_rates=lambda rates: None, decide_market=decide_market),
        spaces=SimpleNamespace(pair_rates=dict), clock=clock, perform=lambda actions: None,
    )  # fmt: skip
    desk = SimpleNamespace(words=[], excuse=lambda late_ms, now_ms: excused.append((late_ms, now_ms)))
    loop = DeskLoop("http://127.0.0.1:1", "", shell, desk, INTERVAL_MS)
    loop.open()
    for stood_ms in (INTERVAL_MS, 5_000 + INTERVAL_MS, INTERVAL_MS):
        await asyncio.sleep(0)  # it sleeps now
        clock.advance(stood_ms)
        decided.clear()
        await asyncio.wait_for(decided.wait(), 5)
    await loop.close()
    assert excused == [(5_000, 1_000 + 5_000 + 2 * INTERVAL_MS)]
