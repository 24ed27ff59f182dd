"""Pieces of OpenAI's request bodies: messages, tools, formats, and checks that pydantic has no word for.

Every list and dictionary that pydantic checks by elements has a `max_length` and fails at its first fault: else there
is an error for each element and each branch of a union, 3 KB for 2 bytes of a body.
"""

import json
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.gateway.openai_size import MAX_FREE_BYTES
from shared.errors import InvalidRequest
from shared.wire.requests import MAX_LOGIT_BIAS, MAX_STOP_LIST

MAX_ITEMS = 8192  # messages of a chat, parts of a content, calls of a turn
MAX_TOOLS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_ID_DIGITS = 10  # of a token id as a key
MAX_PROMPTS = 256
_INTS = frozenset({int})  # not bool, which is a subclass

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_ITEMS = Field(max_length=MAX_ITEMS, fail_fast=True)


def wrong(message: str) -> PydanticCustomError:
    """A fault of a value, for a validator to raise; pydantic adds where."""
    return PydanticCustomError("value_error", "{reason}", {"reason": message})


class Model(BaseModel):
    """Known keys have exactly the documented types; unknown keys are ignored, as vLLM does."""

    model_config = _STRICT


# -- messages and tools -----------------------------------------------------------------------------------


class TextPart(TypedDict):
    """What a text model takes."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    """What an assistant said instead of an answer; text for the model, too."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["refusal"]
    refusal: str


class CalledFunction(TypedDict):
    """A function and its arguments as JSON text."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    name: str
    arguments: str


class _ToolCallBase(TypedDict):
    function: CalledFunction


class ToolCall(_ToolCallBase, total=False):
    """A call that the assistant made in an earlier turn."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    id: str
    type: Literal["function"]


class _MessageBase(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]


