"""Bodies that would take seconds to make objects of are refused at a look; text of any kind is text."""

import json

import pytest

from services.gateway.openai import ChatBody, CompletionBody, parse_body
from services.gateway.openai_size import MAX_FREE_BYTES, MAX_STRUCTURE
from shared.errors import InvalidRequest

FUNCTION = b'[{"type":"function","function":{"name":"a","x":%b}}]'
ZEROS, LISTS = b"[%b0]" % (b"0," * (MAX_FREE_BYTES // 2)), b"[%b0]" % (b"[]," * (MAX_STRUCTURE - 9))
TEXT = '\\"[{"a": [1, {"b\\\\": "\\"]]{{::' * 40_000


def chat(field: bytes, value: bytes) -> ChatBody:
    said = json.dumps(TEXT).encode()
    return parse_body(
        ChatBody, b'{"model":"m","messages":[{"role":"user","content":%b}],"%b":%b}' % (said, field, value)
    )


def test_what_objects_are_made_of_too_long_is_refused_at_a_look():
    more = LISTS.replace(b"0", LISTS[:99] + b"0]")
    for field, value in ((b"tools", FUNCTION % ZEROS), (b"unknown", more), (b"unknown", b"NaN")):
        with pytest.raises(InvalidRequest):
            chat(field, value)


def test_what_is_large_and_usual_is_taken():
    assert chat(b"unknown", LISTS).messages[0].get("content") == TEXT
    ids = [*range(1_000_000)]
    assert parse_body(CompletionBody, json.dumps({"model": "m", "prompt": ids}).encode()).prompts == [ids]
