"""The gateway as a process: start, end after a bug, several processes on one address, wrong settings; openai-python."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import openai
import pytest

from shared.observe.service import EXIT_BUG
from tests.integration.gateway_process_rig import (
    CHAT,
    answer_in_two,
    children_now,
    children_of,
    ids,
    neighbours,
    process,
    ready,
    streamed,
)
from tests.integration.gateway_rig import MODEL, answer_tokens, until

EIGHT = 'quire_gateway_requests_total{route="/v1/chat/completions",status="200"} 8.0'


def breaks_when(file: Path, drain_ms: int) -> str:
    """A gateway of which one process's slow tick raises once this file is there, and takes it away."""
    return f"""
import os, sys
from services.gateway import __main__ as main, server
from services.gateway.cluster import Cluster
def count_retries(_):
    try:
        os.unlink({str(file)!r})
    except FileNotFoundError:
        return
    raise KeyError("our bug")
Cluster._count_retries = count_retries
server.BROKEN_DRAIN_MS = {drain_ms}
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("finishes", "drain_ms"), [(True, 60_000), (False, 200)])
async def test_a_bug_in_the_background_ends_a_gateway_that_would_answer_from_what_it_knew_then(
    model_dir, tmp_path, finishes, drain_ms
):
    async with neighbours() as (coordinator, scheduler, worker):
        first, *rest = ids(model_dir, " the quick brown fox jumps")
        may_end, broken = asyncio.Event(), tmp_path / "broken"

        worker.script = answer_in_two(first, rest, may_end)
        code = breaks_when(broken, drain_ms)
        flags = {"drain_deadline_ms": 60_000}
        async with process(model_dir, coordinator, scheduler, code=code, **flags) as (child, client):

            async def break_it():
                broken.touch()
                await until(lambda: not broken.exists())
                if finishes:
                    may_end.set()

            text = await streamed(client, break_it)
            assert ('"code":"draining"' in text) is not finishes
            assert text.endswith("data: [DONE]\n\n")
            assert await asyncio.wait_for(child.wait(), 60) == EXIT_BUG
            assert b"our bug" in await child.stderr.read()


async def test_one_of_two_processes_that_a_bug_ends_leaves_the_address_to_the_other_and_comes_back(
    model_dir, tmp_path
):
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the"))
        broken = tmp_path / "broken"
        code = breaks_when(broken, 200)
        async with process(model_dir, coordinator, scheduler, code=code, processes=2) as (child, client):
            before = await children_of(child.pid, 2)
            broken.touch()
            await until(lambda: len({*children_now(child.pid)} & {*before}) == 1)
            await until(lambda: len(children_now(child.pid)) == 2)
            await ready(client, child)
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_two_processes_share_the_address_and_a_killed_one_comes_back(model_dir):
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the"))
        async with process(model_dir, coordinator, scheduler, processes=2) as (child, client):
            children = await children_of(child.pid, 2)
            for _ in range(8):
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            # an outcome is counted behind the last byte of its answer
            await _counted(client)
            os.kill(children[0], signal.SIGKILL)
            await children_of(child.pid, 2, without=children[0])
            await ready(client, child)
            assert EIGHT in (await client.get("/metrics")).text
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 30) == 0


async def test_requests_of_a_killed_process_are_not_in_flight_for_good(model_dir):
    async with neighbours() as (coordinator, scheduler, worker):
        first, *_ = ids(model_dir, " the quick")

        async def script(worker, identity, gen, prompt):
            worker.tokens(identity, gen, [first])  # and no more

        worker.script = script
        async with process(model_dir, coordinator, scheduler, processes=2) as (child, client):
            children = await children_of(child.pid, 2)
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            [busy] = await _gauge_until(client, "quire_gateway_requests_in_flight", [1.0])
            os.kill(children[busy], signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                await asking
            await _gauge_until(client, "quire_gateway_requests_in_flight", [])
            await children_of(child.pid, 2, without=children[busy])
            budgets = _gauge((await client.get("/metrics")).text, "quire_gateway_retry_budget")
            assert {*budgets} <= {0, 1}


def _gauge(text: str, name: str) -> dict[int, float]:
    """Its values that are not 0, by the process's number."""
    found = re.findall(rf'^{name}{{pid="(\d+)"}} (\S+)$', text, re.MULTILINE)
    return {int(number): float(value) for number, value in found if float(value)}


