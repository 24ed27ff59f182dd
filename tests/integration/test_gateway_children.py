"""A gateway of several processes: one that ends, hangs or cannot be started is not the end of the others."""

import asyncio
import os
import signal

import pytest

from tests.integration.gateway_process_rig import children_now, children_of, neighbours, process, ready
from tests.integration.gateway_rig import until


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
