"""OpenAI's HTTP API as clients see it, over a real socket, with scripted workers."""

import asyncio
import gc
import json

import httpx
import pytest

from services.gateway.push import Limits
from tests.integration.gateway_app import Rig, running
from tests.integration.gateway_rig import MAX_MODEL_LEN, MODEL, chat, disaggregate, until


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir) as found:
        yield found


async def stream(rig: Rig, path: str, body: dict) -> list:
    """Parsed events of a stream, "[DONE]" included."""
    events = []
    async with rig.client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    return events


def text_of(events: list, index: int = 0) -> str:
    out = ""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            if choice["index"] == index:
                out += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return out


async def test_a_chat_answer_has_text_usage_and_finish_reason(rig):
    rig.say(" jumps over the dog")
    reply = await rig.client.post("/v1/chat/completions", json=chat())
    assert reply.status_code == 200
    body = reply.json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == " jumps over the dog"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    num_prompt, num_output = len(rig.a.prompts[0]), len(rig.ids(" jumps over the dog"))
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["completion_tokens"] == num_output
    assert body["usage"]["total_tokens"] == num_prompt + num_output
    assert body["system_fingerprint"].startswith("fp_")
    assert body["id"].startswith("chatcmpl-")
    assert reply.headers["x-request-id"] == body["id"] == rig.a.generated[0].request_id


async def test_max_tokens_defaults_to_what_the_context_has_left(rig):
    rig.say("a")
    await rig.client.post("/v1/chat/completions", json=chat())
    assert rig.a.generated[0].sampling.max_tokens == MAX_MODEL_LEN - len(rig.a.prompts[0])


