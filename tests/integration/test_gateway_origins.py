"""A page of another origin asks its browser for an answer of the gateway, and may read it."""

import json

import pytest

from services.gateway.push import Limits
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import chat
from tests.integration.test_gateway_direct import post, read_answer
from tests.integration.test_gateway_refusals import connected, everything

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
KEY = {"authorization": "Bearer sk-a"}
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir, api_keys=["sk-a"]) as found:
        found.say(" the fox")
        yield found


def may_read(reply, origin: str = "*") -> bool:
    exposed = reply.headers.get("access-control-expose-headers", "")
    return reply.headers.get("access-control-allow-origin") == origin and "x-request-id" in exposed


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/health"])
async def test_a_preflight_needs_no_key(rig, path):
    reply = await rig.client.options(path, headers=ASKS)
    assert (reply.status_code, reply.content) == (204, b"")
    assert may_read(reply)
    assert reply.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert (await rig.client.options(path, headers=KEY | {"origin": PAGE})).status_code == 405, "no preflight"


async def test_a_page_may_read_every_answer_and_error(rig):
    page = {"origin": PAGE}
    for headers, body, status in (
        (KEY, chat(), 200), (KEY, chat(stream=True), 200), ({}, chat(), 401), (KEY, chat(n=0), 400),
        (KEY, chat(model="x"), 404), (KEY | {"content-encoding": "gzip"}, chat(), 400),
    ):  # fmt: skip
        reply = await rig.client.post(CHAT, json=body, headers=headers | page)
        assert reply.status_code == status
        assert may_read(reply)
        assert reply.headers["x-request-id"]
        assert len(reply.headers.get_list("access-control-allow-origin")) == 1
    for path, status in (("/v1/models", 200), ("/v1/nothing", 404), (CHAT, 405), ("/metrics", 200)):
        reply = await rig.client.get(path, headers=KEY | page)
        assert (reply.status_code, may_read(reply)) == (status, True)
    long = {"x-long": "a" * (Limits.header_bytes + 1)}
    reply = await rig.client.post(CHAT, json=chat(), headers=page | long)
    assert (reply.status_code, may_read(reply)) == (431, True)


async def test_a_page_may_read_the_error_of_a_worker_that_refuses(rig):
    async def refuse(worker, identity, gen, prompt):
        worker.failed(identity, gen, "invalid_request", False)

    rig.a.script = refuse
    for stream in (False, True):
        reply = await rig.client.post(CHAT, json=chat(stream=stream), headers=KEY | {"origin": PAGE})
        assert (reply.status_code, may_read(reply)) == (400, True)


async def test_a_page_may_read_that_its_body_came_too_slowly(rig, monkeypatch):
    monkeypatch.setattr(Limits, "body_idle_timeout_s", 0.1)
    head = post(b"", more=b"authorization: Bearer sk-a\r\norigin: https://a.b\r\n").replace(
        b"content-length: 0", b"content-length: 5"
    )
    async with connected(rig) as (reader, writer):
        writer.write(head)
        answer = await everything(reader)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"\r\naccess-control-allow-origin: *\r\n" in answer


async def test_who_is_no_page_of_others_is_told_nothing(rig):
    reply = await rig.client.post(CHAT, json=chat(), headers=KEY)
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert "vary" not in reply.headers


async def test_only_listed_origins_may_read_where_some_are_listed(model_dir):
    async with running(model_dir, api_keys=["sk-a"], allowed_origins=[PAGE]) as rig:
        rig.say(" the fox")
        for body in (chat(), chat(stream=True)):
            reply = await rig.client.post(CHAT, json=body, headers=KEY | {"origin": PAGE})
            assert may_read(reply, PAGE)
            assert reply.headers["vary"] == "origin"
            other = await rig.client.post(CHAT, json=body, headers=KEY | {"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers
            assert other.headers["vary"] == "origin"
        assert (await rig.client.get("/v1/models", headers=KEY)).headers["vary"] == "origin"
        assert may_read(await rig.client.options(CHAT, headers=ASKS), PAGE)
        reply = await rig.client.options(CHAT, headers=ASKS | {"origin": "https://evil.example"})
        assert reply.status_code == 401


@pytest.mark.parametrize("together", [True, False])
async def test_requests_of_one_connection_are_told_each_its_own(model_dir, together):
    async with running(model_dir, allowed_origins=[PAGE]) as rig, connected(rig) as (reader, writer):
        rig.say(" the fox")
        pages = [b"origin: %b\r\n" % PAGE.encode(), b"", b"origin: https://evil.example\r\n"]
        asked = [post(json.dumps(chat()).encode(), more=page) for page in pages]
        if together:
            writer.write(b"".join(asked))
        told = []
        for request in asked:
            if not together:
                writer.write(request)
            told.append(b"\r\naccess-control-allow-origin: " in await read_answer(reader))
        assert told == [True, False, False]
