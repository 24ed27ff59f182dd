"""A gateway at its edges: lists beyond its limits, workers lost behind the last token, and clients that do not read."""

import asyncio
import contextlib
import json
import signal
import socket

import pytest

from shared.wire.requests import TokenLogprob
from tests.integration import gateway_app
from tests.integration.gateway_app import running
from tests.integration.gateway_process_rig import neighbours, process
from tests.integration.gateway_rig import MODEL, answer_tokens, chat, make_model_dir, until
from tests.integration.test_gateway_tool_calls import chat as tool_chat
from tests.integration.test_gateway_tool_calls import streamed, whole
from tests.unit.gateway_text_fixtures import make_model_dir as make_tool_model

N, LENGTH, TOP = 20, 400, 20
LARGE = chat(n=N, logprobs=True, top_logprobs=TOP, max_tokens=LENGTH)  # more than sockets hold


async def answer_much(worker, identity, gen, prompt):
    """A script: some 10 MB of log probabilities."""
    ids = (prompt * LENGTH)[:LENGTH]
    rows = [[TokenLogprob(token, -0.5 - each, each + 1) for each in range(TOP)] for token in ids]
    for index in range(gen.sampling.n):
        worker.tokens(identity, gen, ids, index=index, finish="stop", logprobs=rows)
    worker.finished(identity, gen, len(prompt))


class Lazy:
    """A client that reads only what it is told to."""

    def __init__(self, port):
        self.seen = bytearray()
        self._port = port

    async def __aenter__(self):
        self._loop, self._socket = asyncio.get_running_loop(), socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        self._socket.setblocking(False)
        await self._loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_):
        self._socket.close()

    async def ask(self):
        raw = json.dumps(LARGE).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
        await self._loop.sock_sendall(self._socket, head + raw)

    async def ask_for_pages(self, count):
        """In one go, without a key."""
        await self._loop.sock_sendall(self._socket, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * count)

    async def read(self, most=1 << 20):
        async with asyncio.timeout(60):
            piece = await self._loop.sock_recv(self._socket, most)
        self.seen += piece
        return piece

    async def answer(self):
        """The rest of the first answer."""
        while (body := self._body()) is None:
            assert await self.read(), "the connection ended within an answer"
        return json.loads(body)

    def _body(self):
        begin = self.seen.find(b"\r\n\r\n") + 4
        if begin < 4:
            return None
        head = bytes(self.seen[:begin]).lower()
        end = begin + int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return bytes(self.seen[begin:end]) if len(self.seen) >= end else None


@pytest.fixture
def servers(monkeypatch):
    """Those that the rig makes."""
    made, make = [], gateway_app.make_server
    monkeypatch.setattr(gateway_app, "make_server", lambda gateway: made.append(make(gateway)) or made[-1])
    return made


def unsent(server):
    return sum(each.transport.get_write_buffer_size() for each in server.server_state.connections)


def port_of(rig):
    return int(rig.base_url.rpartition(":")[2])


@pytest.mark.parametrize("setting", ["max_concurrent_requests", "max_concurrent_per_tenant"])
async def test_a_list_of_prompts_that_can_never_be_admitted_is_a_bad_request_that_names_the_limit(
    tmp_path, setting
):
    async with running(make_model_dir(tmp_path), **{setting: 2}) as rig:
        rig.say("jumps")
        for count, status in ((2, 200), (3, 400)):
            reply = await rig.client.post("/v1/completions", json={"model": MODEL, "prompt": ["fox"] * count})
            assert reply.status_code == status
        error = reply.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
        assert "at most 2" in error["message"]
        assert reply.headers["x-should-retry"] == "false"
        assert rig.gateway.admission.num_running == 0


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_whose_worker_dies_behind_the_last_finish_reason_is_complete(tmp_path, streams):
    """With a seed and two choices: one that cannot go on elsewhere, and needs not."""

    async def die(worker, identity, gen, prompt):
        for index in range(2):
            worker.tokens(identity, gen, prompt[:3], index=index, finish="stop")
        await asyncio.sleep(0.3)
        worker.die()

    async with running(make_model_dir(tmp_path)) as rig:
        rig.a.script, rig.b.script = die, answer_tokens(rig.ids("another answer"))
        more = {"stream_options": {"include_usage": True}} if streams else {}
        body = chat(stream=streams, seed=7, n=2, **more)
        reply = await rig.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200
        assert '"error"' not in reply.text
        assert reply.text.count('"finish_reason":"stop"') == 2
        assert '"completion_tokens":6' in reply.text
        assert reply.text.endswith("data: [DONE]\n\n") == streams
        assert rig.b.generated == [], "it was whole"


async def test_a_stream_with_an_open_choice_fails_when_its_worker_dies_though_the_other_choice_has_ended(
    tmp_path,
):
    async def die(worker, identity, gen, prompt):
        worker.tokens(identity, gen, prompt[:3], index=0, finish="stop")
        worker.tokens(identity, gen, prompt[:3], index=1)
        await asyncio.sleep(0.3)
        worker.die()

    async with running(make_model_dir(tmp_path)) as rig:
        rig.a.script = die
        reply = await rig.client.post("/v1/chat/completions", json=chat(stream=True, seed=7, n=2))
        assert '"code":"peer.gone"' in reply.text


