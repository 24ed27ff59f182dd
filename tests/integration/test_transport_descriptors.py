"""Clients of the unix channel in a process that has no descriptor left: it passes, and so must they."""

import asyncio
import contextlib
import os
import resource

import pytest

from shared.errors import PeerGone
from shared.ids import InstanceId
from shared.mempool.client import MempoolClient
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_call import UnixCaller
from shared.transport.unix_channel import UnixLink, UnixServer
from tests.support.ask_answer import ANSWER, ASK


@contextlib.contextmanager
def no_descriptors_left():
    """As long as none is closed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_client_without_descriptors_says_that_nobody_is_there_and_connects_when_it_has_some(tmp_path):
    path = tmp_path / "pool.sock"
    server = UnixServer(path, into=ASK, out=ANSWER, on_message=lambda *_: None)
    await server.start()
    link = UnixLink(path, out=ASK, into=ANSWER, on_message=lambda *_: None)
    blocking = BlockingUnixLink(path, out=ASK, into=ANSWER, on_message=lambda *_: None)
    with no_descriptors_left():
        with pytest.raises(PeerGone, match="Too many open files"):
            await link.connect()
        with pytest.raises(PeerGone, match="Too many open files"):
            blocking.connect()
        with pytest.raises(PeerGone, match="Too many open files"):
            UnixCaller(path, out=ASK, into=ANSWER)
    await link.connect()
    blocking.connect()
    link.close()
    blocking.close()
    server.close()


async def test_a_mempools_client_without_descriptors_goes_on_trying(tmp_path):
    client = MempoolClient(tmp_path / "pool.sock", InstanceId("i"))
    with no_descriptors_left():
        client.start()
        while client.counters["connects_failed"] < 2:
            assert client._task is not None
            assert not client._task.done()
            await asyncio.sleep(0.01)
    await client.close()
