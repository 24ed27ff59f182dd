"""A gateway of several processes: one that ends, hangs or cannot be started is not the end of the others."""

import asyncio
import os
import signal

import pytest

from tests.integration.gateway_process_rig import (
    CHAT,
    answer_in_two,
    children_now,
    children_of,
    ids,
    neighbours,
    process,
    ready,
    streamed,
)
from tests.integration.gateway_rig import answer_tokens, until

CHATS = 'quire_gateway_requests_total{route="/v1/chat/completions",status="200"}'


def refused_fork(which: int) -> str:
    """A gateway whose fork of this number fails, counted from 1."""
    return f"""
import errno, os, sys
from services.gateway import __main__ as main
fork, count = os.fork, 0
def refusing():
    global count
    count += 1
    if count == {which}:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = refusing
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("which", [2, 3])
async def test_a_process_that_the_system_refuses_once_is_started_later(model_dir, which):
    async with neighbours() as (coordinator, scheduler, _worker):
        code = refused_fork(which)
        async with process(model_dir, coordinator, scheduler, code=code, processes=2) as (child, client):
            first, *_ = await children_of(child.pid, 2)
            os.kill(first, signal.SIGKILL)
            await until(lambda: first not in children_now(child.pid))
            await children_of(child.pid, 2)
            await ready(client, child)
            child.send_signal(signal.SIGTERM)
            _, said = await asyncio.wait_for(child.communicate(), 60)
            assert child.returncode == 0
            assert b"cannot be started now: Resource temporarily unavailable; trying again" in said


SOON_SILENT = """
import sys
from services.gateway.core import beats
beats.SILENT_S = 3.0
from services.gateway import __main__ as main
sys.exit(main.main(sys.argv[1:]))
"""


async def test_a_process_that_hangs_is_killed_and_starts_again(model_dir):
    flags = {"code": SOON_SILENT, "processes": 2}
    async with (
        neighbours() as (coordinator, scheduler, _worker),
        process(model_dir, coordinator, scheduler, **flags) as (child, client),
    ):
        hung, other = await children_of(child.pid, 2)
        await asyncio.sleep(1.5)  # each was heard
        os.kill(hung, signal.SIGSTOP)
        try:
            await until(lambda: hung not in children_now(child.pid))
        finally:
            if hung in children_now(child.pid):
                os.kill(hung, signal.SIGKILL)
        assert other in await children_of(child.pid, 2)
        await ready(client, child)
        child.send_signal(signal.SIGTERM)
        _, said = await asyncio.wait_for(child.communicate(), 60)
        assert f"process 0 (pid {hung}) hangs: its event loop did nothing for 3 s; killed" in said.decode()
        assert said.count(b"killed") == 1


async def test_a_process_that_drains_for_long_does_not_hang(model_dir):
    async with neighbours() as (coordinator, scheduler, worker):
        first, *rest = ids(model_dir, " the quick brown fox jumps")
        may_end = asyncio.Event()
        worker.script = answer_in_two(first, rest, may_end)
        flags = {"processes": 2, "drain_deadline_ms": 60_000}
        async with process(model_dir, coordinator, scheduler, code=SOON_SILENT, **flags) as (child, client):

            async def drain_for_long():
                child.send_signal(signal.SIGTERM)
                await asyncio.sleep(5)
                may_end.set()

            assert "jumps" in await streamed(client, drain_for_long)
            _, said = await asyncio.wait_for(child.communicate(), 60)
            assert child.returncode == 0
            assert b"killed" not in said


async def test_a_process_that_starts_again_goes_on_in_the_metrics_of_the_one_before(
    model_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def files():
        return {each.name for each in tmp_path.glob("quire-gateway-metrics-*/*") if "gauge" not in each.name}

    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the"))
        async with process(model_dir, coordinator, scheduler, processes=2) as (child, client):
            for num_answered in range(1, 4):
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
                counted = f"{CHATS} {num_answered}.0"
                await answers(client, "/metrics", lambda text, wanted=counted: wanted in text)
                before = await children_of(child.pid, 2)
                for each in before:
                    os.kill(each, signal.SIGKILL)
                await until(lambda gone=before: not {*children_now(child.pid)} & {*gone})
                await children_of(child.pid, 2)
                await ready(client, child)
            assert f"{CHATS} 3.0" in (await client.get("/metrics")).text
            assert files() == {
                f"{kind}_{number}.db" for kind in ("counter", "histogram") for number in (0, 1)
            }


async def answers(client, path, holds):
    async with asyncio.timeout(30):
        while True:
            if holds((await client.get(path)).text):
                return
            await asyncio.sleep(0.05)