async def test_a_stream_is_role_then_a_token_an_event_then_finish_usage_done(rig):
    rig.say(" jumps over")
    events = await stream(rig, "/v1/chat/completions", chat(stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(events[:-1]) == " jumps over"
    contents = events[1:-3]
    assert len(contents) == len(rig.ids(" jumps over"))
    assert all(e["usage"] is None for e in events[:-2])
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert events[-3]["choices"][0]["delta"] == {}
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len(rig.ids(" jumps over"))
    assert len({e["id"] for e in events[:-1]}) == 1


async def test_streaming_and_whole_answers_agree_over_both_stages(rig):
    rig.scheduler.decide = disaggregate(rig.a, rig.b)
    rig.say(" jumps over the lazy dog")
    whole = (await rig.client.post("/v1/chat/completions", json=chat(seed=1))).json()
    events = await stream(rig, "/v1/chat/completions", chat(seed=1, stream_options={"include_usage": True}))
    assert text_of(events[:-1]) == whole["choices"][0]["message"]["content"] == " jumps over the lazy dog"
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert [g.stage for g in rig.a.generated] == ["prefill"] * 2
    assert all(g.handoff is not None for g in rig.b.generated)


async def test_first_token_that_ends_the_request_is_the_whole_answer(rig):
    rig.scheduler.decide = disaggregate(rig.a, rig.b)
    token = rig.ids(" the")[0]

    async def first_is_all(worker, identity, gen, prompt):
        worker.prefilled(identity, gen, token, prompt_tokens=len(prompt), end="length")

    rig.a.script = first_is_all
    body = (await rig.client.post("/v1/chat/completions", json=chat(max_tokens=1))).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1
    assert rig.b.generated == []
    events = await stream(rig, "/v1/chat/completions", chat(max_tokens=1))
    assert text_of(events[:-1]) == body["choices"][0]["message"]["content"]


async def test_n_choices_have_their_own_indices(rig):
    rig.say(" the fox")
    body = (await rig.client.post("/v1/chat/completions", json=chat(n=3, temperature=1.0))).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 3 * len(rig.ids(" the fox"))
    events = await stream(rig, "/v1/chat/completions", chat(n=3))
    assert [text_of(events[:-1], i) for i in range(3)] == [" the fox"] * 3


async def test_sampling_requests_get_a_seed_and_keep_their_own(rig):
    rig.say("a")
    await rig.client.post("/v1/chat/completions", json=chat(temperature=0.7))
    await rig.client.post("/v1/chat/completions", json=chat(temperature=0.7, seed=5))
    assert rig.a.generated[0].sampling.seed is not None
    assert rig.a.generated[1].sampling.seed == 5


async def test_a_stop_string_across_tokens_ends_the_answer_and_the_work(rig):
    rig.say(" the quick brown fox jumps over the lazy dog" * 3, gap_s=0.01)
    body = (await rig.client.post("/v1/chat/completions", json=chat(stop=["n fox j"]))).json()
    assert body["choices"][0]["message"]["content"] == " the quick brow"
    assert body["choices"][0]["finish_reason"] == "stop"
    await asyncio.wait_for(rig.a.abort_seen.wait(), 30)
    events = await stream(rig, "/v1/chat/completions", chat(stop="n fox j"))
    assert text_of(events[:-1]) == " the quick brow"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_completions_take_strings_lists_and_token_ids(rig):
    rig.say(" jumps")
    ids = rig.ids("the fox")
    for prompt, num in (("the fox", 1), (["the", "fox"], 2), (ids, 1), ([ids, ids], 2)):
        body = {"model": MODEL, "prompt": prompt, "n": 2, "max_tokens": 50}
        reply = (await rig.client.post("/v1/completions", json=body)).json()
        assert [c["index"] for c in reply["choices"]] == list(range(2 * num))
        assert {c["text"] for c in reply["choices"]} == {" jumps"}
        assert reply["object"] == "text_completion"
        events = await stream(rig, "/v1/completions", body)
        assert [text_of(events[:-1], i) for i in range(2 * num)] == [" jumps"] * (2 * num)
        assert events[-1] == "[DONE]"
    assert rig.a.prompts[-1] == ids


async def test_echo_puts_the_prompt_first(rig):
    rig.say(" jumps")
    body = {"model": MODEL, "prompt": "the fox", "echo": True, "max_tokens": 50}
    reply = (await rig.client.post("/v1/completions", json=body)).json()
    assert reply["choices"][0]["text"] == "the fox jumps"
    assert text_of((await stream(rig, "/v1/completions", body))[:-1]) == "the fox jumps"


@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
@pytest.mark.parametrize("n", [1, 2])
async def test_echoed_log_probabilities_begin_with_the_prompt_streamed_as_whole(rig, kind, n):
    if kind == "disaggregated":
        rig.scheduler.decide = disaggregate(rig.a, rig.b)
    rig.say(" jumps")
    prompt = "the quick brown fox jumps over the lazy dog, and again: the lazy dog"
    body = {"model": MODEL, "prompt": prompt, "echo": True, "max_tokens": 50, "logprobs": 1, "n": n}
    whole = (await rig.client.post("/v1/completions", json=body)).json()
    events = await stream(rig, "/v1/completions", body)
    ids = rig.ids(prompt)
    assert len(ids) > 16, "longer than the detokenizer's primer"
    for choice in whole["choices"]:
        found = choice["logprobs"]
        assert choice["text"] == "".join(found["tokens"]) == prompt + " jumps"
        assert found["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1) + [-0.5] * len(rig.ids(" jumps"))
        assert found["top_logprobs"][0] is None
        assert found["text_offset"] == [
            len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))
        ]
        streamed = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert streamed[0]["text"] == prompt
        assert len(streamed[0]["logprobs"]["tokens"]) == len(ids)
        for key, values in found.items():
            assert [v for c in streamed if c["logprobs"] for v in c["logprobs"][key]] == values


@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True, "add_generation_prompt": False}])
async def test_tokenize_of_a_chat_counts_what_the_chat_is(rig, fields):
    rig.say("a")
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "The"}]
    body = {"model": MODEL, "messages": messages, **fields}
    assert (await rig.client.post("/v1/chat/completions", json=body)).status_code == 200
    found = (await rig.client.post("/tokenize", json=body)).json()
    assert found["tokens"] == rig.a.prompts[-1]


@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_echo_without_tokens_answers_with_the_prompt_alone(rig, kind, logprobs):
    if kind == "disaggregated":
        rig.scheduler.decide = disaggregate(rig.a, rig.b)
    rig.say(" jumps")
    body = {
        "model": MODEL,
        "prompt": ["the fox", "the dog"],
        "echo": True,
        "max_tokens": 0,
        "logprobs": logprobs,
    }
    whole = (await rig.client.post("/v1/completions", json=body)).json()
    events = await stream(rig, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert [choice["text"] for choice in whole["choices"]] == ["the fox", "the dog"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 0
    assert [text_of(events[:-1], index) for index in (0, 1)] == ["the fox", "the dog"]
    assert events[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        streamed = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert streamed == [choice["logprobs"], None]


async def test_logprobs_come_with_their_tokens(rig):
    rig.say(" the fox")
    body = chat(logprobs=True, top_logprobs=2)
    reply = (await rig.client.post("/v1/chat/completions", json=body)).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == len(rig.ids(" the fox"))
    assert "".join(entry["token"] for entry in content) == " the fox"
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content)
    events = await stream(rig, "/v1/chat/completions", body)
    streamed = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {}).get("content", [])
    ]
    assert streamed == content
    body = {"model": MODEL, "prompt": "a", "logprobs": 2, "max_tokens": 9}
    reply = (await rig.client.post("/v1/completions", json=body)).json()
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * len(rig.ids(" the fox"))


