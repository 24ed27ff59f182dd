"""From raw bytes to a validated body, and from pydantic's errors to OpenAI's: one message, one field."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from services.gateway.openai_size import check_size
from shared.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)

# In an error's path pydantic puts the branches of unions between the fields: "str", "list[TextPart]".
_FIELD = re.compile(r"[a-z][a-z_0-9]*\Z")
_NAMED = re.compile(r"(?:Missing required parameter: ')?([a-z][a-z_0-9]*(?:\[\d+\]|\.[a-z][a-z_0-9]*)*)[ ']")
_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "list", "dict", "none", "json_schema", "json_object", "text"}
)
_PARTS = ("TextPart", "RefusalPart")
_MAX_INPUT_CHARS = 80


def parse_body(model: type[Body], raw: bytes) -> Body:
    """A validated request body.

    Raises: InvalidRequest naming the field at fault in `param`; as check_size().
    Cost: about 10 us for a small chat; JSON nests at most 200 deep.
    """
    check_size(raw)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise validation_error(error) from None


def validation_error(error: ValidationError) -> InvalidRequest:
    """The first field at fault, in OpenAI's words. Of a union's branches, the one that got furthest."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    if not first["loc"]:
        if first["type"] == "json_invalid":
            return InvalidRequest(f"The request body is no valid JSON: {_lower(first['msg'])}.")
        if first["type"] in ("model_type", "model_attributes_type"):
            return InvalidRequest("The request body must be a JSON object.")
        # a check that spans fields; its message names them
        return InvalidRequest(f"{first['msg'].removeprefix('Value error, ')}.", param=_named(first["msg"]))
    same = [each for each in found if each["loc"][0] == first["loc"][0]]
    deepest = max(len(_path(each)) for each in same)
    best = [each for each in same if len(_path(each)) == deepest]
    param = _param(_path(best[0]))
    if best[0]["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    here = [each for each in best if _param(_path(each)) == param]
    here = [each for each in here if each["type"] == "too_long"] or here  # the branch that was meant
    reasons = dict.fromkeys(_lower(each["msg"]).removeprefix("value error, ") for each in here)
    text = " or ".join(
        [next(iter(reasons)), *(r.removeprefix("input should be ") for r in list(reasons)[1:])]
    )
    return InvalidRequest(f"Invalid value for '{param}': {text}{_got(here[0])}.", param=param)


def _path(error: ErrorDetails) -> tuple[str | int, ...]:
    """The fields and positions of an error's path, without pydantic's names for branches."""
    loc = error["loc"]
    return tuple(
        part for position, part in enumerate(loc) if isinstance(part, int) or _is_field(loc, position)
    )


def _is_field(loc: Sequence[str | int], position: int) -> bool:
    part, before = str(loc[position]), loc[position - 1]
    if position == 0:
        return True
    # response_format.json_schema.json_schema: first the branch, then the field
    return bool(_FIELD.match(part)) and (part not in _BRANCHES or part == before or before in _PARTS)


def _param(path: Sequence[str | int]) -> str:
    out = str(path[0])
    for part in path[1:]:
        out += f"[{part}]" if isinstance(part, int) else f".{part}"
    return out


def _named(message: str) -> str | None:
    """Field that a message about the whole body begins with, or says is missing."""
    found = _NAMED.match(message.removeprefix("Value error, "))
    return found and found[1]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _got(error: ErrorDetails) -> str:
    """What was found, when it is short and plain."""
    value: Any = error["input"]
    if isinstance(value, bool | int | float | str) and error["type"] != "value_error":
        shown = repr(value)
        if len(shown) <= _MAX_INPUT_CHARS:
            return f", got {shown}"
    return ""
