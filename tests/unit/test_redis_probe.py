"""The supervisor's probe of Redis: an answer counts, an accepted connection does not."""

import asyncio

import pytest

from deploy.local.probes import probe_redis
from deploy.local.supervision import Health


@pytest.mark.parametrize(
    ("reply", "health", "said"),
    [
        (b"+PONG\r\n", Health.OK, ""),
        (b"-NOAUTH Authentication required.\r\n", Health.OK, ""),
        (b"-LOADING Redis is loading\r\n", Health.NOT_READY, "LOADING Redis is loading"),
        (b"-MISCONF No space left\r\n", Health.NOT_READY, "MISCONF No space left"),
        (b"", Health.SILENT, ""),
        (None, Health.SILENT, ""),
    ],
)
async def test_a_redis_is_well_when_it_answers_and_says_what_it_lacks(reply, health, said):
    """None: it accepts, and says nothing."""
    asked, was_asked = [], asyncio.Event()

    async def serve(reader, writer):
        asked.append(await reader.readline())
        was_asked.set()
        if reply is not None:
            writer.write(reply)
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        timeout_s = 60.0 if reply is not None else 0.2
        assert await probe_redis("127.0.0.1", port, timeout_s=timeout_s) == (health, said)
        await asyncio.wait_for(was_asked.wait(), 60)
    assert asked == [b"PING\r\n"]
