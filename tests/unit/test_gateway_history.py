"""What an assistant said earlier comes back as history in the next request: nothing of it is dropped, or stops it."""

import json

import pytest

from services.gateway.openai import ChatBody, parse_body
from services.gateway.text import ModelText
from shared.errors import InvalidRequest
from tests.unit.gateway_text_fixtures import make_model_dir

USER = {"role": "user", "content": "hi"}


def templated(*messages: dict) -> list[dict]:
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    return parse_body(ChatBody, raw).template_messages()


def called(arguments: str) -> dict:
    """A turn in which the assistant has called a function."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def arguments_of(message: dict) -> object:
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "5",
        '"a"',
        "null",
        "no JSON",
        '{"a": 1} and more',
        '{"a":' + "[" * 200_000,
        '{"a": "\\ud83d',
        '{"a": 0}' + " " * (1 << 20),
    ],
    ids=range(10),
)
def test_arguments_that_are_no_object_go_to_the_template_as_the_model_wrote_them(text):
    (message,) = templated(called(text))
    assert arguments_of(message) == text


def test_a_template_shows_arguments_that_are_no_object(tmp_path):
    model = ModelText(make_model_dir(tmp_path))
    assert "not {JSON" in model.render_chat(templated(USER, called("not {JSON"), USER))
    model.close()


@pytest.mark.parametrize("text", ['{"a": "\\ud83d"}', '{"\\uDE00": 1}'])
def test_an_object_with_half_a_character_is_refused(text):
    with pytest.raises(InvalidRequest, match="Unicode") as caught:
        templated(USER, called(text))
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_arguments_may_have_escapes_of_whole_characters():
    (message,) = templated(called('{"a": "\\ud83d\\ude00"}'))
    assert arguments_of(message) == {"a": "\U0001f600"}


@pytest.mark.parametrize("text", ["", "  "])
def test_no_arguments_are_an_empty_object(text):
    (message,) = templated(called(text))
    assert arguments_of(message) == {}


def test_calls_of_the_old_kind_and_their_answers_are_refused_with_the_field():
    """No template knows them; they were dropped."""
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    for message, param in (
        (old, "messages[1].function_call"),
        (old | {"content": "a"}, "messages[1].function_call"),
        ({"role": "function", "name": "f", "content": "5"}, "messages[1].role"),
    ):
        with pytest.raises(InvalidRequest, match="tool") as caught:
            templated(USER, message)
        assert caught.value.param == param
    (message,) = templated({"role": "assistant", "content": "a", "function_call": None})
    assert message == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}], ids=str)
def test_what_an_assistant_refused_is_what_it_said(content):
    (_, message) = templated(USER, {"role": "assistant", "refusal": "I will not.", **content})
    assert message["content"] == "I will not."
    assert "refusal" not in message


def test_beside_content_a_refusal_of_none_is_nothing():
    """OpenAI's client sends back all that it got."""
    (message,) = templated({"role": "assistant", "content": "a", "refusal": None})
    assert message == {"role": "assistant", "content": "a"}


def test_beside_content_or_a_call_a_refusal_is_kept_with_it():
    (message,) = templated({"role": "assistant", "content": "a", "refusal": "I will not."})
    assert message["content"] == "a\nI will not.", "as parts of a content are joined"
    (message,) = templated(called("{}") | {"refusal": "I will not."})
    assert message["content"] == "I will not."


def test_only_an_assistant_refuses():
    with pytest.raises(InvalidRequest, match="only an assistant") as caught:
        templated({"role": "user", "content": "a", "refusal": "I will not."})
    assert caught.value.param == "messages[0].refusal"
    with pytest.raises(InvalidRequest) as caught:
        templated({"role": "assistant", "refusal": 5})
    assert caught.value.param == "messages[0].refusal"
