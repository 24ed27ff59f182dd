"""Requests that come in one piece are started without ASGI; all others, and those behind another, go its way."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn

from services.gateway.http_protocol import PUSH_KEY, GatewayProtocol, Push
from tests.integration.gateway_rig import until

PATH = b"/v1/chat/completions"
KEEP_ALIVE_S = 60


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


class App:
    """Says which way a request came and gives its body back."""

    def __init__(self) -> None:
        self.direct = {PATH: self.start}
        self.ways: list[str] = []
        self.num_gone = 0
        self.hold: asyncio.Event | None = None

    async def start(self, scope, body):
        self.ways.append("direct")
        push = Push(scope[PUSH_KEY])
        if self.hold is not None:
            await self.hold.wait()
        push.when_gone(self.gone)
        if self.hold is None:
            asyncio.get_running_loop().call_soon(push.respond, 200, b"x-way: direct\r\n", body)

    def gone(self) -> None:
        self.num_gone += 1

    async def __call__(self, scope, receive, send):
        self.ways.append("asgi")
        push, body = Push(scope[PUSH_KEY]), b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        push.respond(200, b"x-way: asgi\r\n", body + message.get("body", b""))
        await receive()


@pytest.fixture
async def server():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = App()
    config = uvicorn.Config(
        app, interface="asgi3", http=GatewayProtocol, ws="none", lifespan="off", log_config=None,
        access_log=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    server.app, server.port = app, listener.getsockname()[1]
    yield server
    server.should_exit = True
    await task


def post(body: bytes, *, path: bytes = PATH, method: bytes = b"POST", more: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        method,
        path,
        more,
        len(body),
        body,
    )


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Head and body of an answer of known length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    return head + await reader.readexactly(int(length.split()[1]))


async def test_a_whole_request_is_direct_and_one_in_pieces_is_not(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for number in range(3):
        writer.write(post(b"whole %d" % number))
        assert (await read_answer(reader)).endswith(b"whole %d" % number)
    writer.write(post(b"x" * 20_000))  # more than a head may have
    assert (await read_answer(reader)).endswith(b"x" * 20_000)
    request = post(b"in two pieces")
    for cut in (5, len(request) - 13, len(request) - 4):  # in the head, behind it, in the body
        writer.write(request[:cut])
        await asyncio.sleep(
            0.05
        )  # a kernel that joins the pieces makes it a whole one: answered all the same
        writer.write(request[cut:])
        assert (await read_answer(reader)).endswith(b"in two pieces")
    writer.close()
    assert server.app.ways[:3] == ["direct"] * 3
    assert len(server.app.ways) == 7
    assert server.server_state.total_requests == 7


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"body", path=b"/v1/models"),
        post(b"body", path=PATH + b"?x=1"),
        post(b"body", method=b"PUT"),
        post(b"body", more=b"expect: 100-continue\r\n"),
        post(b"body").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
)
async def test_other_requests_go_through_asgi(server, request_bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes)
    found = await reader.readuntil(b"\r\n\r\n")
    if b" 100 " in found:
        found = await reader.readuntil(b"\r\n\r\n")
    assert b"x-way: asgi" in found
    assert await reader.readexactly(4) == b"body"
    writer.close()
    assert server.app.ways == ["asgi"]


async def test_pipelined_requests_are_answered_in_order_whichever_way_they_go(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(b"one") + post(b"two") + post(b"three", path=b"/other") + post(b"four"))
    for body in (b"one", b"two", b"three", b"four"):
        assert (await read_answer(reader)).endswith(body)
    writer.write(post(b"five"))
    assert (await read_answer(reader)).endswith(b"five")
    writer.close()
    assert server.app.ways == ["direct", "asgi", "asgi", "asgi", "direct"]


@pytest.mark.parametrize("when", ["before it runs", "while it runs"])
async def test_a_client_that_leaves_is_noticed_once(server, when):
    server.app.hold = asyncio.Event()
    if when == "while it runs":
        server.app.hold.set()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(b"x"))
    await until(lambda: server.app.ways)
    writer.transport.abort()
    await until(lambda: not server.server_state.connections)
    server.app.hold.set()
    await until(lambda: server.app.num_gone)
    assert server.app.num_gone == 1


async def test_an_answered_request_notices_nobody_leaving(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(b"x"))
    await read_answer(reader)
    writer.close()
    await until(lambda: not server.server_state.connections)
    assert server.app.num_gone == 0


async def test_the_keep_alive_timer_closes_a_connection_that_was_idle_for_so_long_and_no_other(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(b"x"))
    await read_answer(reader)
    (connection,) = server.server_state.connections
    assert connection.timeout_keep_alive_task is not None
    server.app.hold = asyncio.Event()
    writer.write(post(b"y"))
    await until(lambda: len(server.app.ways) == 2)
    connection.timeout_keep_alive_handler()  # due while a request is served
    assert not connection.transport.is_closing()
    assert connection.timeout_keep_alive_task is None
    server.app.hold.set()
    await until(lambda: connection.cycle.message_event.callback)
    Push(connection.cycle).respond(200, b"", b"y")
    await read_answer(reader)
    connection.timeout_keep_alive_handler()  # due soon after an answer: looks again later
    assert not connection.transport.is_closing()
    assert connection.timeout_keep_alive_task is not None
    connection._idle_since_s -= KEEP_ALIVE_S
    connection.timeout_keep_alive_handler()
    assert await reader.read() == b""
    writer.close()
