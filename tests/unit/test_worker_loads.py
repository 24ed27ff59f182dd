"""A worker's front tells its mempool of the load."""

import asyncio
from types import SimpleNamespace

import pytest

from shared.engine.interface import EngineLoad
from shared.engine.worker_loads import LoadReports
from shared.ids import Epoch
from shared.wire.mempool_lending import ReportLoad


@pytest.mark.parametrize("num_pages", [None, 0, 7])
async def test_the_pages_that_requests_use_are_reported_or_that_nobody_counts_them(num_pages):
    told: asyncio.Queue[ReportLoad] = asyncio.Queue()
    client = SimpleNamespace(load_interval_ms=1, report_load=told.put_nowait)
    load = EngineLoad(kv_used_share=0.5, num_pages_in_use=num_pages)
    reports = LoadReports(client, "m", load=lambda: load, num_arrived=lambda: 3, epoch=lambda: Epoch(2))
    reports.open()
    said = await told.get()
    await reports.close()
    assert (said.num_pages_in_use, said.kv_used_share, said.num_arrived) == (num_pages, 0.5, 3)
