"""Everything that can be wrong with a request or a neighbour, and the body that says so."""

import asyncio
import json
import time

import pytest

from services.gateway.whole import WholeAnswer
from shared.wire.placement import Rejected
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import MODEL, USER, answer_tokens, chat, colocate, disaggregate, until
from tests.support.quickest import quickest_s

CHAT = "/v1/chat/completions"


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir) as found:
        yield found


def check(reply, status: int) -> dict:
    """The reply is an OpenAI error of that status; returns its inside."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/json")
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


def called(call: dict) -> dict:
    """A chat in which the assistant has made this call."""
    return chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}])


BAD_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}]
DEEP = b'{"model":"m","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (chat(model="nope"), 404, "model_not_found"),
        (chat(messages=[{"role": "user", "content": "fox " * 2000}]), 400, "context_length_exceeded"),
        (chat(max_tokens=100_000), 400, "context_length_exceeded"),
        (b'{"model": ', 400, None),
        (b"\xff\xfe{}", 400, None),
        (b'{"model":"\xff","messages":[]}', 400, None),
        (b"[]", 400, None),
        (b'"text"', 400, None),
        (b"", 400, None),
        (DEEP, 400, None),
        (b'{"model":"rig-model","messages":[{"role":"user","content":"a"}],"temperature":NaN}', 400, None),
        (chat(n=1000), 400, None),
        (chat(n=0), 400, None),
        (chat(n="many"), 400, None),
        (chat(temperature="hot"), 400, None),
        (chat(temperature=-1), 400, None),
        (chat(top_p=2), 400, None),
        (chat(max_tokens=-5), 400, None),
        (chat(messages="hi"), 400, None),
        (chat(messages=[]), 400, None),
        (chat(messages=[{"role": "user", "content": 5}]), 400, None),
        (chat(stop=5), 400, None),
        (chat(logit_bias={"a": 1}), 400, None),
        (chat(response_format={"type": "json_schema"}), 400, None),
        (chat(tools="hammer"), 400, None),
        (called({"id": "c", "type": "function"}), 400, None),
        (called({"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}), 400, None),
        (chat(logit_bias={"9" * 5_000: 1}), 400, None),
        (chat(tools=BAD_TOOLS, tool_choice="required"), 400, None),
        ({"messages": USER}, 400, None),
        ({"model": MODEL}, 400, None),
    ],
)
async def test_a_bad_chat_request_is_refused_without_reaching_a_worker(rig, body, status, code):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await rig.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    error = check(reply, status)
    if code:
        assert error["code"] == code
    assert rig.a.generated == []
    assert rig.gateway.admission.num_running == 0


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {"a": 1}, [[]], [1, "a"], [-1], [10**9], "fox " * 2000], ids=str
)
async def test_a_bad_prompt_is_refused(rig, prompt):
    reply = await rig.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    check(reply, 400)
    assert rig.a.generated == []


async def test_the_field_at_fault_is_named(rig):
    assert check(await rig.client.post(CHAT, json=chat(temperature="hot")), 400)["param"] == "temperature"
    assert check(await rig.client.post(CHAT, json=chat(model="x")), 404)["param"] == "model"
    missing = check(await rig.client.post("/tokenize", json=called({"type": "function"})), 400)
    assert missing["param"] == "messages[1].tool_calls[0].function"
    for url, param, body in (
        (CHAT, "messages", chat(messages=[{"role": "user", "content": "fox " * 20_000}])),
        ("/v1/completions", "prompt", {"model": MODEL, "prompt": "fox " * 20_000}),
    ):
        assert check(await rig.client.post(url, json=body), 400)["param"] == param


async def test_a_17_mb_body_is_413_announced_or_not(rig):
    big = b'{"model":"rig-model","messages":[{"role":"user","content":"' + b"x" * (17 << 20) + b'"}]}'

    async def pieces():
        for start in range(0, len(big), 1 << 18):
            yield big[start : start + (1 << 18)]

    headers = {"content-type": "application/json"}
    assert check(await rig.client.post(CHAT, content=big, headers=headers), 413)["code"] == "body_too_large"
    check(await rig.client.post(CHAT, content=pieces(), headers=headers), 413)
    rig.say("a")
    assert (await rig.client.post(CHAT, json=chat())).status_code == 200


async def test_unknown_routes_methods_and_content_types(rig):
    assert check(await rig.client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert check(await rig.client.get(CHAT), 405)["code"] == "method_not_allowed"
    check(await rig.client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 400)
    check(await rig.client.post(CHAT, content=b"{}", headers={"content-encoding": "gzip"}), 400)
    check(await rig.client.get("/v1/models", headers={"x-long": "a" * 20_000}), 431)


async def test_a_slash_at_the_end_sends_nobody_to_the_host_that_the_request_named(rig):
    for method, path in (("POST", CHAT + "/"), ("POST", "/v1/completions/"), ("GET", "/health/")):
        reply = await rig.client.request(method, path, json=chat(), headers={"host": "elsewhere.example"})
        assert check(reply, 404)["code"] == "unknown_url"
        assert "location" not in reply.headers
    listed = await rig.client.get("/v1/models/")
    assert listed.json() == (await rig.client.get("/v1/models")).json()


async def test_keys_guard_everything_but_health(model_dir):
    async with running(model_dir, api_keys=["secret", "other:acme"]) as rig:
        rig.say("a")
        for path in (CHAT, "/v1/completions", "/tokenize"):
            check(await rig.client.post(path, json=chat()), 401)
        check(await rig.client.get("/v1/models"), 401)
        reply = await rig.client.post(CHAT, json=chat(), headers={"authorization": "Bearer wrong"})
        assert check(reply, 401)["code"] == "invalid_api_key"
        assert (await rig.client.get("/health")).status_code == 200
        headers = {"authorization": "Bearer other"}
        assert (await rig.client.post(CHAT, json=chat(), headers=headers)).status_code == 200
        assert rig.a.generated[0].tenant_salt == "acme"


async def test_too_many_requests_are_shed_with_retry_after(model_dir):
    async with running(model_dir, max_concurrent_requests=1) as rig:
        rig.say(" the fox" * 20, gap_s=0.05)
        first = asyncio.create_task(rig.client.post(CHAT, json=chat()))
        await until(lambda: rig.gateway.admission.num_running == 1)
        reply = await rig.client.post(CHAT, json=chat())
        check(reply, 503)
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["x-should-retry"] == "true"
        first.cancel()


@pytest.mark.parametrize(
    ("setting", "status"), [("max_concurrent_requests", 503), ("max_concurrent_per_tenant", 429)]
)
async def test_tokenizing_takes_a_place_as_an_answer_does_and_gives_it_back(model_dir, setting, status):
    bodies = {"/tokenize": {"prompt": "the fox"}, "/detokenize": {"tokens": [5]}}
    async with running(model_dir, **{setting: 1}) as rig:
        rig.say(" the fox" * 20, gap_s=0.05)
        first = asyncio.create_task(rig.client.post(CHAT, json=chat()))
        await until(lambda: rig.gateway.admission.num_running == 1)
        for path in ("/tokenize", "/detokenize"):
            reply = await rig.client.post(path, json={"model": MODEL, **bodies[path]})
            check(reply, status)
            assert reply.headers["x-should-retry"] == "true"
        first.cancel()
        await until(lambda: rig.gateway.admission.num_running == 0)
        for path in ("/tokenize", "/detokenize"):
            for _ in range(3):
                reply = await rig.client.post(path, json={"model": MODEL, **bodies[path]})
                assert reply.status_code == 200
        too_long = await rig.client.post("/detokenize", json={"tokens": [5] * ((1 << 20) + 1)})
        assert too_long.status_code == 400
        assert rig.gateway.admission.num_running == 0


async def test_no_instance_is_503_with_retry_after(model_dir):
    async with running(model_dir, shed_wait_ms=100) as rig:
        rig.scheduler.decide = lambda place: Rejected(
            request_id=place.request_id, attempt=place.attempt, code="overloaded", reason="all full",
            retry_after_ms=2_500,
        )  # fmt: skip
        reply = await rig.client.post(CHAT, json=chat())
        check(reply, 503)
        assert reply.headers["retry-after"] == "3"


async def test_a_worker_that_refuses_for_good_answers_with_its_code(rig):
    async def refuse(worker, identity, gen, prompt):
        worker.failed(identity, gen, "invalid_request", False)

    rig.a.script = refuse
    assert check(await rig.client.post(CHAT, json=chat()), 400)["message"] == "scripted"
    assert check(await rig.client.post(CHAT, json=chat(stream=True)), 400)["code"] == "invalid_request"


async def test_a_worker_that_dies_before_the_first_byte_is_not_noticed_by_the_client(rig):
    async def die(worker, identity, gen, prompt):
        worker.die()

    rig.say(" the fox")
    rig.a.script = die
    reply = await rig.client.post(CHAT, json=chat(stream=True))
    assert reply.status_code == 200
    assert "[DONE]" in reply.text
    assert "error" not in reply.text
    assert rig.b.generated[0].attempt == 2


async def test_a_whole_answer_is_retried_even_after_tokens(rig):
    ids = rig.ids(" the quick fox")

    async def die_late(worker, identity, gen, prompt):
        worker.tokens(identity, gen, ids[:1])
        await asyncio.sleep(0.02)
        worker.die()

    rig.say(" the quick fox")
    rig.a.script = die_late
    body = (await rig.client.post(CHAT, json=chat())).json()
    assert body["choices"][0]["message"]["content"] == " the quick fox"
    assert body["usage"]["completion_tokens"] == len(ids)


async def test_a_worker_that_dies_mid_stream_ends_it_with_one_error_and_done(rig):
    ids = rig.ids(" the quick fox")

    async def die_late(worker, identity, gen, prompt):
        worker.tokens(identity, gen, ids[:1])
        await asyncio.sleep(0.05)
        worker.die()

    rig.a.script = die_late
    began = time.monotonic()
    reply = await rig.client.post(
        CHAT, json=chat(stream=True, seed=1)
    )  # whose draws nobody else can go on with
    assert time.monotonic() - began < 25, "not by the request's own deadline"
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    errors = [json.loads(e)["error"] for e in events[:-1] if "error" in json.loads(e)]
    assert len(errors) == 1
    assert set(errors[0]) == {"message", "type", "param", "code"}
    assert errors[0]["code"] == "peer.gone"


@pytest.mark.parametrize("stage", ["colocated", "decode", "handoff"])
async def test_a_stream_whose_worker_dies_goes_on_elsewhere_behind_what_the_client_has(rig, stage):
    """Also between the two stages: the client has the first token, and decode has said nothing."""
    text = " the quick brown fox jumps"
    ids = rig.ids(text)
    rig.say(text)
    has = 2 if stage != "handoff" else 1

    async def hand_over(worker, identity, gen, prompt):
        worker.prefilled(identity, gen, ids[0], prompt_tokens=len(prompt), mode="continue")

    async def die_late(worker, identity, gen, prompt):
        for each in ids[gen.num_output_tokens : has]:
            worker.tokens(identity, gen, [each])
        await asyncio.sleep(0.05)
        worker.die()

    if stage == "colocated":
        rig.a.script = die_late
    else:
        both, alone = disaggregate(rig.a, rig.b), colocate(rig.a)
        rig.scheduler.decide = lambda place: both(place) if place.attempt == 1 else alone(place)
        again = rig.a.script
        rig.a.script = lambda worker, identity, gen, prompt: (hand_over if gen.stage == "prefill" else again)(
            worker, identity, gen, prompt
        )
        rig.b.script = die_late
    usage = {"include_usage": True}
    reply = await rig.client.post(CHAT, json=chat(stream=True, stream_options=usage, quire_receipt=True))
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-2]]
    shown = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert shown == text
    assert events[-1]["usage"]["completion_tokens"] == len(ids)
    assert events[-1]["quire_receipt"]["attempts"] == 2
    last = (rig.b if stage == "colocated" else rig.a).generated[-1]
    assert (last.attempt, last.num_output_tokens, last.sampling.max_tokens > len(ids)) == (2, has, True)
    prompts = (rig.b if stage == "colocated" else rig.a).prompts
    first = rig.a.prompts[0]
    assert prompts[-1] == first + ids[:has]
    assert events[-1]["usage"]["prompt_tokens"] == len(first)


async def test_an_answer_whose_last_token_has_come_is_whole_though_its_worker_dies(rig):
    ids = rig.ids(" the quick fox")

    async def all_but_finished(worker, identity, gen, prompt):
        for each in ids:
            worker.tokens(identity, gen, [each], finish="length" if each == ids[-1] else None)
        await asyncio.sleep(0.05)
        worker.die()

    rig.a.script = all_but_finished
    body = (await rig.client.post(CHAT, json=chat())).json()
    assert body["choices"][0]["message"]["content"] == " the quick fox"
    assert body["choices"][0]["finish_reason"] == "length"
    assert not rig.b.generated


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_aborts_the_work_within_a_second(rig, streams):
    rig.say(" the quick brown fox" * 30, gap_s=0.02)

    async def attempt():
        before = len(rig.a.generated)
        rig.a.abort_seen.clear()
        task = asyncio.create_task(rig.client.post(CHAT, json=chat(stream=streams)))
        await until(lambda: len(rig.a.generated) == before + 1)
        await asyncio.sleep(0.1)
        task.cancel()
        left_s = time.monotonic()
        await asyncio.wait_for(rig.a.abort_seen.wait(), 30)
        took_s = time.monotonic() - left_s
        await until(lambda: rig.gateway.cluster.num_calls == 0 and len(rig.scheduler.ended) == before + 1)
        assert rig.gateway.admission.num_running == 0
        return took_s

    assert await quickest_s(attempt, 1) < 1


async def test_one_failing_prompt_of_a_list_ends_the_others(rig):
    good = answer_tokens(rig.ids(" the fox" * 30), gap_s=0.01)

    async def script(worker, identity, gen, prompt):
        if gen.request_id.endswith("-1"):
            worker.failed(identity, gen, "invalid_request", False)
        else:
            await good(worker, identity, gen, prompt)

    rig.a.script = script
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 100}
    check(await rig.client.post("/v1/completions", json=body), 400)
    await until(lambda: len(rig.a.aborted) == 2)
    assert rig.gateway.admission.num_running == 0


async def test_the_scheduler_going_away_does_not_touch_running_streams(rig):
    rig.scheduler.decide = colocate(rig.a)
    rig.say(" the quick brown fox", gap_s=0.03)
    task = asyncio.create_task(rig.client.post(CHAT, json=chat(stream=True)))
    await until(lambda: len(rig.a.generated) == 1)
    await rig.scheduler.stop()
    reply = await task
    assert "[DONE]" in reply.text
    assert "error" not in reply.text
    assert (await rig.client.get("/ready")).status_code == 503


async def test_nonsense_from_a_worker_is_one_error_and_no_crash(rig):
    async def wrong_choice(worker, identity, gen, prompt):
        worker.tokens(identity, gen, [5], index=7)

    async def wrong_token(worker, identity, gen, prompt):
        worker.tokens(identity, gen, [5, -1, 1 << 40], finish="stop")
        worker.finished(identity, gen, 1)

    async def no_reason(worker, identity, gen, prompt):
        worker.tokens(identity, gen, [5])
        worker.finished(identity, gen, 1)

    rig.a.script = wrong_choice
    check(await rig.client.post(CHAT, json=chat()), 500)
    rig.a.script = no_reason
    check(await rig.client.post(CHAT, json=chat()), 502)
    rig.a.script = wrong_token
    reply = await rig.client.post(CHAT, json=chat(stream=True))
    assert reply.status_code == 500 or reply.text.endswith("[DONE]\n\n")
    rig.say(" the fox")
    assert (await rig.client.post(CHAT, json=chat())).status_code == 200
    assert rig.gateway.admission.num_running == 0


async def test_a_whole_answer_that_cannot_be_rendered_is_an_error_and_gives_its_place_back(rig, monkeypatch):
    monkeypatch.setattr(WholeAnswer, "render_choice", lambda self, choice, echo: "\ud83d")
    rig.say(" the fox")
    assert check(await rig.client.post(CHAT, json=chat(), timeout=10), 500)["code"] == "cluster.error"
    assert rig.gateway.cluster.num_calls == 0
    assert rig.gateway.admission.num_running == 0
