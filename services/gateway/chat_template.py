"""A model's chat template in the sandbox that Hugging Face renders it in.

Templates are code from the model's folder, messages come from strangers: the sandbox keeps both away from
Python's insides, and the output's length is bounded.
"""

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest, SettingsError

MAX_RENDERED_CHARS = 32 << 20
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own
_DICT_ATTRIBUTES = frozenset(dir(dict))
_ASKS_FOR_NONE = re.compile(r"content['\"\])]*\s*(?:\bis\s+(?:not\s+)?|[!=]=\s*)[Nn]one\b")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The enclosed nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's, with a short way to the fields of messages."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: no attribute of a dictionary, so jinja2 would raise, catch and then do the same."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes HTML, which would change the prompt."""
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    if indent is None:  # about as long as the body's
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)
    return _joined(json.JSONEncoder(ensure_ascii=ensure_ascii, **form).iterencode(value))


def _joined(pieces: Iterable[str]) -> str:
    out: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise InvalidRequest(
                f"The rendered chat exceeds {MAX_RENDERED_CHARS} characters.", param="messages"
            )
        out.append(piece)
    return "".join(out)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # noqa: DTZ005 - the machine's time, as Hugging Face


class ChatTemplate:
    """One compiled template.

    Args: special_tokens: bos_token, eos_token and so on, which templates print.
    Raises: SettingsError when the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError(f"the model's chat template does not compile: {error}") from error
        # A chain of maps, which jinja2 copies for every rendering: 9 us; a dictionary takes 1.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source
        self._asks_for_none = _ASKS_FOR_NONE.search(source) is not None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat.

        Args:
            continue_final_message: cut behind the last message's content, so that the model goes on with it.
            extra: further variables of the template, which the caller chose.
        Raises: InvalidRequest when the template refuses the messages or the output is too long.
        Cost: about 30 us for a small chat.
        """
        if extra and not _RESERVED.isdisjoint(extra):
            raise InvalidRequest(
                "chat_template_kwargs must not name messages, tools or add_generation_prompt.",
                param="chat_template_kwargs",
            )
        if not self._knows_developer:  # OpenAI's newer word for system
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if not self._asks_for_none:  # beside tool calls; it would be printed as "None", or fail
            messages = [m | {"content": ""} if m.get("content", "") is None else m for m in messages]
        if continue_final_message:
            messages = _marked(messages)
        variables = {
            **self._special_tokens,
            **(extra or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # what its generate() does, without a generator around this one
            text = _joined(self._template.root_render_func(self._template.new_context(variables)))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"Chat template: {error.message}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"The chat template cannot render these messages: {error}", param="messages"
            ) from error
        return _cut(text) if continue_final_message else text


def _marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark behind the last one's content."""
    final = messages[-1].get("content")
    if not final or not final.strip():
        raise InvalidRequest(
            "continue_final_message needs a last message with content.", param="continue_final_message"
        )
    return [*messages[:-1], messages[-1] | {"content": final + _MARK}]


def _cut(text: str) -> str:
    """The rendered chat before the mark; its space shows whether the template trims contents."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise InvalidRequest(
            "continue_final_message is set, but the chat template does not show the last message.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
