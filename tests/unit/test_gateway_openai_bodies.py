"""Bodies are read as OpenAI reads them, and every fault names its field."""

import json

import pytest
from pydantic import ValidationError

from services.gateway.core.tools import ToolPlan
from services.gateway.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingDefaults,
    TokenizeBody,
    parse_body,
    to_sampling,
)
from services.gateway.submit import output_budget
from shared.errors import InvalidRequest, PromptTooLong
from shared.wire.requests import SamplingSpec, StructuredSpec

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": {"D": {}}}}},
    {"type": "function", "function": {"name": "g"}},
]
FUNCTION_F = {"type": "function", "function": {"name": "f"}}


def chat(**fields) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"model": "m", "messages": USER} | fields).encode())


def completion(**fields) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def sampling(body, **options) -> SamplingSpec:
    return to_sampling(body, **{"default_max_tokens": 77, "random_seed": 5} | options)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"n": "many"}, "n", "valid integer"),
        ({"n": True}, "n", "valid integer"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
        ({"stop": 5}, "stop", "valid string or a valid array"),
        ({"stop": [""]}, "stop", "must not be empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9" * 5_000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid array"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "Missing"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "'assistant'"),
        (
            {"messages": [*USER, {"role": "user", "content": 5}]},
            "messages[1].content",
            "string or a valid array",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing"),
        ({"messages": [*USER, {"role": "tool", "content": None}]}, "messages[1].content", "Missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}]},
            "messages[1].tool_calls[0].function",
            "Missing",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"tools": "hammer"}, "tools", "valid array"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "appears 2 times"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOLS[1]], "tool_choice": FUNCTION_F}, "tool_choice", "not among the tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"user": 5}, "user", "valid string"),
    ],
)
def test_a_fault_in_a_chat_names_the_field(fields, param, words):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


def many(item: object) -> list:
    return [item] * 30_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"messages": [{"role": "user", "content": many(item)}]}, "messages[0].content") for item in (1, {}, "a")),
        ({"messages": [{"role": "assistant", "tool_calls": many({})}]}, "messages[0].tool_calls[0].function"),
        ({"messages": many(1)}, "messages[0]"),
        ({"messages": many(USER[0])}, "messages"),
        ({"tools": many({"function": {}})}, "tools[0].function.name"),
        *(({"stop": many(item)}, "stop") for item in (1, "a")),
        *(({"structured_outputs": {"choice": many(item)}}, "structured_outputs.choice") for item in (1, [])),
        *(({"logit_bias": dict.fromkeys(range(100_000), item)}, "logit_bias") for item in ("a", 1)),
    ],
)  # fmt: skip
def test_a_fault_in_each_of_many_elements_is_told_by_few_errors(fields, param):
    raw = json.dumps({"model": "m", "messages": USER} | fields).encode()
    with pytest.raises(ValidationError) as found:
        ChatBody.model_validate_json(raw)
    assert found.value.error_count() <= 6, "one for each branch of what holds the first fault"
    with pytest.raises(InvalidRequest) as caught:
        parse_body(ChatBody, raw)
    assert str(caught.value.param).startswith(param)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b'"text"', b'{"model": ', b"\xff\xfe{}", b'{"model":"\xff"}', b'{"model":"\\ud800"}',
        b'{"model":"m","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":1e999}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(raw):
    with pytest.raises(InvalidRequest):
        parse_body(ChatBody, raw)


