"""Fields that OpenAI or vLLM document and no engine of ours can honour: whoever sets one is told, not ignored.

Null, false and vLLM's own default ask for nothing and pass. Not here is what clients send unasked and what changes no
token of the answer: stream_options.continuous_usage_stats (benchmarks set it beside include_usage), priority,
truncation_side, request_id, and what only models that see or think would take.
"""

from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.json_schema import SkipJsonSchema

from services.gateway.openai_fields import Model, wrong


def _unless(*harmless: Any, use: str = "") -> AfterValidator:
    """Refuses all but null, false and these. By type too: prompt_logprobs 0 asks for something, false does not.

    Args: use: the field that does what this one did.
    """

    def check(value: Any) -> Any:
        if value is None or value is False or any(type(value) is type(h) and value == h for h in harmless):
            return value
        raise wrong(f"this server does not support the field; {f'use {use}' if use else 'leave it out'}")

    return AfterValidator(check)


Refused = Annotated[SkipJsonSchema[Any], _unless()]
RefusedList = Annotated[SkipJsonSchema[Any], _unless([])]
RefusedGuide = Annotated[SkipJsonSchema[Any], _unless([], use="structured_outputs")]


class RefusedFields(Model):
    """Of both completion routes."""

    allowed_token_ids: Refused = None
    bad_words: RefusedList = None
    cache_salt: Refused = None
    guided_choice: RefusedGuide = None
    guided_grammar: RefusedGuide = None
    guided_json: RefusedGuide = None
    guided_regex: RefusedGuide = None
    logprob_token_ids: RefusedList = None
    prompt_logprobs: Refused = None
    repetition_detection: Refused = None
    return_tokens_as_token_ids: Refused = None
    thinking_token_budget: Annotated[SkipJsonSchema[Any], _unless(-1)] = None
    truncate_prompt_tokens: Refused = None
    use_beam_search: Refused = None


class RefusedInChats(Model):
    """Of chats. What is called functions here has been tools since 2023."""

    audio: Refused = None
    echo: Refused = None
    function_call: Annotated[SkipJsonSchema[Any], _unless("none", "auto", use="tool_choice")] = None
    functions: Annotated[SkipJsonSchema[Any], _unless([], use="tools")] = None
    modalities: Annotated[SkipJsonSchema[Any], _unless(["text"])] = None


class RefusedRendering(Model):
    """Of what renders a chat."""

    chat_template: Refused = None
    documents: RefusedList = None
