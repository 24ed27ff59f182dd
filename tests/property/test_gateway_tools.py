"""Tool calls are read alike however the text is cut into deltas, and no text is lost or shown twice."""

import itertools
import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.core.tools import (
    CallDelta,
    TextDelta,
    ToolPlan,
    make_parser,
    read_whole,
    required_schema,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\{}[]<>/:,\n é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab\\"{', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text("abc", min_size=1, max_size=3), JSON, max_size=3)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather", "tool.x-1"]), ARGUMENTS), min_size=1, max_size=3
)
PROSE = st.text("ab <>{}\n", max_size=8).filter(lambda text: "<tool_call>" not in text)
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=20)
MESSY = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f"', ', "arguments": ', '"parameters":', '{"a": 1',
         "}", "}", "{", "[", "]", ",", " ", "\n\n", '"', "\\", " ", "\n", ";", "null", "x", '"name"', ":"]
    ),
    max_size=20,
).map("".join)  # fmt: skip

DEFINED = ["A", "g.A"]  # what A of g would be named
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "integer"}, *({"$ref": f"#/$defs/{name}"} for name in DEFINED)])
    | st.sampled_from([{"enum": [{"$ref": "#/$defs/A"}]}, {}]),
    lambda inner: (
        st.dictionaries(st.sampled_from(["enum", "$ref", "x"]), inner, max_size=2).map(
            lambda p: {"properties": p}
        )
        | st.lists(inner, max_size=2).map(lambda each: {"anyOf": each})
    ),
    max_leaves=4,
)
PARAMETERS = st.builds(
    lambda schema, *known: schema | {"$defs": dict(zip(DEFINED, known, strict=True))},
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
)


def pieces(text: str, cuts: list[int]):
    sizes, at = itertools.cycle(cuts), 0
    while at < len(text):
        size = next(sizes)
        yield text[at : at + size]
        at += size


def read(plan: ToolPlan, text: str, cuts: list[int]):
    """Content and calls of a streamed output; checks the form of the deltas."""
    ids = map("call_{}".format, itertools.count())
    parser = make_parser(plan, lambda: next(ids))
    deltas = [d for piece in pieces(text, cuts) for d in parser.feed(piece)] + parser.flush()
    content, calls = "", []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            assert delta.text, "an empty delta says nothing"
            content += delta.text
        elif delta.id:
            assert (delta.index, delta.arguments) == (len(calls), ""), "a call begins with its name"
            assert delta.name
            calls.append((delta.name, ""))
        else:
            assert not delta.name
            assert delta.arguments
            name, arguments = calls[delta.index]
            assert delta.index == len(calls) - 1, "calls do not mix"
            calls[delta.index] = (name, arguments + delta.arguments)
    assert parser.num_calls == len(calls)
    return content, calls


def hermes(calls, keys, gap: str) -> str:
    order = [("name", 0), ("arguments", 1)] if keys else [("arguments", 1), ("name", 0)]
    return gap.join(
        f"<tool_call>{gap}{json.dumps({key: call[at] for key, at in order}, ensure_ascii=False)}{gap}</tool_call>"
        for call in calls
    )


