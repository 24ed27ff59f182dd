"""What vLLM documents and Quire cannot do is refused by name; what clients send unasked, or anyone makes up, is not."""

import json

import pytest

from services.gateway.openai import ChatBody, CompletionBody, TokenizeBody, parse_body
from shared.errors import InvalidRequest

USER = [{"role": "user", "content": "hi"}]
BOTH = {
    "allowed_token_ids": [10, 11],
    "bad_words": ["Hello"],
    "cache_salt": "x",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= 'a'",
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "logprob_token_ids": [1],
    "prompt_logprobs": 0,  # asks for the tokens' own
    "repetition_detection": {"max_pattern_size": 3},
    "return_tokens_as_token_ids": True,
    "thinking_token_budget": 0,
    "truncate_prompt_tokens": 3,
    "use_beam_search": True,
}
CHATS = {
    "audio": {"voice": "alloy", "format": "wav"},
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
}
RENDERING = {"chat_template": "{{ 1 }}", "documents": [{"text": "a"}]}
HARMLESS = {
    "bad_words": [], "logprob_token_ids": [], "use_beam_search": False, "return_tokens_as_token_ids": False,
    "thinking_token_budget": -1, "documents": [], "echo": False, "length_penalty": 1.0, "priority": 3,
    "spaces_between_special_tokens": True, "service_tier": "auto", "store": True, "metadata": {"a": "b"},
    "reasoning_effort": "low", "verbosity": "low", "frobnicate": [1], "parallel_tool_calls": None, "cache_salt": None,
    "functions": [], "function_call": "auto", "modalities": ["text"], "audio": None,
    "guided_json": None, "guided_choice": [],
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip


def chat(**fields) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"model": "m", "messages": USER} | fields).encode())


def completion(**fields) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def tokenize(**fields) -> TokenizeBody:
    return parse_body(TokenizeBody, json.dumps({"messages": USER} | fields).encode())


CASES = [
    *((make, name, value) for make in (chat, completion) for name, value in BOTH.items()),
    *((make, name, value) for make in (chat, tokenize) for name, value in RENDERING.items()),
    *((chat, name, value) for name, value in CHATS.items()),
    (completion, "prompt_embeds", "AAAA"),
]


@pytest.mark.parametrize(("make", "name", "value"), CASES)
def test_a_field_that_no_engine_can_honour_is_refused_by_its_name(make, name, value):
    with pytest.raises(InvalidRequest, match="does not support") as caught:
        make(**{name: value})
    assert caught.value.param == name
    make(**{name: None})


@pytest.mark.parametrize("value", ['{"type":"structural_tag"}', "{", {"triggers": []}])
def test_a_structural_tag_is_refused_wherever_it_stands(value):
    for make in (chat, completion):
        with pytest.raises(InvalidRequest, match="does not support") as caught:
            make(structured_outputs={"structural_tag": value})
        assert caught.value.param == "structured_outputs.structural_tag"


@pytest.mark.parametrize("value", ["none", "auto"])
def test_a_choice_among_no_functions_asks_for_nothing(value):
    chat(function_call=value)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("guided_json", "structured_outputs"), ("functions", "tools"), ("function_call", "tool_choice")],
)
def test_the_refusal_of_an_old_field_names_the_new_one(name, instead):
    with pytest.raises(InvalidRequest, match=instead):
        chat(**{name: {"a": 1}})


def test_defaults_and_what_clients_send_unasked_are_taken():
    chat(**HARMLESS)
    completion(**{key: value for key, value in HARMLESS.items() if key != "echo"})
    for name, value in HARMLESS.items():
        if name != "stream_options":
            chat(**{name: value})


def test_the_documentation_does_not_offer_what_is_refused():
    for model in (ChatBody, CompletionBody, TokenizeBody):
        offered = model.model_json_schema()["properties"]
        assert offered.keys().isdisjoint([*BOTH, *(CHATS.keys() - {"echo"}), *RENDERING, "prompt_embeds"])
    assert "function_call" not in str(ChatBody.model_json_schema())
    assert "echo" in CompletionBody.model_json_schema()["properties"]
