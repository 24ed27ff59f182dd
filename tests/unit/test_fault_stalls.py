"""What the fault tests take for a stall of the machine: exactly the time in which it stood still, and once."""

import asyncio
import signal
import time

import pytest

from tests.fault.stalls import Stalls, overlap_s


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(0.0, 1.0), (9.0, 12.0)], 0.0),
        ([(1.0, 3.0)], 1.0),
        ([(1.0, 30.0)], 7.0),
        ([(3.0, 4.0), (3.5, 6.0), (2.5, 3.2), (3.0, 3.1)], 3.5),
        ([(3.0, 4.0), (8.0, 9.5)], 2.0),
    ],
)
def test_moments_count_once_and_only_within_the_span(spans, seconds):
    assert overlap_s(spans, 2.0, 9.0) == pytest.approx(seconds)


@pytest.mark.slow
async def test_a_core_that_stands_still_is_told_with_its_time():
    with Stalls() as stalls:
        begin_s = time.time()
        stalls.watchers[0].send_signal(signal.SIGSTOP)
        stopped_s = time.time()
        await asyncio.sleep(1.5)
        stalls.watchers[0].send_signal(signal.SIGCONT)
        end_s = time.time()
    assert stalls.within(begin_s, end_s) > 0.5 * (end_s - stopped_s)


async def test_a_loop_that_does_not_run_is_told_with_its_time():
    stalls = Stalls()
    watching = asyncio.create_task(stalls.watch())
    await asyncio.sleep(0)
    begin_s = time.time()
    time.sleep(0.2)  # noqa: ASYNC251  it stands still
    end_s = time.time()
    await asyncio.sleep(0.05)
    watching.cancel()
    assert stalls.within(begin_s, end_s) > 0.15
