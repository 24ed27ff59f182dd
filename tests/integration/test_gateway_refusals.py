"""What the gateway's protocol refuses or gives up inside a request, on a real gateway: bounds, answers, counts."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client import REGISTRY

from services.gateway import tally
from services.gateway.http_protocol import GatewayProtocol
from services.gateway.push import Limits
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import chat, until

KEY = "sk-of-this-test"
CHAT = b"/v1/chat/completions"
BODY = json.dumps(chat()).encode()
CHUNKED = b"transfer-encoding: chunked\r\n"
IDLE_S = 0.3
TRAILERS = b"x-trailer: %b\r\n" % (b"a" * 500)


@pytest.fixture
async def rig(model_dir, monkeypatch):
    """Its `extra["open"]`: the connections that are open."""
    open_now: list[GatewayProtocol] = []
    made, lost = GatewayProtocol.connection_made, GatewayProtocol.connection_lost

    def connection_made(self, transport):
        open_now.append(self)
        made(self, transport)

    def connection_lost(self, exc):
        open_now.remove(self)
        lost(self, exc)

    monkeypatch.setattr(GatewayProtocol, "connection_made", connection_made)
    monkeypatch.setattr(GatewayProtocol, "connection_lost", connection_lost)
    before = {key: value for key, value in vars(Limits).items() if not key.startswith("_")}
    async with running(model_dir, api_keys=[KEY], body_idle_timeout_ms=30_000) as found:
        found.say("said")
        found.extra["open"] = open_now
        yield found
    for key, value in before.items():
        setattr(Limits, key, value)


def head(more: bytes, *, key: bool = True, path: bytes = CHAT, method: bytes = b"POST") -> bytes:
    who = b"authorization: bearer %b\r\n" % KEY.encode() if key else b""
    return b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%b%b\r\n" % (
        method,
        path,
        who,
        more,
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def connected(rig):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base_url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def everything(reader) -> bytes:
    """Until the end of the connection, however it came."""
    got = b""
    with suppress(ConnectionError):
        while piece := await asyncio.wait_for(reader.read(65536), 30):
            got += piece
    return got


async def send_until_closed(reader, writer, pieces, pause_s=0.0) -> bytes:
    """What came back to somebody who goes on sending whatever is said."""
    answer = asyncio.create_task(everything(reader))
    with suppress(ConnectionError):
        for piece in pieces:
            if answer.done():
                break
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
    return await answer


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


class Counts:
    """What the gateway's counters have grown by since."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> dict:
        tally.settle()
        names = {
            "quire_gateway_requests_total",
            "quire_gateway_errors_total",
            "quire_gateway_client_aborts_total",
        }
        return {
            (sample.name.removeprefix("quire_gateway_"), *sorted(sample.labels.values())): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name in names
        }

    @property
    def grown(self) -> dict:
        found = {key: value - self._before.get(key, 0) for key, value in self._read().items()}
        return {key: value for key, value in found.items() if value}


def counted(status: int, code: str, route: bytes = b"other") -> dict:
    return {("requests_total", *sorted((route.decode(), str(status)))): 1, ("errors_total", code): 1}


