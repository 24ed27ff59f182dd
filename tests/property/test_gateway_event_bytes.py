"""Events of a stream are the JSON of the whole object, although most of their bytes are made once."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.streaming import EventShape

text = st.text(max_size=20)
index = st.integers(0, 2_047)


def expected(shape_of, choices, **more):
    kind, request_id, created, model, fingerprint, usage_key = shape_of
    body = {
        "id": request_id,
        "object": "chat.completion.chunk" if kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        **({"usage": None} if usage_key and "usage" not in more else {}),
        **more,
    }
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def choice(kind, number, delta, logprobs=None, finish_reason=None, **more):
    key = "delta" if kind == "chat" else "text"
    return {"index": number, key: delta, "logprobs": logprobs, "finish_reason": finish_reason, **more}


shapes = st.tuples(
    st.sampled_from(["chat", "text"]), text, st.integers(0, 1 << 40), text, text, st.booleans()
)


@given(
    shapes,
    index,
    text,
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.sampled_from([None, 0, 5, "0", "", "a\n"]),
)
def test_plain_role_and_last_events_are_the_whole_object(shape_of, number, piece, reason, stop):
    kind, shape = shape_of[0], EventShape(*shape_of)
    head, tail = shape.halves(number)
    delta = {"content": piece} if kind == "chat" else piece
    assert head + msgspec.json.encode(piece) + tail == expected(shape_of, [choice(kind, number, delta)])
    empty = {} if kind == "chat" else ""
    last = choice(kind, number, empty, None, reason, stop_reason=stop)
    assert shape.last(number, reason, stop) == expected(shape_of, [last])
    if kind == "chat":
        role = {"role": "assistant", "content": ""}
        assert shape.role(number) == expected(shape_of, [choice(kind, number, role)])


@given(shapes, index, text, st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=3)))
def test_other_events_and_the_closing_one_are_the_whole_object(shape_of, number, piece, ids):
    kind, shape = shape_of[0], EventShape(*shape_of)
    delta, logprobs = ({"content": piece} if kind == "chat" else piece), {"content": [{"token": piece}]}
    more = {} if ids is None else {"token_ids": ids}
    assert shape.event(number, delta, logprobs, ids) == expected(
        shape_of, [choice(kind, number, delta, logprobs, **more)]
    )
    assert shape.closing(None, None) == b""
    usage, receipt = {"prompt_tokens": 1}, [{"stages": []}]
    for extra in ({"usage": usage}, {"quire_receipt": receipt}, {"usage": usage, "quire_receipt": receipt}):
        event = shape.closing(extra.get("usage"), extra.get("quire_receipt"))
        found = json.loads(event.removeprefix(b"data: "))
        assert found["choices"] == []
        assert {key: found[key] for key in extra} == extra
        plain = (*shape_of[:5], False)
        assert event == expected(plain, [], **extra)
