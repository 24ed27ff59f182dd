"""The host's part of a reload: what the model of a driver does, and what is made of the samples."""

import asyncio
import time

import numpy as np
import pytest

from loadtest.bench_reload_host import BYTES_PER_S, metrics_from_samples
from loadtest.reload_host_rig import LANES, PAGE_BYTES, Reload, TimedDriver
from services.mempool.mover_thread import PullThread
from shared.kernels.copy_pages.copies import Order
from shared.transfer.page_stream import PageStream


def test_metrics_are_medians_by_how_slow_the_loop_is():
    rows = [
        {"slower": slower, "copies_ms": 10.0, "reload_ms": ms, "first_copy_ms": 1.0, "driver_calls": 7}
        for slower, times in ((1.0, (11, 12, 30)), (2.0, (15, 14, 16)))
        for ms in times
    ]
    found = metrics_from_samples(rows)
    assert (found["reload_1x_ms"], found["reload_1x_worst_ms"], found["reload_2x_ms"]) == (12, 30, 15)
    assert (found["reload_2x_of_copies_ratio"], found["copies_ms"]) == (1.5, 10.0)


def test_copies_of_one_stream_follow_each_other_at_the_links_rate_and_calls_are_counted():
    driver = TimedDriver(LANES * 1e9, 0.0, 0.0)
    stream, event = driver.create_stream(), driver.create_event()
    sizes = np.full(2, 20_000_000, np.uint64)
    begin_s = time.perf_counter()
    for _ in range(2):
        driver.copy_batch(sizes, sizes, sizes, Order.STREAM, stream)
    driver.record(event, stream)
    while not driver.passed(event):
        time.sleep(0.001)
    assert 0.08 <= time.perf_counter() - begin_s < 2
    assert driver.num_calls > 3


@pytest.mark.parametrize("num_blocks", [1, 40, 300])
def test_every_block_comes_once_through_the_real_core_and_thread(num_blocks):
    driver, thread = TimedDriver(BYTES_PER_S, 1.0, 0.8), PullThread()
    stream = PageStream(driver, lanes=LANES, keeps_context=True)
    try:
        reload = Reload(num_blocks, thread, stream, 1.0)
        took_s = asyncio.run(reload.run())
    finally:
        thread.close()
        stream.close()
    assert reload.bytes_moved == num_blocks * PAGE_BYTES
    assert took_s > reload.bytes_moved / BYTES_PER_S
    assert 0 < reload.first_copy_s < took_s
