"""A request that offers another protocol is answered as one that does not (RFC 9110, 7.8), however it comes.

Java's HttpClient offers h2c with every first request on plain HTTP, bodies included.
"""

import asyncio
import json

import httptools
import pytest

from services.gateway.http_protocol import REFUSED_KEY
from services.gateway.push import Limits
from tests.integration.test_gateway_direct import PATH, post, read_answer, server

__all__ = ["server"]

BODY = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"  # what a parser that lost its place would run as the next request
OFFERS = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nsec-websocket-version: 13\r\n",
    "two": b"upgrade: foo/2\r\nconnection: upgrade\r\nupgrade: h2c\r\n",
}
CUTS = {"in one piece": 1 << 20, "by the byte": 1, "in pieces": 37}


def chunked(body: bytes, more: bytes) -> bytes:
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (
        PATH,
        more,
        chunks,
    )


def whole(body: bytes, more: bytes) -> bytes:
    return post(body, more=more)


async def send(writer: asyncio.StreamWriter, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await asyncio.sleep(0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("shape", [whole, chunked])
async def test_a_body_behind_an_offer_is_its_request_s_and_what_follows_is_the_next_request(
    server, shape, offer, cut
):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    requests = shape(BODY, OFFERS[offer]) + shape(b"second", OFFERS[offer]) + post(b"third")
    await send(writer, requests, CUTS[cut])
    for body in (BODY, b"second", b"third"):
        found = await read_answer(reader)
        assert found.startswith(b"HTTP/1.1 200 ")
        assert found.endswith(b"\r\n\r\n" + body)
    writer.write(post(b"fourth"))
    assert (await read_answer(reader)).endswith(b"fourth")
    writer.close()
    assert len(server.app.ways) == 4


@pytest.mark.parametrize("at", [5, 40, 0], ids=["in the head", "in a header", "behind the head"])
async def test_an_offer_may_come_in_two_pieces(server, at):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    request = whole(BODY, OFFERS["h2c"])
    at = at or len(request) - len(BODY)
    writer.write(request[:at])
    (connection,) = server.server_state.connections
    while not (connection._in_body or connection._in_head):  # noqa: ASYNC110 - of the server in this loop
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    writer.write(request[at:])
    assert (await read_answer(reader)).endswith(b"\r\n\r\n" + BODY)
    writer.close()
    assert len(server.app.ways) == 1


async def test_an_offer_without_a_body_is_answered_and_a_whole_request_with_one_goes_the_direct_way(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /other HTTP/1.1\r\nhost: x\r\n%b\r\n" % OFFERS["h2c"])
    assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 ")
    writer.write(whole(b"body", OFFERS["h2c"]))
    assert (await read_answer(reader)).endswith(b"body")
    writer.close()
    assert server.app.ways == ["asgi", "direct"]


@pytest.mark.parametrize(
    ("more", "version"),
    [(b"connection: close, upgrade\r\nupgrade: h2c\r\n", b"1.1"), (OFFERS["h2c"], b"1.0")],
)
async def test_an_offer_changes_nothing_about_whether_the_connection_stays(server, more, version):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(whole(b"body", more).replace(b"HTTP/1.1", b"HTTP/" + version))
    found = await reader.read()
    assert b"connection: close" in found
    assert found.endswith(b"body")
    writer.close()


@pytest.mark.parametrize("size", [1 << 20, 1_000])
async def test_the_head_of_an_offer_has_the_limit_of_any_other(server, size):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    more = OFFERS["h2c"] + b"x-long: %b\r\n" % (b"a" * Limits.header_bytes)
    await send(writer, b"GET /other HTTP/1.1\r\nhost: x\r\n%b\r\n" % more, size)
    found = await reader.readline()
    if (
        b" 431 " not in found
    ):  # what is refused when it is complete is so by the application: this one does not look
        (connection,) = server.server_state.connections
        assert connection.cycle.scope[REFUSED_KEY]
    writer.close()


async def test_a_tunnel_is_refused_and_nothing_in_it_runs(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + post(b"inside"))
    found = await reader.read()
    assert found.startswith(b"HTTP/1.1 405 ")
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "method_not_allowed"
    writer.close()
    assert server.app.ways == []


def test_the_parser_says_where_an_offer_s_body_begins():
    """What the protocol relies on: an upgrade of httptools would break it here first."""
    head = post(b"", more=OFFERS["h2c"])
    with pytest.raises(httptools.HttpParserUpgrade) as stop:
        httptools.HttpRequestParser(object()).feed_data(head + b"rest")
    assert stop.value.args == (len(head),)
