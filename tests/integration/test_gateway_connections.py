"""Who holds connections to a gateway and asks nothing takes no place from those who ask."""

import asyncio
import contextlib
import resource

from tests.integration.gateway_process_rig import CHAT, answer_in_two, ids, neighbours, process, ready

NUM_FILES = 400
ASK = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{"


def limited(soft: str, hard: str) -> str:
    """A gateway that was started with these limits of open files."""
    return f"""
import resource, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from services.gateway import __main__ as main
sys.exit(main.main(sys.argv[1:]))
"""


async def test_a_gateway_may_have_as_many_connections_as_the_system_lets_it(model_dir):
    code = limited("256", "most")
    async with (
        neighbours() as (coordinator, scheduler, _worker),
        process(model_dir, coordinator, scheduler, code=code, processes=1) as (child, _client),
    ):
        soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        assert soft == hard


async def test_idle_connections_beyond_the_limit_of_open_files_take_nothing_from_streams_and_probes(
    model_dir,
):
    async with neighbours() as (coordinator, scheduler, worker):
        first, *rest = ids(model_dir, " the quick brown fox jumps")
        may_end = asyncio.Event()
        worker.script = answer_in_two(first, rest, may_end)
        flags = {"code": limited(str(NUM_FILES), str(NUM_FILES)), "processes": 1}
        async with process(model_dir, coordinator, scheduler, **flags) as (child, client):
            body = {**CHAT, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                parts = reply.aiter_text()
                text = await anext(parts)
                host, port = client.base_url.host, client.base_url.port
                asks, begun = await asyncio.open_connection(host, port)
                begun.write(HALF)
                async with idle_connections(host, port):
                    await ready(client, child, 5.0)
                    begun.write(b"}")
                    assert (await asyncio.wait_for(asks.read(12), 5)) == b"HTTP/1.1 400", (
                        "half a body is no idling"
                    )
                    begun.close()
                    may_end.set()
                    async for part in parts:
                        text += part
            assert "jumps" in text
            said = (await client.get("/metrics")).text
            [spared] = [line for line in said.splitlines() if line.startswith("quire_gateway_spared_")][:1]
            assert float(spared.split()[-1]) >= 200


@contextlib.asynccontextmanager
async def idle_connections(host: str, port: int):
    """More than the gateway has files: some that say nothing, some that begin a request, some that have asked."""
    held: list[asyncio.StreamWriter] = []
    try:
        for number in range(2 * NUM_FILES):
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(host, port)
            held.append(writer)
            if kind := number % 3:
                writer.write(ASK if kind == 1 else ASK[:20])
            if kind == 1:
                assert (await asyncio.wait_for(reader.read(12), 5)) == b"HTTP/1.1 200"
        yield
    finally:
        for writer in held:
            writer.close()