# -- trailers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, b"/tokenize"])
@pytest.mark.parametrize("shape", ["many", "one that does not end", "the size of a chunk that does not end"])
async def test_trailers_count_against_the_limit_of_a_head(rig, path, shape):
    begin = head(CHUNKED, path=path) + chunk(BODY)
    begin, piece = {
        "many": (begin + b"0\r\n", TRAILERS),
        "one that does not end": (begin + b"0\r\nx: ", b"a" * 500),
        "the size of a chunk that does not end": (begin + b"2;", b"a" * 500),
    }[shape]
    counts = Counts()
    async with connected(rig) as (reader, writer):
        writer.write(begin)
        got = await send_until_closed(reader, writer, [piece] * (4 * Limits.header_bytes // 500), 0.001)
    assert statuses(got) == [431]
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_too_large"
    await until(lambda: counts.grown == counted(431, "header_too_large", path))


async def test_trailers_that_come_with_the_whole_request_are_limited_too(rig):
    counts = Counts()
    async with connected(rig) as (reader, writer):
        trailers = TRAILERS * (2 * Limits.header_bytes // len(TRAILERS))
        writer.write(head(CHUNKED) + chunk(BODY) + b"0\r\n" + trailers + b"\r\n")
        assert statuses(await everything(reader)) == [431]
    await until(lambda: counts.grown == counted(431, "header_too_large", CHAT))


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
async def test_trailers_within_the_limit_are_dropped_whole_or_in_pieces(rig, size):
    trailers = TRAILERS * (Limits.header_bytes * 9 // 10 // len(TRAILERS)) if size > 1 else b"x-c: d\r\n"
    request = head(CHUNKED) + chunk(BODY) + b"0\r\nx-a: b\r\n" + trailers + b"\r\n"
    async with connected(rig) as (reader, writer):
        for at in range(0, len(request), size):
            writer.write(request[at : at + size])
            await asyncio.sleep(0)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")


async def test_a_key_in_a_trailer_is_no_key(rig):
    async with connected(rig) as (reader, writer):
        writer.write(
            head(CHUNKED, key=False) + chunk(BODY) + b"0\r\nauthorization: bearer %b\r\n\r\n" % KEY.encode()
        )
        assert b"401" in await reader.readuntil(b"\r\n\r\n")


# -- answered before the end of the body ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "pause_s"),
    [([b"0\r\n"] + [TRAILERS] * 4_000, 0.0), ([chunk(b"a" * 100)] * 1_000, 0.02)],
    ids=["trailers", "a body at a modest rate"],
)
async def test_behind_a_refusal_no_body_is_read_without_bound_and_nothing_is_answered_twice(
    rig, pieces, pause_s, monkeypatch
):
    monkeypatch.setattr(Limits, "body_idle_timeout_s", IDLE_S)
    counts = Counts()
    async with connected(rig) as (reader, writer):
        writer.write(head(CHUNKED, key=False))
        left = iter(pieces)
        assert statuses(await send_until_closed(reader, writer, left, pause_s)) == [401]
        assert next(left, None) is not None, "closed before all was read"
    await until(lambda: counts.grown == counted(401, "invalid_api_key", CHAT))


async def test_a_body_that_ends_soon_behind_its_refusal_leaves_a_connection_that_serves_and_that_idles_out(
    rig,
):
    async with connected(rig) as (reader, writer):
        writer.write(head(b"content-length: %d\r\n" % len(BODY), key=False) + BODY[:5])
        assert b"401" in await reader.readuntil(b"\r\n\r\n")
        writer.write(BODY[5:] + head(b"", path=b"/v1/models", method=b"GET"))
        got = await reader.readuntil(b'"list"')
        assert statuses(got) == [200]
        (connection,) = rig.extra["open"]
        await until(lambda: connection._idle_since_s)
    async with connected(rig) as (reader, writer):
        writer.write(head(b"content-length: %d\r\n" % len(BODY), key=False) + BODY[:5])
        assert b"401" in await reader.readuntil(b"\r\n\r\n")
        await until(lambda: len(rig.extra["open"]) == 1)
        (connection,) = rig.extra["open"]
        writer.write(BODY[5:])
        await until(lambda: not connection._in_body)
        assert connection._idle_since_s
        assert connection.timeout_keep_alive_task is not None
        assert connection._timer is None


# -- counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nx-a: " + b"a" * 40_000, counted(431, "header_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", counted(400, "invalid_http")),
        (head(CHUNKED) + b"zz\r\n", counted(400, "invalid_http", CHAT)),
        (head(CHUNKED, path=b"/tokenize") + b"zz\r\n", counted(400, "invalid_http", b"/tokenize")),
        (head(b"content-length: 10\r\n") + b"abc", counted(408, "request_timeout", CHAT)),
        (head(b"content-length: 10\r\n", path=b"/tokenize") + b"abc", counted(408, "request_timeout", b"/tokenize")),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", counted(405, "method_not_allowed")),
    ],
)  # fmt: skip
async def test_what_the_protocol_refuses_counts_as_a_request_and_an_error_and_not_as_a_client_that_left(
    rig, data, expected, monkeypatch
):
    monkeypatch.setattr(Limits, "body_idle_timeout_s", IDLE_S)
    counts = Counts()
    async with connected(rig) as (reader, writer):
        writer.write(data)
        (status,) = statuses(await everything(reader))
    assert any(str(status) in labels for labels in expected)
    await until(lambda: counts.grown == expected)


async def test_a_head_that_is_not_received_in_time_counts(rig, monkeypatch):
    monkeypatch.setattr(Limits, "header_timeout_s", 0.1)
    counts = Counts()
    async with connected(rig) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        assert statuses(await everything(reader)) == [408]
    assert counts.grown == counted(408, "request_timeout")


@pytest.mark.parametrize("path", [CHAT, b"/tokenize"])
async def test_a_client_that_leaves_inside_its_body_counts_as_499_and_as_one_that_left(rig, path):
    counts = Counts()
    async with connected(rig) as (_, writer):
        writer.write(head(b"content-length: 10\r\n", path=path) + b"abc")
        await until(lambda: any(each._in_body for each in rig.extra["open"]))
    expected = {("requests_total", *sorted((path.decode(), "499"))): 1, ("client_aborts_total",): 1}
    await until(lambda: counts.grown == expected)


async def test_a_length_of_5000_digits_is_what_it_says(rig):
    length = b"content-length: %b%d\r\n" % (b"0" * 5_000, len(BODY))
    async with connected(rig) as (reader, writer):
        writer.write(head(length) + BODY)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")


async def test_requests_before_a_body_in_one_piece_are_no_trailers_of_it(rig):
    get = head(b"", path=b"/v1/models", method=b"GET")
    num = 2 * Limits.header_bytes // len(get)
    async with connected(rig) as (reader, writer):
        for _ in range(2):  # the second time with a body before
            writer.write(get * num + head(b"content-length: %d\r\n" % len(BODY)))
            await asyncio.sleep(0.02)
            writer.write(BODY)
            got = b""
            while len(statuses(got)) <= num:
                got += await reader.read(65536)
            assert statuses(got) == [200] * (num + 1)


async def test_a_path_that_is_none_is_answered_on_a_connection_that_has_served(rig):
    async with connected(rig) as (reader, writer):
        writer.write(head(b"", path=b"/v1/models", method=b"GET"))
        assert b"200" in await reader.readuntil(b'"list"')
        writer.write(head(b"", path=b"http://[x/", method=b"GET"))
        assert statuses(await everything(reader)) == [400]


async def test_what_stands_behind_a_refused_request_in_its_piece_is_not_begun(rig):
    counts = Counts()
    async with connected(rig) as (reader, writer):
        trailers = TRAILERS * (2 * Limits.header_bytes // len(TRAILERS))
        refused = head(CHUNKED) + chunk(BODY) + b"0\r\n" + trailers + b"\r\n"
        writer.write(refused + head(b"", path=b"/v1/models", method=b"GET"))
        assert statuses(await everything(reader)) == [431]
    await asyncio.sleep(0.05)  # in which the other would have ended, and been counted
    await until(lambda: counts.grown == counted(431, "header_too_large", CHAT))