async def test_receipts_are_opt_in_and_say_why(rig):
    rig.scheduler.decide = disaggregate(rig.a, rig.b)
    rig.say(" the fox")
    plain = (await rig.client.post("/v1/chat/completions", json=chat())).json()
    assert "quire_receipt" not in plain
    reply = await rig.client.post("/v1/chat/completions", json=chat(), headers={"x-quire-receipt": "1"})
    receipt = reply.json()["quire_receipt"]
    assert receipt["placement"] == "disaggregated"
    assert receipt["policy"] == "prompt_tree"
    assert [stage["stage"] for stage in receipt["stages"]] == ["prefill", "decode"]
    events = await stream(rig, "/v1/chat/completions", chat(quire_receipt=True))
    assert events[-2]["quire_receipt"]["reason"] == "longest prefix"


async def test_traceparent_is_continued_and_the_tenant_reaches_the_neighbours(rig):
    rig.say("a")
    parent = f"00-{'ab' * 16}-{'cd' * 8}-00"
    await rig.client.post("/v1/chat/completions", json=chat(user="u1"), headers={"traceparent": parent})
    assert rig.a.generated[0].traceparent.split("-")[1] == "ab" * 16
    assert rig.scheduler.places[0].traceparent.split("-")[1] == "ab" * 16
    assert rig.scheduler.places[0].session == "u1"


async def test_models_tokenize_detokenize_health_ready_metrics(rig):
    models = (await rig.client.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == [MODEL]
    assert (await rig.client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await rig.client.get("/v1/models/other")).status_code == 404
    found = (await rig.client.post("/tokenize", json={"model": MODEL, "prompt": "the fox"})).json()
    assert found["tokens"] == rig.ids("the fox")
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == MAX_MODEL_LEN
    back = (await rig.client.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]})).json()
    assert back["prompt"] == "the fox"
    assert (await rig.client.get("/health")).status_code == 200
    assert (await rig.client.get("/ready")).status_code == 200
    rig.say("a")
    await rig.client.post("/v1/chat/completions", json=chat())
    metrics = (await rig.client.get("/metrics")).text
    assert 'quire_gateway_requests_total{route="/v1/chat/completions",status="200"}' in metrics
    paths = (await rig.client.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(paths)
    await until(lambda: rig.gateway.admission.num_running == 0)


async def test_many_streams_at_once_do_not_mix(rig):
    texts = ["the quick", "brown fox", "jumps over", "the lazy dog"]

    async def script(worker, identity, gen, prompt):
        ids = prompt
        for position, token in enumerate(ids):
            finish = "stop" if position == len(ids) - 1 else None
            worker.tokens(identity, gen, [token], finish=finish)
            await asyncio.sleep(0)
        worker.finished(identity, gen, len(prompt))

    rig.a.script = script
    bodies = [{"model": MODEL, "prompt": text, "max_tokens": 99} for text in texts * 16]
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=rig.base_url, limits=limits, trust_env=False) as client:
        rig.client, old = client, rig.client
        found = await asyncio.gather(*(stream(rig, "/v1/completions", body) for body in bodies))
        rig.client = old
    assert [text_of(events[:-1]) for events in found] == texts * 16


async def test_finished_requests_leave_no_garbage_cycles(rig):
    rig.say(" the fox")
    bodies = [chat(), chat(n=2), chat(logprobs=True)]
    for body in bodies:  # caches fill
        await rig.client.post("/v1/chat/completions", json=body)
        await stream(rig, "/v1/chat/completions", body)
    gc.collect()
    gc.disable()
    try:
        for body in bodies:
            await rig.client.post("/v1/chat/completions", json=body)
            await stream(rig, "/v1/chat/completions", body)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = [found for found in gc.garbage if type(found).__module__.startswith("services.gateway")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert ours == []


async def test_a_reader_that_never_reads_is_cut_off_and_its_work_aborted(rig, monkeypatch):
    monkeypatch.setattr(Limits, "unsent_bytes", 64 << 10)
    rig.say(" the quick brown fox" * 120)
    host, port = rig.base_url.removeprefix("http://").split(":")
    writers = []
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(chat(stream=True, n=100, max_tokens=300)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writers.append(writer)
    await until(lambda: len(rig.a.aborted) == 3)
    await until(lambda: rig.gateway.admission.num_running == 0)
    for writer in writers:
        writer.close()