@given(PROSE, CALLS, st.booleans(), st.sampled_from(["", "\n"]), CUTS)
def test_hermes_calls_come_out_as_they_were_written(prose, calls, name_first, gap, cuts):
    content, found = read(ToolPlan(kind="hermes"), prose + hermes(calls, name_first, gap), cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert content == (prose if prose.strip() else "")


@given(CALLS, st.sampled_from(["", "<|python_tag|>", " "]), st.sampled_from([";", "; ", "\n"]), CUTS)
def test_llama_calls_come_out_as_they_were_written(calls, opening, between, cuts):
    text = opening + between.join(
        json.dumps({"type": "function", "name": name, "parameters": arguments}) for name, arguments in calls
    )
    content, found = read(ToolPlan(kind="llama"), text, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert content == ""


@given(CALLS, CUTS, st.sampled_from([None, 1]))
def test_required_calls_come_out_as_they_were_written(calls, cuts, max_calls):
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])
    content, found = read(ToolPlan(kind="required", max_calls=max_calls), text, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls[:max_calls]
    assert content == ""


@given(ARGUMENTS, CUTS)
def test_a_named_function_gets_all_output_as_arguments(arguments, cuts):
    text = json.dumps(arguments)
    assert read(ToolPlan(kind="named", name="f"), text, cuts) == ("", [("f", text)])


@pytest.mark.parametrize("kind", ["hermes", "llama", "required", "named"])
@given(text=MESSY, first=CUTS, second=CUTS)
@example(' [{"name": "f", x\n[', [1], [7])
def test_the_cut_into_deltas_does_not_matter(kind, text, first, second):
    plan = ToolPlan(kind=kind, name="f")
    assert read(plan, text, first) == read(plan, text, second)


@pytest.mark.parametrize("kind", ["hermes", "llama"])
@given(text=MESSY, cuts=CUTS)
@example(text=" <tool_call>{]", cuts=[3])
@example(text='{"parameters":{<|python_tag|>', cuts=[1])  # the tag inside what was no call: it stays, as text
def test_text_without_a_call_comes_out_unchanged(kind, text, cuts):
    """Llama's tag itself may go or stay; everything else is there, in order."""
    content, calls = read(ToolPlan(kind=kind), text, cuts)
    if not calls and kind == "llama":
        assert content.replace("<|python_tag|>", "") == text.replace("<|python_tag|>", "")
    elif not calls:
        assert content == text


@given(CALLS, st.integers(0, 400), st.integers(0, 3), st.sampled_from(["", "}", '"', "\\"]))
def test_a_whole_output_has_only_calls_with_objects_as_arguments(calls, at, num_lost, instead):
    """Also when the model lost a few characters on the way, or ended early."""
    text = hermes(calls, True, "\n")
    at %= len(text)
    text = text[:at] + instead + (text[at + num_lost :] if num_lost else "")
    content, calls, parser = read_whole(ToolPlan(kind="hermes"), text, lambda: "id")
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert content == text or calls
    assert parser.num_calls == len(calls)


def seconds_behind(kind, opening, num_blanks) -> float:
    """Of this thread alone, a token of white space behind so many; of five turns the quickest."""
    parser = make_parser(ToolPlan(kind=kind), lambda: "call")
    parser.feed(opening)
    for _ in range(num_blanks):
        assert parser.feed(" " * 128) == []
    took = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(50):
            assert parser.feed(" " * 128) == []
        took.append(time.thread_time() - began)
    return min(took) / 50


@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        ("hermes", ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("llama", ""),
        ("required", ""),
    ],
)
def test_white_space_before_a_call_costs_no_more_the_longer_it_is(kind, opening):
    assert seconds_behind(kind, opening, 4_000) < 30 * seconds_behind(kind, opening, 0)


def test_calls_beyond_the_allowed_number_are_dropped():
    text = hermes([("f", {"a": 1}), ("g", {})], True, "\n")
    assert read(ToolPlan(kind="hermes", max_calls=1), text, [3]) == ("", [("f", '{"a": 1}')])


def test_arguments_are_streamed_as_they_grow():
    parser = make_parser(ToolPlan(kind="hermes"), lambda: "id")
    assert parser.feed('<tool_call>{"name": "f", ') == []
    assert parser.feed('"arguments": {"a"') == [CallDelta(0, "", "id", "f"), CallDelta(0, '{"a"')]
    assert parser.feed(": 1") == [CallDelta(0, ": 1")]
    assert parser.feed("}}") == [CallDelta(0, "}")]
    assert parser.feed("</tool_call>") == []
    assert parser.flush() == []
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def followed(schema, root, steps: int):
    """The schema with what it refers to in place, `steps` references deep."""
    if isinstance(schema, list):
        return [followed(each, root, steps) for each in schema]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        known = root["$defs"][reference.removeprefix("#/$defs/")]
        return followed(known, root, steps - 1) if steps else "..."
    out = {keyword: schema[keyword] for keyword in schema if keyword not in ("$defs", "anyOf", "properties")}
    if "anyOf" in schema:
        out["anyOf"] = followed(schema["anyOf"], root, steps)
    if "properties" in schema:
        out["properties"] = {name: followed(each, root, steps) for name, each in schema["properties"].items()}
    return out


@given(st.dictionaries(st.sampled_from(["f", "g", "g."]), PARAMETERS, min_size=1))
@example(
    {
        "f": {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string"}}},
        "g": {"$ref": "#/$defs/A", "$defs": {"A": {}}},
    }
)
def test_a_forced_call_follows_its_own_functions_definitions_whatever_others_name_theirs(functions):
    before = json.dumps(functions)
    whole = required_schema(functions)
    for call in whole["items"]["anyOf"]:
        (name,) = call["properties"]["name"]["enum"]
        wanted = followed(functions[name], functions[name], 4)
        assert followed(call["properties"]["parameters"], whole, 4) == wanted
    assert json.dumps(functions) == before
