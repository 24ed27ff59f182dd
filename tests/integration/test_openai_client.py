"""openai-python's own client against the cluster: sync, async, streaming, tools, structured output, errors."""

import json

import httpx
import openai
import pytest

MODEL = "quire-demo"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def client(live_cluster):
    with openai.OpenAI(
        base_url=live_cluster.url + "/v1", api_key="none", max_retries=0, timeout=300
    ) as found:
        yield found


def ask(text):
    return [{"role": "user", "content": text}]


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_answers_in_recognisable_text(client):
    answer = client.chat.completions.create(model=MODEL, messages=ask("What is Quire?"), temperature=0)
    choice = answer.choices[0]
    assert "disaggregated LLM serving cluster" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_says_the_same_and_ends_with_usage(client):
    whole = client.chat.completions.create(model=MODEL, messages=ask("Count to 20."), temperature=0)
    text, finish, usage = "", None, None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ask("Count to 20."),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_the_async_client_streams_many_at_once(live_cluster):
    import asyncio

    async with openai.AsyncOpenAI(
        base_url=live_cluster.url + "/v1", api_key="none", max_retries=0, timeout=300
    ) as client:

        async def one(number):
            stream = await client.chat.completions.create(
                model=MODEL, messages=ask(f"Count to {number}."), temperature=0, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        answers = await asyncio.gather(*(one(n) for n in (5, 6, 7, 8, 9, 10)))
    for number, text in zip((5, 6, 7, 8, 9, 10), answers, strict=True):
        assert text.startswith("1, 2, 3"), (number, text)


def test_a_tool_is_called_and_its_result_used(client):
    messages = ask("What is the weather in Paris?")
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments), dict)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}]
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], temperature=0)
    assert final.choices[0].message.content


def test_a_streamed_tool_call_equals_the_whole_one(client):
    whole = client.chat.completions.create(
        model=MODEL, messages=ask("What is the weather in Paris?"), tools=[WEATHER], temperature=0
    )
    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=ask("What is the weather in Paris?"),
        tools=[WEATHER],
        temperature=0,
        stream=True,
    ):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    expected = (whole.choices[0].message.tool_calls or [])[0]
    assert finish == "tool_calls"
    assert expected.type == "function"
    assert (name, json.loads(arguments)) == (
        expected.function.name,
        json.loads(expected.function.arguments),
    )


def test_a_required_tool_is_called_whatever_was_asked(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ask("hello"),
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=200,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"


def test_structured_output_is_valid_by_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ask("hello"),
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert isinstance(value["ok"], bool)
    assert 0 <= value["n"] <= 9


@pytest.mark.parametrize("what", ["items inside of a grammar", "properties"])
def test_a_grammar_that_no_engine_can_hold_is_a_bad_request_and_ends_nobody(client, what):
    items = '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000000}'
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    asked = {"json": schema} if what == "properties" else {"grammar": f"start: a\na: %json {items}"}
    fields = {"model": MODEL, "messages": ask("hello"), "max_tokens": 4}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**fields, extra_body={"structured_outputs": asked})
    assert client.chat.completions.create(**fields).choices


def test_an_answer_in_json_is_an_object_though_the_model_would_have_said_something_else(client):
    question = {
        "model": MODEL,
        "messages": ask("Which module has deque?"),
        "temperature": 0,
        "max_tokens": 200,
    }
    said = client.chat.completions.create(**question).choices[0].message.content
    assert "collections" in (said or "")
    answer = client.chat.completions.create(**question, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    assert answer.choices[0].finish_reason == "stop"


def test_several_greedy_choices_are_the_one_greedy_choice(client):
    fields = {"model": MODEL, "messages": ask("Count to 20."), "temperature": 0}
    one = client.chat.completions.create(**fields)
    three = client.chat.completions.create(**fields, n=3)
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert {c.message.content for c in three.choices} == {one.choices[0].message.content}
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens


def test_the_receipt_of_several_choices_counts_what_all_of_them_did(client):
    def decode_stage(prompt, n):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, n=n, temperature=0.9, seed=4, max_tokens=6,
            extra_body={"quire_receipt": True, "ignore_eos": True},
        )  # fmt: skip
        assert answer.usage.prompt_tokens_details.cached_tokens <= answer.usage.prompt_tokens
        return answer.model_extra["quire_receipt"]["stages"][-1]

    one = decode_stage(list(range(300, 475)), 1)
    three = decode_stage(list(range(500, 675)), 3)
    for stage in (one, three):  # the prompt's tokens count once
        assert stage["tokens_engine"] + stage["tokens_pool"] + stage["tokens_computed"] == 175, stage
    assert (three["tokens_pool"], three["tokens_computed"]) == (one["tokens_pool"], one["tokens_computed"])
    assert three["blocks_moved"] >= one["blocks_moved"], (
        "the first choice moved as much, the others what it lacked"
    )
    assert three["bytes_moved"] * one["blocks_moved"] == one["bytes_moved"] * three["blocks_moved"]