def test_nulls_and_unknown_keys_count_as_absent():
    body = chat(n=None, stop=None, tools=None, stream=None, temperature=None, frobnicate=1, seed=None)
    assert sampling(body) == sampling(chat())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_has_four_forms(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(
            ({"prompt": bad}, "prompt")
            for bad in (None, [], 5, [[]], [1, "a"], [True], [1.0], [["a"]], ["a"] * 257)
        ),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_fault_in_a_completion_names_the_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(("is_chat", "param"), [(False, "prompt"), (True, "messages")])
def test_a_prompt_of_no_tokens_is_refused_with_its_field(is_chat, param):
    with pytest.raises(InvalidRequest, match=f"{param} must not be empty") as caught:
        output_budget(0, None, 100, is_chat=is_chat, max_tokens_field="")
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat(max_tokens=200), "max_tokens"),
        (chat(max_completion_tokens=200), "max_completion_tokens"),
        (chat(max_tokens=3, max_completion_tokens=200), "max_completion_tokens"),
        (completion(max_tokens=200), "max_tokens"),
        (completion(), ""),
    ],
)
def test_too_many_tokens_name_the_field_that_asked_for_them(body, field):
    is_chat = isinstance(body, ChatBody)
    with pytest.raises(PromptTooLong) as caught:
        output_budget(
            95, body.max_output_tokens, 100, is_chat=is_chat, max_tokens_field=body.max_tokens_field
        )
    assert caught.value.param == (field or "prompt")
    fewer = type(body).model_validate({**body.model_dump(exclude_none=True), "min_tokens": 500})
    with pytest.raises(
        InvalidRequest, match=f"at most {field or 'the default of max_tokens'}, which is"
    ) as caught:
        sampling(fewer)
    assert caught.value.param == "min_tokens"


def test_sampling_takes_the_body_then_the_model_then_openai():
    defaults = SamplingDefaults(temperature=0.7, top_k=20)
    assert sampling(chat(temperature=0.2), defaults=defaults).temperature == 0.2
    assert sampling(chat(), defaults=defaults).temperature == 0.7
    assert sampling(chat(), defaults=defaults).top_k == 20
    assert sampling(chat(top_k=-1), defaults=defaults).top_k == 0
    assert sampling(chat()).temperature == 1.0


def test_output_length_has_a_default_per_route():
    assert sampling(chat()).max_tokens == 77
    assert sampling(chat(max_tokens=3)).max_tokens == 3
    assert sampling(chat(max_tokens=3, max_completion_tokens=4)).max_tokens == 4
    assert sampling(completion()).max_tokens == 16
    assert sampling(completion(max_tokens=None)).max_tokens == 16, "null is absent, as with OpenAI and vLLM"
    assert completion(max_tokens=None).max_output_tokens == 16, "what the context is checked against"
    assert sampling(chat(max_tokens=None, max_completion_tokens=None)).max_tokens == 77


def test_the_prompt_alone_may_be_asked_for_only_with_echo():
    assert sampling(completion(max_tokens=0, echo=True)).max_tokens == 0
    with pytest.raises(InvalidRequest, match="needs echo"):
        completion(max_tokens=0)


def test_requests_that_sample_have_a_seed_and_greedy_ones_none():
    assert sampling(chat(temperature=1)).seed == 5
    assert sampling(chat(temperature=1, seed=-1)).seed == 5, "vLLM reads -1 as no seed"
    assert sampling(chat(temperature=1, seed=9)).seed == 9
    assert sampling(chat(temperature=0)).seed is None


def test_log_probabilities_of_both_routes():
    assert sampling(chat()).logprobs is None
    assert sampling(chat(logprobs=True)).logprobs == 0
    assert sampling(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert sampling(completion(logprobs=2)).logprobs == 2
    assert sampling(completion(logprobs=2)).prompt_logprobs is None
    assert sampling(completion(logprobs=2, echo=True)).prompt_logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"900": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"a": float("nan")}},
                }
            },
            "response_format",
        ),
    ],
)
def test_what_only_the_model_can_judge_is_refused_with_its_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        sampling(chat(**fields), vocab_size=900)
    assert caught.value.param == param


def test_formats_become_grammars():
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert sampling(chat(response_format=form)).structured == StructuredSpec(
        kind="json_schema", value='{"type":"object"}'
    )
    assert sampling(chat(response_format={"type": "json_object"})).structured == StructuredSpec(
        kind="json_object"
    )
    assert sampling(chat(response_format={"type": "text"})).structured is None
    assert sampling(chat(structured_outputs={"choice": ["a", "b"]})).structured == StructuredSpec(
        kind="choice", value='["a", "b"]'
    )


