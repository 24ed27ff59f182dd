"""A limit for another process' answer counts the time in which this process' loop ran."""

import asyncio
import socket
import time

import pytest
import uvloop

from shared.ids import InstanceId
from shared.loop_timeout import loop_timeout
from shared.mempool.client import MempoolClient
from shared.wire import mempool as wire

LIMIT_S = 0.1
TICK_S = 0.002  # a loop's clock may count in milliseconds
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def stand_still(seconds: float) -> None:
    """As a collection of garbage does, or a process without a processor."""
    time.sleep(seconds)


def run(loop, work):
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_answer_that_came_while_the_loop_stood_still_is_in_time(loop):
    async def ask():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            async with loop_timeout(LIMIT_S):
                theirs.send(b"answer")
                reading = asyncio.get_running_loop().sock_recv(ours, 6)
                stand_still(2.5 * LIMIT_S)
                return await reading

    assert run(loop, ask()) == b"answer"


@pytest.mark.parametrize("loop", LOOPS)
def test_of_many_callers_whose_limits_pass_in_one_pause_none_loses_an_answer(loop):
    async def ask():
        client = MempoolClient("/nowhere", InstanceId("a"))
        client._up.set()
        sent = []
        client._link.send = sent.append
        limit_ms = round(5e3 * LIMIT_S)
        calls = [asyncio.ensure_future(client.acquire([b"x" * 16], timeout_ms=limit_ms)) for _ in range(50)]
        await asyncio.sleep(0)
        stand_still(7 * LIMIT_S)

        async def later():  # their bytes are read in the turns behind the pause
            for message in tuple(sent):
                answer = wire.Acquired(call_id=message.call_id, lease_id="l", fencing_token=1, num_blocks=1)
                client._on_message(0, answer, [], [])
                await asyncio.sleep(0)

        await asyncio.gather(later(), *calls)
        return [call.result().num_blocks for call in calls]

    assert run(loop, ask()) == [1] * 50


@pytest.mark.parametrize("loop", LOOPS)
def test_without_an_answer_it_ends_at_the_limit_and_behind_a_pause_at_most_one_limit_later(loop):
    async def wait(pause_s: float) -> None:
        async with loop_timeout(LIMIT_S):
            stand_still(pause_s)
            await asyncio.sleep(30)

    async def silent(pause_s: float) -> float:
        now_s = asyncio.get_running_loop().time  # of its turn, which may have begun a while ago
        began_s = now_s()
        with pytest.raises(TimeoutError):
            await wait(pause_s)
        return now_s() - began_s

    assert LIMIT_S - TICK_S <= run(loop, silent(0)) < 5
    assert 2 * LIMIT_S - TICK_S <= run(loop, silent(1.5 * LIMIT_S)) < 5


def test_a_loop_that_always_stands_still_ends_too():
    async def busy():
        async def pauses():
            while True:
                stand_still(1.5 * LIMIT_S)
                await asyncio.sleep(0)

        task = asyncio.ensure_future(pauses())
        began_s = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                async with loop_timeout(LIMIT_S):
                    await asyncio.sleep(30)
        finally:
            task.cancel()
        return time.monotonic() - began_s

    assert run(asyncio.new_event_loop, busy()) < 5


def test_cancelling_and_what_is_raised_within_go_through():
    async def cancelled():
        async with loop_timeout(LIMIT_S):
            raise asyncio.CancelledError

    async def failed():
        async with loop_timeout(LIMIT_S):
            raise ValueError("as it is")

    async def done():
        async with loop_timeout(LIMIT_S):
            pass
        await asyncio.sleep(1.5 * LIMIT_S)  # its timer is gone

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    with pytest.raises(ValueError, match="as it is"):
        asyncio.run(failed())
    asyncio.run(done())
