"""OpenAI's request bodies, with vLLM's extensions, and what they mean for the engine.

Null means absent everywhere, as with OpenAI. What no engine of ours can do is refused, not ignored (openai_refused.py).
"""

from abc import abstractmethod
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field, model_validator

from services.gateway.core.tools import ToolFormat, ToolPlan, named_schema, required_schema
from services.gateway.openai_errors import parse_body, validation_error
from services.gateway.openai_fields import (
    JsonObjectFormat,
    JsonSchemaFormat,
    LogitBias,
    Messages,
    Model,
    NamedTool,
    Prompt,
    ResponseFormat,
    Stop,
    StopIds,
    StreamOptions,
    TokenIds,
    Tools,
    check_messages,
    template_messages,
    template_tools,
)
from services.gateway.openai_refused import Refused, RefusedFields, RefusedInChats, RefusedRendering
from services.gateway.openai_structured import StructuredOutputs, schema_spec
from shared.errors import InvalidRequest
from shared.wire.placement import MAX_CHOICES
from shared.wire.requests import GREEDY_BELOW, SamplingSpec, StructuredSpec, too_many

Value = TypeVar("Value")

MAX_LOGPROBS = 20
MAX_INT64 = (1 << 63) - 1
MIN_TOP_P = 1e-6  # OpenAI allows 0, engines do not; this keeps the most likely token only
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the legacy route


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What applies when the body is silent: generation_config.json, where it speaks (vLLM does the same)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class SamplingBody(RefusedFields):
    """Fields that both completion routes have."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    quire_receipt: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        """`n`, 1 by default."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        """Stop strings, possibly none."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether special tokens appear in the output's text."""
        return self.skip_special_tokens is False

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives at each output token; 0: the sampled token alone; None: no log probabilities."""

    @property
    def max_output_tokens(self) -> int | None:
        """Most tokens to generate; None: what the context has left."""
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        """The field that max_output_tokens is of; "": a default."""
        return "" if self.max_tokens is None else "max_tokens"

    @property
    def grammar_field(self) -> str:
        """The field that structured() is made of; "": nothing asks for a grammar."""
        if self.structured_outputs is not None and not self.structured_outputs.is_empty:
            return "structured_outputs"
        return (
            "response_format" if isinstance(self.response_format, JsonObjectFormat | JsonSchemaFormat) else ""
        )

    def structured(self) -> StructuredSpec | None:
        """The grammar that the output must follow. Raises: InvalidRequest."""
        form = self.response_format
        if self.structured_outputs is not None and not self.structured_outputs.is_empty:
            return self.structured_outputs.spec()
        if isinstance(form, JsonObjectFormat):
            return StructuredSpec(kind="json_object")
        if isinstance(form, JsonSchemaFormat):
            return schema_spec(form.json_schema.schema_, "response_format")
        return None


class ChatBody(SamplingBody, RefusedInChats, RefusedRendering):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if not any(tool.function.name == name for tool in self.tools or ()):
                raise ValueError(f"tool_choice names {name[:64]!r}, which is not among the tools")
        elif self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice 'required' needs tools")
        check_messages(
            self.messages, continued=self.continue_final_message, generated=self.add_generation_prompt
        )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See SamplingBody."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        """max_completion_tokens, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_field(self) -> str:
        """See SamplingBody."""
        return super().max_tokens_field if self.max_completion_tokens is None else "max_completion_tokens"

    def template_messages(self) -> list[dict[str, Any]]:
        """See openai_fields. Raises: InvalidRequest when a call's arguments are no valid Unicode."""
        return template_messages(self.messages)

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Tools for the template, also under tool_choice "none": the prompt and its cached prefix stay."""
        return template_tools(self.tools)

    def tool_plan(self, auto: ToolFormat) -> ToolPlan | None:
        """How to read calls from the output; None: it has none. `auto`: the model's own format."""
        if not self.tools or self.tool_choice == "none":
            return None
        most = 1 if self.parallel_tool_calls is False else None
        if isinstance(self.tool_choice, NamedTool):
            return ToolPlan(kind="named", name=self.tool_choice.function.name, max_calls=1)
        if self.tool_choice == "required":
            return ToolPlan(kind="required", max_calls=most)
        return ToolPlan(kind=auto, max_calls=most) if auto != "none" else None

    @property
    def grammar_field(self) -> str:
        """See SamplingBody. A forced call's grammar comes before any other."""
        is_forced = self.tools and self.tool_choice not in (None, "none", "auto")
        return "tools" if is_forced else super().grammar_field

    def structured(self) -> StructuredSpec | None:
        """See SamplingBody. Raises: InvalidRequest."""
        if not self.tools or self.tool_choice in (None, "none", "auto"):
            return super().structured()
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        if isinstance(self.tool_choice, NamedTool):
            schema = named_schema(schemas[self.tool_choice.function.name])
        else:
            schema = required_schema(schemas, max_calls=1 if self.parallel_tool_calls is False else None)
        return schema_spec(schema, "tools")


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Refused = None

    @model_validator(mode="after")
    def _nothing_unsupported(self) -> "CompletionBody":
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError("best_of must equal n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: nothing would be answered")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See SamplingBody."""
        return self.logprobs

    @property
    def max_output_tokens(self) -> int:
        """See SamplingBody."""
        return _or(self.max_tokens, COMPLETION_MAX_TOKENS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids. Cost: none; check_prompt() has looked at every id."""
        given = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class TokenizeBody(RefusedRendering):
    """POST /tokenize: a prompt, or messages that the chat template renders first, as it would for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages is needed, and not both")
        check_messages(
            self.messages or [], continued=self.continue_final_message, generated=self.add_generation_prompt
        )
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        """See openai_fields. Raises: InvalidRequest when a call's arguments are no valid Unicode."""
        return template_messages(self.messages or [])

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Tools for the template."""
        return template_tools(self.tools)


class DetokenizeBody(Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


def to_sampling(
    body: SamplingBody,
    *,
    default_max_tokens: int,
    random_seed: int,
    defaults: SamplingDefaults | None = None,
    vocab_size: int = 0,
) -> SamplingSpec:
    """What the engine is told.

    Args:
        default_max_tokens: when the body names none.
        random_seed: of a request that samples and brings no seed, so that the prefill and the decode instance
            draw the same token. -1 counts as no seed: vLLM reads it so.
        vocab_size: 0 leaves token ids unchecked.
    Raises: InvalidRequest naming the field.
    """
    known = defaults or SamplingDefaults()
    temperature = _or(body.temperature, known.temperature)
    seed = None if body.seed == -1 else body.seed
    seed_is_free = seed is None and temperature >= GREEDY_BELOW
    if seed_is_free:
        seed = random_seed
    max_tokens = _or(body.max_output_tokens, default_max_tokens)
    if (body.min_tokens or 0) > max_tokens:
        most = body.max_tokens_field or "the default of max_tokens"
        raise InvalidRequest(f"min_tokens must be at most {most}, which is {max_tokens}.", param="min_tokens")
    bias = {int(key): float(value) for key, value in (body.logit_bias or {}).items()}
    stop_ids: list[int] = sorted(set(body.stop_token_ids or []))
    for ids, param in ((bias, "logit_bias"), (stop_ids, "stop_token_ids")):
        if vocab_size and ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequest(
                f"Invalid value for '{param}': token ids are 0 to {vocab_size - 1}.", param=param
            )
    num_logprobs = body.num_logprobs
    spec = SamplingSpec(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        n=body.num_choices,
        temperature=temperature,
        top_p=max(_or(body.top_p, known.top_p), MIN_TOP_P),
        top_k=max(_or(body.top_k, known.top_k), 0),
        min_p=_or(body.min_p, known.min_p),
        seed=seed,
        seed_is_free=seed_is_free,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, known.repetition_penalty),
        logit_bias=bias,
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=num_logprobs,
        prompt_logprobs=num_logprobs if isinstance(body, CompletionBody) and body.echo else None,
        structured=body.structured(),
    )
    if found := too_many(spec):
        raise InvalidRequest(found[1], param=found[0])
    return spec


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


__all__ = [
    "ChatBody", "CompletionBody", "DetokenizeBody", "SamplingBody", "SamplingDefaults", "TokenizeBody",
    "parse_body", "to_sampling", "validation_error",
]  # fmt: skip
