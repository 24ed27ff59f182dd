"""What is read as a tool call from JSON that a model wrote."""

import pytest

from services.gateway.core.tool_call_json import CallReader, State


@pytest.mark.parametrize(
    "name",
    [r'"get_\ud83d"', "[" * 100_000 + "]" * 100_000, "5", '""'],
    ids=["surrogate", "deep", "int", "empty"],
)
def test_a_name_that_no_answer_can_carry_makes_it_no_call(name):
    reader = CallReader()
    assert reader.feed('{"name": ' + name + ', "arguments": {}}') == ', "arguments": {}}'
    assert reader.state is State.BROKEN


@pytest.mark.parametrize("text", [r"{\"city\": \"\ud83d\"}", "[1]", ""])
def test_arguments_encoded_twice_are_an_object_that_an_answer_can_carry(text):
    reader = CallReader()
    reader.feed('{"name": "f", "arguments": "' + text + '"}')
    assert reader.state is State.DONE
    with pytest.raises(ValueError, match="no object"):
        reader.arguments()


def test_escapes_of_whole_characters_are_read():
    reader = CallReader()
    reader.feed(r"""{"name": "f\u00fc", "arguments": "{\"city\": \"\ud83d\ude00\"}"}""")
    assert (reader.name, reader.arguments()) == ("f\u00fc", '{"city": "\U0001f600"}')