def test_forced_calls_become_grammars():
    body = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    found = sampling(body).structured
    assert found is not None
    schema = json.loads(found.value)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
    assert names == [["f"], ["g"]]
    assert schema["$defs"] == {"D": {}}, "references begin at the root"
    named = sampling(chat(tools=TOOLS, tool_choice=FUNCTION_F)).structured
    assert named is not None
    assert json.loads(named.value) == TOOLS[0]["function"]["parameters"]


@pytest.mark.parametrize("definitions", [5, [1], None])
def test_definitions_that_are_no_object_are_refused_where_they_would_be_moved(definitions):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"$defs": definitions}}}]
    assert sampling(chat(tools=tools)).structured is None
    with pytest.raises(InvalidRequest, match=r"\$defs") as caught:
        sampling(chat(tools=tools, tool_choice="required"))
    assert caught.value.param == "tools"


def test_tool_choice_tells_how_to_read_the_output():
    assert chat().tool_plan("hermes") is None
    assert chat(tools=TOOLS).tool_plan("none") is None
    assert chat(tools=TOOLS).tool_plan("llama") == ToolPlan(kind="llama")
    assert chat(tools=TOOLS, tool_choice="none").tool_plan("hermes") is None
    assert chat(tools=TOOLS, tool_choice="none").template_tools(), "the prompt's cached prefix stays"
    assert chat(tools=TOOLS, parallel_tool_calls=False).tool_plan("hermes") == ToolPlan(
        kind="hermes", max_calls=1
    )
    assert chat(tools=TOOLS, tool_choice="required").tool_plan("hermes") == ToolPlan(kind="required")
    named = chat(tools=TOOLS, tool_choice=FUNCTION_F).tool_plan("hermes")
    assert named == ToolPlan(kind="named", name="f", max_calls=1)


def test_templates_get_text_and_objects():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "extra": 1},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ]
    )
    assert body.template_messages() == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]


def test_a_refusal_in_an_assistants_content_is_text():
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    both = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
    }
    body = chat(messages=[*USER, said, both, *USER])
    assert [each["content"] for each in body.template_messages()] == ["hi", "no", "a\nb", "hi"]
    for wrong, param in (
        ([{"type": "refusal"}], "messages[0].content[0]"),
        ([{"type": "refusal", "refusal": 5}], "messages[0].content[0]"),
        ([{"type": "refusal", "text": "no"}], "messages[0].content[0]"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            chat(messages=[{"role": "assistant", "content": wrong}])
        assert str(caught.value.param).startswith(param)
    with pytest.raises(InvalidRequest, match="only an assistant") as caught:
        chat(messages=[{**said, "role": "user"}])
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_tokenize_refuses_the_chats_that_the_chat_route_refuses(fields):
    refusals = []
    for model in (ChatBody, TokenizeBody):
        with pytest.raises(InvalidRequest) as caught:
            parse_body(model, json.dumps({"model": "m"} | fields).encode())
        refusals.append((caught.value.message, caught.value.param))
    assert refusals[0] == refusals[1]


def test_tokenize_takes_a_prompt_or_messages():
    assert parse_body(TokenizeBody, b'{"prompt": "a"}').prompt == "a"
    assert parse_body(TokenizeBody, json.dumps({"messages": USER}).encode()).template_messages() == USER
    for raw in (b"{}", json.dumps({"prompt": "a", "messages": USER}).encode()):
        with pytest.raises(InvalidRequest):
            parse_body(TokenizeBody, raw)
    assert parse_body(DetokenizeBody, b'{"tokens": [1, 2]}').tokens == [1, 2]
    with pytest.raises(InvalidRequest):
        parse_body(DetokenizeBody, b'{"tokens": ["a"]}')