async def _gauge_until(client, name: str, values: list[float]) -> list[int]:
    """Until the processes' values are these; of whom they are."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                found = _gauge((await client.get("/metrics")).text, name)
                if [*found.values()] == values:
                    return [*found]
            await asyncio.sleep(0.05)


async def _counted(client):
    for _ in range(600):
        if EIGHT in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.05)
    pytest.fail("eight requests were answered and fewer are counted")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--listne", "127.0.0.1:0"], "did you mean 'listen'"),
        (["--listen", "8000"], "gateway.listen"),
        (["--model-dir", "/nowhere"], "gateway.model_dir"),
    ],
)
async def test_wrong_settings_exit_2_and_name_the_setting(argv, says):
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", *argv, stderr=asyncio.subprocess.PIPE
    )
    _, said = await child.communicate()
    assert child.returncode == 2
    assert says in said.decode()


async def test_openai_python_sync_async_and_streaming(model_dir):
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the quick fox"))
        async with process(model_dir, coordinator, scheduler, api_keys="k1") as (_child, client):
            base = f"{client.base_url}/v1".replace("//v1", "/v1")
            messages = CHAT["messages"]
            async with openai.AsyncOpenAI(base_url=base, api_key="k1", max_retries=0) as api:
                whole = await api.chat.completions.create(model=MODEL, messages=messages)
                assert whole.choices[0].message.content == " the quick fox"
                text = ""
                stream = await api.chat.completions.create(
                    model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                assert text == " the quick fox"
                assert chunk.usage.completion_tokens == whole.usage.completion_tokens
                legacy = await api.completions.create(model=MODEL, prompt="the", max_tokens=50, echo=True)
                assert legacy.choices[0].text == "the the quick fox"
                assert [model.id async for model in api.models.list()] == [MODEL]
                with pytest.raises(openai.NotFoundError) as caught:
                    await api.chat.completions.create(model="other", messages=messages)
                assert caught.value.code == "model_not_found"
                with pytest.raises(openai.BadRequestError):
                    await api.chat.completions.create(model=MODEL, messages=messages, n=1000)
            async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as api:
                with pytest.raises(openai.AuthenticationError):
                    await api.models.list()

            def sync():
                with openai.OpenAI(base_url=base, api_key="k1", max_retries=0) as api:
                    chunks = api.chat.completions.create(model=MODEL, messages=messages, stream=True)
                    return "".join(c.choices[0].delta.content or "" for c in chunks)

            assert await asyncio.to_thread(sync) == " the quick fox"


async def test_tool_calls_whole_and_streamed(model_dir):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, call))
        template = model_dir / "chat_template.jinja"
        template.write_text("{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}")
        try:
            async with process(model_dir, coordinator, scheduler) as (_child, client):
                base = f"{client.base_url}/v1".replace("//v1", "/v1")
                async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as api:
                    body = {"model": MODEL, "messages": CHAT["messages"], "tools": tools}
                    whole = await api.chat.completions.create(**body)
                    (choice,) = whole.choices
                    assert choice.finish_reason == "tool_calls"
                    assert choice.message.content is None
                    assert choice.message.tool_calls[0].function.name == "add"
                    name = arguments = ""
                    async for chunk in await api.chat.completions.create(**body, stream=True):
                        for part in chunk.choices[0].delta.tool_calls or ():
                            name += part.function.name or ""
                            arguments += part.function.arguments or ""
                        reason = chunk.choices[0].finish_reason
                    assert (name, reason) == ("add", "tool_calls")
                    assert arguments == choice.message.tool_calls[0].function.arguments
        finally:
            template.unlink()


async def test_one_trace_spans_the_request_and_ends_up_in_the_local_store(model_dir, tmp_path):
    async with neighbours() as (coordinator, scheduler, worker):
        worker.script = answer_tokens(ids(model_dir, " the fox"))
        async with process(model_dir, coordinator, scheduler, trace_dir=tmp_path) as (child, client):
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            reply = await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": parent})
            request_id = reply.headers["x-request-id"]
            await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": "x" * 5000})
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 30) == 0
    records = [
        json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    spans = {r["name"]: r for r in records if r["trace_id"] == "ab" * 16}
    assert set(spans) == {"gateway.receive", "tokenize", "schedule"}
    assert spans["gateway.receive"]["parent_id"] == "cd" * 8
    assert {s["attributes"]["quire.request_id"] for s in spans.values()} == {request_id}
    assert all(spans[n]["parent_id"] == spans["gateway.receive"]["span_id"] for n in ("tokenize", "schedule"))
    assert [e["name"] for e in spans["gateway.receive"]["events"]] == ["decode.first_token"]
    assert worker.generated[0].traceparent.split("-")[1] == "ab" * 16
    assert len(worker.generated[1].traceparent) == 55