async def test_a_tool_call_that_max_tokens_cut_is_a_call_so_far_whole_and_streamed(tmp_path):
    async with running(make_tool_model(tmp_path)) as rig:
        rig.say('Look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Kö', finish="length")
        call = {"name": "get_weather", "arguments": '{"city": "Kö'}
        assert await streamed(rig, tool_chat()) == ("Look. ", [call], "length")
        assert await whole(rig, tool_chat()) == ("Look. ", [call], "length")


@contextlib.asynccontextmanager
async def much_unread(tmp_path, servers, unread_timeout_ms):
    """A gateway, and a client that has asked for much and read nothing."""
    async with (
        running(make_model_dir(tmp_path), unread_timeout_ms=unread_timeout_ms) as rig,
        Lazy(port_of(rig)) as client,
    ):
        rig.a.script = answer_much
        await client.ask()
        await until(lambda: unsent(servers[0]) > 1 << 20)
        yield rig, client


async def test_a_client_that_does_not_read_its_whole_answer_is_cut_off(tmp_path, servers):
    async with much_unread(tmp_path, servers, 1_500) as (rig, client):
        assert rig.gateway.admission.num_running == 0, "the answer is complete"
        await until(lambda: unsent(servers[0]) == 0)
        with pytest.raises(AssertionError, match="within an answer"):
            await client.answer()


async def test_a_client_that_pipelines_and_reads_nothing_is_cut_off(tmp_path, servers):
    """The second answer waits for the reader of the first: it is begun, and never complete."""
    async with (
        running(make_model_dir(tmp_path), unread_timeout_ms=1_500) as rig,
        Lazy(port_of(rig)) as client,
    ):
        await client.ask_for_pages(400)
        await until(lambda: unsent(servers[0]) > 1 << 16)
        await until(lambda: unsent(servers[0]) == 0)


async def test_a_client_that_reads_slowly_gets_its_whole_answer(tmp_path, servers):
    async with much_unread(tmp_path, servers, 4_000) as (_, client):
        for _ in range(12):  # longer than the timeout
            for _ in range(4):
                assert await client.read(1 << 16)
            await asyncio.sleep(0.5)
        assert unsent(servers[0])
        assert (await client.answer())["usage"]["completion_tokens"] == N * LENGTH


async def test_a_client_that_asks_on_and_on_and_reads_nothing_is_not_read_from_either(tmp_path, servers):
    async with running(make_model_dir(tmp_path)) as rig, Lazy(port_of(rig)) as client:
        rig.a.script = answer_much
        await client.ask()
        await until(lambda: unsent(servers[0]) > 1 << 20)
        for _ in range(3):
            await client.ask()
            await asyncio.sleep(0.3)
        assert len(rig.a.generated) == 1
        await client.answer()
        async with asyncio.timeout(60):
            while len(rig.a.generated) < 4:
                await client.read()


async def ask_a_process(worker, scheduler, client):
    worker.script = answer_much
    await client.ask()
    await until(lambda: scheduler.ended)
    await client.read(1_000)  # it is rendered and written


async def test_sigterm_waits_until_a_client_has_read_its_whole_answer(model_dir):
    async with (
        neighbours() as (coordinator, scheduler, worker),
        process(model_dir, coordinator, scheduler, drain_deadline_ms=300_000) as (child, http),
        Lazy(http.base_url.port) as client,
    ):
        await ask_a_process(worker, scheduler, client)
        child.send_signal(signal.SIGTERM)
        await asyncio.sleep(4.0)
        assert child.returncode is None
        assert (await http.get("/ready")).json()["in_flight"] == 1
        assert (await client.answer())["usage"]["completion_tokens"] == N * LENGTH
        assert await asyncio.wait_for(child.wait(), 30) == 0


async def test_sigterm_waits_for_a_client_that_does_not_read_until_the_drain_deadline_only(model_dir):
    async with (
        neighbours() as (coordinator, scheduler, worker),
        process(model_dir, coordinator, scheduler, drain_deadline_ms=1_000) as (child, http),
        Lazy(http.base_url.port) as client,
    ):
        await ask_a_process(worker, scheduler, client)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 20) == 0


async def test_the_drain_deadline_is_no_error_for_a_stream_that_has_all_its_finish_reasons(model_dir):
    async def say_all_but_finished(worker, identity, gen, prompt):
        for index in range(2):
            worker.tokens(identity, gen, prompt[:3], index=index, finish="stop")

    async with (
        neighbours() as (coordinator, scheduler, worker),
        process(model_dir, coordinator, scheduler, drain_deadline_ms=300) as (child, http),
    ):
        worker.script = say_all_but_finished
        body = chat(stream=True, seed=7, n=2)
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            text = ""
            async for part in reply.aiter_text():
                if not text:
                    child.send_signal(signal.SIGTERM)
                text += part
        assert text.count('"finish_reason":"stop"') == 2
        assert '"error"' not in text
        assert text.endswith("data: [DONE]\n\n")
