"""Requests that come in one piece are started without ASGI; all others, and those behind another, go its way."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn

from services.gateway.http_protocol import MAX_QUEUED, MAX_QUEUED_BYTES, GatewayProtocol
from services.gateway.push import PUSH_KEY, Limits, Push
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
        if self.hold is not None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone()
            return
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


QUEUED = {
    "small": post(b"y"),
    "large": post(b"y" * 200_000),
    "half": post(b"y" * 200_000)[:-1_000],
    "several": post(b"y") * MAX_QUEUED,
}


@pytest.mark.parametrize("path", [PATH, b"/asgi"], ids=["direct", "asgi"])
@pytest.mark.parametrize("queued", QUEUED)
async def test_a_client_that_leaves_is_noticed_though_a_request_waits_behind_the_one_that_runs(
    server, path, queued
):
    server.app.hold = asyncio.Event()
    server.app.hold.set()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(b"x", path=path))
    await until(lambda: server.app.ways)
    (connection,) = server.server_state.connections
    writer.write(QUEUED[queued])
    await writer.drain()
    await until(lambda: connection.pipeline)
    writer.close()
    await until(lambda: server.app.num_gone)
    await until(lambda: not server.server_state.connections)
    assert len(server.app.ways) == server.app.num_gone == 1, "what waited was not begun"


async def held(server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, GatewayProtocol]:
    """A connection whose first request runs until the test answers it."""
    server.app.hold = asyncio.Event()
    server.app.hold.set()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(b"x"))
    await until(lambda: server.app.ways)
    (connection,) = server.server_state.connections
    await until(lambda: connection.cycle.message_event.callback)
    server.app.hold = None
    return reader, writer, connection


@pytest.mark.parametrize(
    "bodies", [[b"%d" % each for each in range(3 * MAX_QUEUED)], [b"y" * 3 * MAX_QUEUED_BYTES]], ids=len
)
async def test_what_waits_behind_a_request_is_bounded_and_answered_in_order(server, bodies):
    reader, writer, connection = await held(server)
    for body in bodies:
        writer.write(post(body))
        await asyncio.sleep(0.001)
    await until(lambda: connection.flow.read_paused)
    assert sum(len(cycle.body) for cycle, _ in connection.pipeline) <= 2 * MAX_QUEUED_BYTES
    Push(connection._running).respond(200, b"", b"x")
    for body in [b"x", *bodies]:
        assert (await read_answer(reader)).endswith(b"\r\n\r\n" + body)
    writer.close()


async def test_a_body_that_waits_behind_a_request_may_be_slow(server, monkeypatch):
    monkeypatch.setattr(Limits, "body_idle_timeout_s", 0.1)
    reader, writer, connection = await held(server)
    writer.write(post(b"yy")[:-1])
    await until(lambda: connection.pipeline)
    await asyncio.sleep(0.4)
    writer.write(b"y")
    await until(lambda: not connection.cycle.more_body)
    Push(connection._running).respond(200, b"", b"x")
    assert (await read_answer(reader)).endswith(b"x")
    assert (await read_answer(reader)).endswith(b"yy")
    writer.close()


async def test_what_is_no_http_behind_a_waiting_request_is_not_answered_inside_the_running_answer(server):
    reader, writer, connection = await held(server)
    push = Push(connection._running)
    push.start_stream(b"")
    push.write(b"one")
    writer.write(post(b"y"))
    await until(lambda: connection.pipeline)
    writer.write(b"\x16\x03\x01\x02\x00\r\n\r\n")
    assert (await reader.read()).endswith(b"\r\n\r\n3\r\none\r\n")
    await until(lambda: server.app.num_gone)
    writer.close()


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