def test_legacy_completions_echo_and_logprobs(client):
    answer = client.completions.create(
        model=MODEL, prompt="The with statement", max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The with statement")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("n", [1, 2])
def test_echo_without_tokens_scores_a_text_as_generating_it_did(client, n):
    start = "The with statement"
    made = client.completions.create(
        model=MODEL, prompt=start, max_tokens=48, temperature=0, logprobs=1, echo=True
    )
    expected = made.choices[0].logprobs
    text = made.choices[0].text
    fields = {"model": MODEL, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1, "n": n}
    scored = [client.completions.create(**fields) for _ in range(2)]  # the second finds every cache full
    for answer in scored:
        assert len(answer.choices) == n
        assert answer.usage.completion_tokens == 0
        assert answer.usage.total_tokens == answer.usage.prompt_tokens
        for choice in answer.choices:
            assert choice.text == text
            assert choice.finish_reason == "length"
            assert choice.logprobs.tokens == expected.tokens
            assert choice.logprobs.text_offset == expected.text_offset
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.token_logprobs[1:], abs=1e-3)
    parts = list(client.completions.create(**fields, stream=True))
    for index in range(n):
        mine = [choice for part in parts for choice in part.choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == text
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]
        first = mine[0].logprobs
        assert first.tokens == expected.tokens
        assert first.token_logprobs == scored[-1].choices[index].logprobs.token_logprobs


def test_a_streamed_echo_has_the_log_probabilities_of_the_whole_one(client):
    fields = {"model": MODEL, "prompt": "The with statement", "max_tokens": 6, "temperature": 0, "echo": True}
    whole = client.completions.create(**fields, logprobs=2).choices[0]
    parts = [c for part in client.completions.create(**fields, logprobs=2, stream=True) for c in part.choices]
    assert "".join(choice.text for choice in parts) == whole.text
    assert [t for c in parts if c.logprobs for t in c.logprobs.tokens] == whole.logprobs.tokens
    assert [t for c in parts if c.logprobs for t in c.logprobs.text_offset] == whole.logprobs.text_offset


def test_chat_logprobs_have_their_alternatives(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=ask("hello"), temperature=0, max_tokens=3, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 3
    assert all(len(entry.top_logprobs) == 3 for entry in found.content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in found.content)


ERRORS = [
    (openai.NotFoundError, "model_not_found", {"model": "nobody"}),
    (openai.BadRequestError, "context_length_exceeded", {"messages": ask("word " * 9000)}),
    (openai.BadRequestError, None, {"n": 1000}),
    (openai.BadRequestError, None, {"temperature": "hot"}),
    (openai.BadRequestError, None, {"messages": "hello"}),
]


@pytest.mark.parametrize(("kind", "code", "change"), ERRORS)
def test_errors_are_openais_own_types(client, kind, code, change):
    fields = {"model": MODEL, "messages": ask("hello"), **change}
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**fields)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    if code is not None:
        assert caught.value.code == code


def test_a_body_of_17_megabytes_and_broken_json_are_refused_in_openais_form(live_cluster):
    url = live_cluster.url + "/v1/chat/completions"
    headers = {"content-type": "application/json"}
    for content, status in ((b'{"messages":', 400), (b" " * (17 << 20), 413)):
        answer = httpx.post(url, content=content, headers=headers, timeout=120)
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
