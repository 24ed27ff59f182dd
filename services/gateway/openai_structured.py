"""Grammars for the output, from the fields that ask for one: vLLM's structured_outputs and schemas."""

import json
from typing import Annotated, Any

from pydantic import Field

from services.gateway.openai_fields import Model
from services.gateway.openai_refused import Refused
from shared.errors import InvalidRequest
from shared.grammar_limits import MAX_GRAMMAR_CHARS, too_large
from shared.wire.requests import StructuredSpec


class StructuredOutputs(Model):
    """vLLM's extension: exactly one grammar for the output."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_GRAMMAR_CHARS, fail_fast=True)] | None = None
    grammar: str | None = None
    structural_tag: Refused = None

    @property
    def is_empty(self) -> bool:
        """Whether it asks for nothing."""
        asked = (self.json_, self.regex, self.choice, self.grammar)
        return not self.json_object and all(each is None for each in asked)

    def spec(self) -> StructuredSpec | None:
        """None when it asks for nothing. Raises: InvalidRequest when it asks for two, or too much."""
        found: list[StructuredSpec] = []
        if isinstance(self.json_, str):
            found.append(StructuredSpec(kind="json_schema", value=self.json_))
        elif self.json_ is not None:
            found.append(schema_spec(self.json_, "structured_outputs"))
        if self.json_object:
            found.append(StructuredSpec(kind="json_object"))
        if self.regex is not None:
            found.append(StructuredSpec(kind="regex", value=self.regex))
        if self.choice is not None:
            found.append(StructuredSpec(kind="choice", value=json.dumps(self.choice)))
        if self.grammar is not None:
            found.append(StructuredSpec(kind="grammar", value=self.grammar))
        if len(found) > 1:
            raise InvalidRequest("Only one kind of structured output is allowed.", param="structured_outputs")
        return _checked(found[0], "structured_outputs") if found else None


def schema_spec(schema: dict[str, Any], param: str) -> StructuredSpec:
    """JSON of this schema, which the field `param` asks for.

    Raises: InvalidRequest when it holds NaN, or more than engines are to work out.
    """
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequest(f"The schema in '{param}' is no JSON.", param=param) from None
    return _checked(StructuredSpec(kind="json_schema", value=text), param)


def _checked(spec: StructuredSpec, param: str) -> StructuredSpec:
    if reason := too_large(spec):
        raise InvalidRequest(f"Invalid value for '{param}': {reason}.", param=param)
    return spec