class Message(_MessageBase, total=False):
    """One turn; a dict, because that is what chat templates read."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    content: str | Annotated[list[TextPart | RefusalPart], _ITEMS] | None
    refusal: str | None  # an assistant's, in place of content as a rule
    name: str | None
    tool_calls: Annotated[list[ToolCall], _ITEMS] | None
    tool_call_id: str | None
    function_call: SkipJsonSchema[Any]  # refused: templates know tool calls only
    reasoning_content: str | None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Function(BaseModel):
    """A function that the model may call. `parameters` is its JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Model):
    """Of the only type that there is."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Model):
    """Names one of the tools."""

    name: str


class NamedTool(Model):
    """tool_choice that leaves no choice."""

    type: Literal["function"]
    function: FunctionName


def check_tools(tools: list[Tool]) -> list[Tool]:
    """Names are unique: an answer names the tool it calls."""
    counted = Counter(tool.function.name for tool in tools)
    for name, count in counted.items():
        if count > 1:
            raise wrong(f"the function name {name!r} appears {count} times")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_tools)]


def check_messages(messages: list[Message], *, continued: bool | None, generated: bool | None) -> None:
    """What no type says of a chat. `continued`: continue_final_message; `generated`: add_generation_prompt.

    Raises: ValueError that begins with the field, or says that it is missing.
    """
    if continued and generated:
        raise ValueError("continue_final_message excludes add_generation_prompt")
    for position, message in enumerate(messages):
        content, role = message.get("content"), message["role"]
        if message.get("function_call") is not None:
            raise ValueError(f"messages[{position}].function_call is not supported; use tool_calls")
        refuses = message.get("refusal") is not None
        if content is None and not refuses and not message.get("tool_calls"):
            if role == "assistant" and "content" in message:
                continue  # an assistant that said nothing: OpenAI's SDK sends content null
            raise ValueError(f"Missing required parameter: 'messages[{position}].content'")
        if role == "assistant":
            continue
        if refuses or (isinstance(content, list) and any("refusal" in part for part in content)):
            field = f"messages[{position}].{'refusal' if refuses else 'content'}"
            raise ValueError(f"{field} refuses, which only an assistant may do")


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: content as text, arguments of calls as objects.

    Raises: InvalidRequest when a call's arguments are no valid Unicode.
    """
    return [_template_message(message, position) for position, message in enumerate(messages)]


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as the caller wrote them; None when there are none."""
    if not tools:
        return None
    return [{"type": "function", "function": tool.function.model_dump(exclude_unset=True)} for tool in tools]


def _template_message(message: Message, position: int) -> dict[str, Any]:
    out: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        # joined in vLLM's way for text templates
        out["content"] = "\n".join(part["text"] if "text" in part else part["refusal"] for part in content)
    elif content is None:
        out["content"] = None if message.get("tool_calls") else ""
    if refusal := out.pop("refusal", None):
        out["content"] = f"{out['content']}\n{refusal}" if out["content"] else refusal
    calls = message.get("tool_calls")
    if calls:
        out["tool_calls"] = [
            _template_call(dict(call), f"messages[{position}].tool_calls[{number}]")
            for number, call in enumerate(calls)
        ]
    elif "tool_calls" in out:
        del out["tool_calls"]
    return out


def _template_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """Templates print arguments themselves, so they want the object, as transformers documents.

    A model may have written something else, which clients send back as they got it: it is shown what it wrote.
    """
    text = call["function"]["arguments"]
    try:
        # objects of so long a text are made for seconds, without a turn for the loop
        is_long = len(text) > MAX_FREE_BYTES
        arguments = None if is_long else json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = text
    elif "\\u" in text:  # half a surrogate pair, which no tokenizer takes, comes as an escape only
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            param = f"{field}.function.arguments"
            raise InvalidRequest(f"{param} is no valid Unicode.", param=param) from None
    return {**call, "type": "function", "function": {**call["function"], "arguments": arguments}}


# -- formats ----------------------------------------------------------------------------------------------


class JsonSchema(Model):
    """The schema of response_format json_schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Model):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Model):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Model):
    """JSON of one schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Model):
    """Of a streamed answer."""

    include_usage: bool | None = None


# -- plain fields -----------------------------------------------------------------------------------------


def _check_stop(value: str | list[str]) -> str | list[str]:
    for stop in [value] if isinstance(value, str) else value:
        if not stop:
            raise wrong("a stop string must not be empty")
        if len(stop) > MAX_STOP_CHARS:
            raise wrong(f"a stop string has at most {MAX_STOP_CHARS} characters")
    return value


def _check_bias(value: dict[str, float]) -> dict[str, float]:
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise wrong(f"keys are token ids, got {key[:32]!r}")
        if not -100.0 <= bias <= 100.0:
            raise wrong(f"values lie between -100 and 100, got {bias} for {key}")
    return value


def is_token_list(value: Any) -> bool:
    """Whether this is a non-empty list of ints, none a bool. Cost: about 10 ns an element."""
    return isinstance(value, list) and bool(value) and _INTS.issuperset(map(type, value))


def check_prompt(value: Any) -> Any:
    """One of the four forms of a completion's prompt; by hand, because a union would try each on every id."""
    if isinstance(value, str) or is_token_list(value):
        return value
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS:
            raise wrong(f"at most {MAX_PROMPTS} prompts are allowed, got {len(value)}")
        if all(isinstance(each, str) for each in value) or all(is_token_list(each) for each in value):
            return value
    raise wrong("a prompt is a string, a list of strings, a list of token ids or a list of lists of them")


def _check_ids(value: Any) -> Any:
    if value == [] or is_token_list(value):
        return value
    raise wrong("a list of token ids is wanted")


_IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ]
}

Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)], AfterValidator(_check_stop)
]
LogitBias = Annotated[
    dict[str, float], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True), AfterValidator(_check_bias)
]
Prompt = Annotated[Any, AfterValidator(check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
TokenIds = Annotated[Any, AfterValidator(_check_ids), WithJsonSchema(_IDS_SCHEMA)]
StopIds = Annotated[TokenIds, Field(max_length=MAX_STOP_LIST)]
