"""Tools in a request and calls in an answer, in OpenAI's form. No I/O; parsers are in tool_parsers.py."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from services.gateway.core.tool_call_json import CallDelta, Delta, TextDelta
from services.gateway.core.tool_parsers import (
    HERMES_OPEN,
    LLAMA_TAG,
    NewId,
    ToolParser,
    ToolPlan,
    make_parser,
)
from shared.errors import InvalidRequest

ToolFormat = Literal["none", "hermes", "llama"]  # how a model was trained to write calls


def format_of(template: str, tokens: Callable[[str], object]) -> ToolFormat:
    """A model's format, told by what its chat template prints, else by its vocabulary.

    Args: tokens: gives None for text that is no token.
    """
    if HERMES_OPEN in template:
        return "hermes"
    if LLAMA_TAG in template or tokens(LLAMA_TAG) is not None:
        return "llama"
    return "hermes" if tokens(HERMES_OPEN) is not None else "none"


# -- forced calls -------------------------------------------------------------------------------------------

_DEFINITION = "#/$defs/"
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "definitions", "$defs"})
_DATA = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are no schemas


def named_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The whole output is one function's arguments."""
    return parameters or {"type": "object"}


def required_schema(
    functions: Mapping[str, dict[str, Any] | None], *, max_calls: int | None = None
) -> dict[str, Any]:
    """The whole output is a list of calls, at least one.

    Definitions move to the root, where references begin. Those of a function that has another schema under a name
    that is taken there get the function's name before theirs.

    Args: functions: name -> schema of its parameters.
    Raises: InvalidRequest when a schema's `$defs` is no object.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for name, parameters in functions.items():
        schema = dict(parameters or {"type": "object", "properties": {}})
        own = schema.pop("$defs", {})
        if not isinstance(own, dict):
            raise InvalidRequest(f"The $defs of the function {name!r} must be an object.", param="tools")
        if any(definitions.get(each, known) != known for each, known in own.items()):
            prefix = f"{name}."
            while any(prefix + each in definitions for each in own):
                prefix += "."
            own = {prefix + each: _with_prefix(known, prefix) for each, known in own.items()}
            schema = _with_prefix(schema, prefix)
        definitions |= own
        calls.append(
            {
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
                "required": ["name", "parameters"],
            }
        )
    out: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if max_calls is not None:
        out["maxItems"] = max_calls
    if definitions:
        out["$defs"] = definitions
    return out


def _with_prefix(schema: Any, prefix: str) -> Any:
    """A copy that refers to definitions whose names begin with `prefix`. Cost: a step a level; JSON nests 200 deep."""
    if isinstance(schema, list):
        return [_with_prefix(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and value.startswith(_DEFINITION):
            out[keyword] = _DEFINITION + prefix + value.removeprefix(_DEFINITION)
        elif keyword in _BY_NAME and isinstance(value, dict):
            out[keyword] = {name: _with_prefix(each, prefix) for name, each in value.items()}
        else:
            out[keyword] = value if keyword in _DATA else _with_prefix(value, prefix)
    return out


def read_whole(
    plan: ToolPlan, text: str, new_id: NewId, *, was_cut: bool = False
) -> tuple[str, list[CallDelta], ToolParser]:
    """A whole output: its text, and its calls, each as one delta.

    A call of the model's own accord whose arguments are no JSON object makes all of it text, as with vLLM. One that
    max_tokens cut short (`was_cut`) is given as far as it got, as in a stream and as OpenAI does; so is a forced one.
    """
    parser = make_parser(plan, new_id)
    content, calls = "", []
    for delta in [*parser.feed(text), *parser.flush()]:
        if isinstance(delta, TextDelta):
            content += delta.text
        elif delta.name:
            calls.append(delta)
        else:
            calls[delta.index].arguments += delta.arguments
    whole = calls[:-1] if was_cut and parser.is_in_call else calls
    if plan.kind in ("hermes", "llama") and not all(_is_object(call.arguments) for call in whole):
        parser.num_calls = 0
        return text, [], parser
    return content, calls, parser


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def delta_json(delta: Delta) -> dict[str, Any]:
    """OpenAI's `delta` of a streamed chunk."""
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    function: dict[str, Any] = {"name": delta.name} if delta.name else {}
    call: dict[str, Any] = {"index": delta.index}
    if delta.name:
        call |= {"id": delta.id, "type": "function"}
    return {"tool_calls": [call | {"function": function | {"arguments": delta.arguments}}]}


def call_json(call: CallDelta) -> dict[str, Any]:
    """A complete call as in a message's `tool_calls`."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


__all__ = [
    "CallDelta", "Delta", "NewId", "TextDelta", "ToolFormat", "ToolParser", "ToolPlan", "call_json", "delta_json",
    "format_of", "make_parser", "named_schema", "read_whole", "required_schema",
]  # fmt: skip
