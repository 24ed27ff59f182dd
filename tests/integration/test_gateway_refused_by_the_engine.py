"""A request that no engine can serve is answered at once, and nobody else's retry is spent on it."""

import json

import pytest

from shared.wire.placement import Placed
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import chat

SAYS = "The engine could not go on with this request."


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir) as found:
        yield found


def ends_with(reason, *, tokens=0):
    async def script(worker, identity, gen, prompt):
        for _ in range(tokens):
            worker.tokens(identity, gen, [40])
        worker.tokens(identity, gen, [], finish=reason)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_500_at_once_without_a_retry(rig, stream):
    for worker in rig.workers:
        worker.script = ends_with("error")
    left = rig.gateway.cluster.retry_budget.left
    reply = await rig.client.post("/v1/chat/completions", json=chat(stream=stream))
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == SAYS
    assert reply.json()["error"]["code"] == "cluster.error"
    assert "retry-after" not in reply.headers
    assert reply.headers["x-should-retry"] == "false"
    assert len(rig.scheduler.places) == 1
    assert rig.gateway.cluster.retry_budget.left == left


async def test_a_stream_that_the_engine_refuses_behind_its_first_token_ends_with_an_error(rig):
    for worker in rig.workers:
        worker.script = ends_with("error", tokens=1)
    reply = await rig.client.post("/v1/chat/completions", json=chat(stream=True, temperature=0))
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-2])["error"]["message"] == SAYS
    assert events[-1] == "[DONE]"
    assert len(rig.scheduler.places) == 1, "it would end so at any other"


TOOLS = [{"type": "function", "function": {"name": "f"}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": SCHEMA}, "response_format"),
        ({"response_format": SCHEMA, "tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"response_format": SCHEMA, "tools": TOOLS, "tool_choice": "auto"}, "response_format"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"json_object": False}}, None),
    ],
)  # fmt: skip
async def test_a_grammar_that_the_engine_refuses_is_told_with_the_field_that_asked_for_it(
    rig, fields, param, stream
):
    async def refuse(worker, identity, gen, prompt):
        worker.failed(identity, gen, "invalid_request", False)

    rig.a.script = refuse
    reply = await rig.client.post("/v1/chat/completions", json=chat(stream=stream, **fields))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_what_the_engine_let_go_is_placed_again(rig):
    rig.say("a")
    rig.a.script = ends_with("abort")
    tries = []

    def decide(place):
        tries.append(place)
        worker = rig.a if len(tries) == 1 else rig.b
        return Placed(
            request_id=place.request_id, attempt=place.attempt, kind="colocated", decode=worker.target
        )

    rig.scheduler.decide = decide
    reply = await rig.client.post("/v1/chat/completions", json=chat())
    assert reply.status_code == 200
    assert len(tries) == 2
