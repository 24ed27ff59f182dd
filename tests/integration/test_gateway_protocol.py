"""The HTTP protocol's limits, and responses written from callbacks, over a real socket."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest
import uvicorn

from services.gateway.http_protocol import GatewayProtocol
from services.gateway.push import PUSH_KEY, Limits, Push
from tests.integration.gateway_rig import until
from tests.support.quickest import ever


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def app(scope, receive, send):
    """Answers from callbacks of the loop, as tokens from ZeroMQ do."""
    push = Push(scope[PUSH_KEY])
    loop = asyncio.get_running_loop()
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    headers = b"content-type: text/plain\r\n"
    if scope["path"] == "/whole":
        loop.call_soon(push.respond, 200, headers, b"whole")
    elif scope["path"] == "/flood":

        def flood():
            if not push.write(b"x" * 65536):
                scope["state"]["seen"].append("slow")
                push.cut()
            elif not push.gone:
                loop.call_later(0.001, flood)

        loop.call_soon(push.start_stream, headers)
        loop.call_soon(flood)
    else:
        loop.call_soon(push.start_stream, headers)
        loop.call_soon(push.write, b"one ")
        loop.call_later(0.01, push.write, b"two ")
        loop.call_later(0.02, push.end_stream, b"three")
    ended = await receive()
    scope["state"]["seen"].append(ended["type"])


@pytest.fixture
async def server():
    limits = {key: value for key, value in vars(Limits).items() if not key.startswith("_")}
    Limits.header_timeout_s, Limits.body_idle_timeout_s, Limits.body_bytes = 0.8, 0.8, 1 << 20
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=GatewayProtocol, ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    server.lifespan.state["seen"] = []
    server.port = listener.getsockname()[1]
    yield server
    server.should_exit = True
    await task
    for key, value in limits.items():
        setattr(Limits, key, value)


async def raw(port: int, data: bytes, *, timeout_s: float = 30.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()


async def test_pushed_responses_are_whole_and_keep_the_connection(server):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        for _ in range(3):
            assert (await client.get("/whole")).text == "whole"
            reply = await client.post("/stream", content=b"{}")
            assert reply.text == "one two three"
            assert reply.headers["transfer-encoding"] == "chunked"
    assert server.server_state.total_requests == 6
    assert len(server.lifespan.state["seen"]) == 6


async def test_connection_close_and_http_1_0_end_the_connection(server):
    reply = await raw(server.port, b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert reply.endswith(b"5\r\nthree\r\n0\r\n\r\n")
    assert b"connection: close" in reply
    assert (await raw(server.port, b"GET /whole HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nwhole")


async def test_a_stream_to_an_http_1_0_client_is_plain_and_ends_with_its_connection(server):
    for more in (b"", b"connection: keep-alive\r\n"):
        reply = await raw(server.port, b"GET /stream HTTP/1.0\r\n" + more + b"\r\n")
        head, _, body = reply.partition(b"\r\n\r\n")
        assert body == b"one two three"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head


async def test_pipelined_requests_are_answered_in_order(server):
    one = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /whole HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    reply = await raw(server.port, one + last)
    assert reply.index(b"three") < reply.index(b"whole")


async def test_a_reader_that_does_not_read_is_noticed(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: "slow" in server.lifespan.state["seen"])
    writer.close()
    del reader


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nx-a: " + b"a" * 40_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc", 408),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
async def test_broken_requests_get_an_openai_body_and_the_connection_ends(server, data, status):
    reply = await raw(server.port, data)
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_body_that_comes_by_the_byte_is_given_up_and_one_at_a_modest_rate_is_not(server):
    async def has(piece: bytes, status: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /whole HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (len(piece) * 15))
        answer = asyncio.create_task(reader.readline())
        for _ in range(15):
            if not answer.done():
                writer.write(piece)
            await asyncio.sleep(0.1)
        line = await answer
        writer.close()
        return line.startswith(b"HTTP/1.1 %d " % status)

    assert await has(b"x", 408)
    assert await ever(lambda: has(b"x" * 200, 200)), "a pause of this process is one of the client's"


@pytest.mark.parametrize("pause_s", [0, 0.1])
async def test_line_ends_behind_an_answer_do_not_keep_a_connection(server, pause_s):
    server.config.timeout_keep_alive = 0.5
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"\r\n")
    ended = asyncio.create_task(reader.read())
    async with asyncio.timeout(30):
        while pause_s and not ended.done():
            writer.write(b"\r\n")
            await asyncio.sleep(pause_s)
        with contextlib.suppress(ConnectionError):  # reset, when it closed before it had read them all
            assert await ended == b""
    writer.close()


async def test_a_silent_connection_is_closed(server):
    assert await raw(server.port, b"") == b""
