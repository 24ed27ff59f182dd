"""Tool calls in a model's output: incremental parsers for each way of writing them. No I/O.

A parser takes text as it comes and gives text and call pieces in OpenAI's form: the first piece of a call has
its name, the others append to its arguments. Nothing that may still be the start of a call is given as text.
Text that begins as a call and turns out not to be one is given as the text that it is; once a name has been
given there is no way back, and what the model writes goes out as arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.gateway.core.stop import overlap
from services.gateway.core.tool_call_json import CallDelta, CallReader, Delta, State, TextDelta

NewId = Callable[[], str]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How to read one request's output. `name`: of the only function, for "named"."""

    kind: Literal["hermes", "llama", "required", "named"]
    name: str = ""
    max_calls: int | None = None


class ToolParser(ABC):
    """Reads one choice's output. feed() any number of times, then flush() once."""

    def __init__(self, plan: ToolPlan, new_id: NewId) -> None:
        self.plan = plan
        self.num_calls = 0
        self._new_id = new_id
        self._out: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """What this text adds, in order."""
        self._take(text)
        out, self._out = self._out, []
        return out

    def flush(self) -> list[Delta]:
        """The output has ended: what was held back."""
        self._end()
        out, self._out = self._out, []
        return out

    @property
    def is_in_call(self) -> bool:
        """The output, as far as it goes, ends within a call that has been announced."""
        return False

    def finish_reason(self, reason: str) -> str:
        """OpenAI's reason: an output that ends by itself after calls ends with "tool_calls"."""
        return "tool_calls" if reason == "stop" and self.num_calls and self.plan.kind != "named" else reason

    @abstractmethod
    def _take(self, text: str) -> None:
        """Read on; give what is found to _text, _announce and _append."""

    @abstractmethod
    def _end(self) -> None:
        """Give what was held back."""

    def _text(self, text: str) -> None:
        if not text:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, TextDelta):
            last.text += text
        else:
            self._out.append(TextDelta(text))

    def _announce(self, name: str) -> None:
        self._out.append(CallDelta(self.num_calls, "", self._new_id(), name))
        self.num_calls += 1

    def _append(self, arguments: str) -> None:
        if not arguments:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, CallDelta) and not last.name:
            last.arguments += arguments
        else:
            self._out.append(CallDelta(self.num_calls - 1, arguments))


class NamedParser(ToolParser):
    """All output is the arguments of the function that tool_choice names."""

    def _take(self, text: str) -> None:
        if not self.num_calls and text:
            self._announce(self.plan.name)
        self._append(text)

    def _end(self) -> None:
        if not self.num_calls:
            self._announce(self.plan.name)


class JsonCallParser(ToolParser):
    """Base of the parsers of calls that are JSON objects; subclasses know what stands around them.

    TEXT -opening-> CALL -object ends-> AFTER -opening-> CALL; AFTER -anything else-> TEXT;
    CALL -no call-> TEXT, or RAW when its name has been given already.
    """

    strict_keys = False
    may_lack_arguments = True  # what has a name alone is a call, too

    def __init__(self, plan: ToolPlan, new_id: NewId) -> None:
        super().__init__(plan, new_id)
        self._read: Callable[[str], str] = self._read_text
        self._reader = CallReader()
        self._opening = ""  # text before the object, for when it is no call
        self._held = ""  # text that is not yet known to be anything
        self._blanks: list[str] = []  # white space before it that is not looked at again, for it may be long
        self._announced = False
        self._sent_to = 0  # arguments given so far, as a place in the reader's text
        self._skips = False  # this call is one too many

    @property
    def is_in_call(self) -> bool:
        """See ToolParser."""
        return self._read == self._read_call and self._announced

    def _take(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._read(text)

    def _end(self) -> None:
        if self._read == self._read_call and not self._announced:
            self._give_up("")
        elif self._read == self._read_text:
            self._text(self._take_blanks() + self._held)
        elif self._read == self._read_raw and not self._skips:
            self._append(self._held)
        self._held = ""

    def _take_blanks(self) -> str:
        blanks, self._blanks = self._blanks, []
        return "".join(blanks)

    @abstractmethod
    def _read_text(self, text: str) -> str:
        """Read on as text. Returns what is left to read in another state; holds back what it cannot tell."""

    @abstractmethod
    def _read_after(self, text: str) -> str:
        """The same, after a call."""

    def _begin_call(self, opening: str) -> None:
        self._reader = CallReader(strict_keys=self.strict_keys)
        self._opening, self._announced, self._sent_to = opening, False, 0
        self._skips = self.plan.max_calls is not None and self.num_calls >= self.plan.max_calls
        self._read = self._read_call

    def _read_call(self, text: str) -> str:
        reader = self._reader
        rest = reader.feed(text)
        if reader.state is State.BROKEN and not self._announced:
            return self._give_up(rest)
        if not self._skips:
            self._give_arguments()
        if reader.state is State.DONE and not self._announced and not self._skips:
            if reader.arguments_at < 0 and not self.may_lack_arguments:
                return self._give_up(rest)
            try:
                arguments = reader.arguments()
            except ValueError:
                return self._give_up(rest)
            assert reader.name is not None, "a call that is done has a name"
            self._announce(reader.name)
            self._append(arguments)
        if reader.state is State.BROKEN:
            if not self._skips:
                self._append(reader.raw[self._sent_to :])
            self._read = self._read_raw
        elif reader.state is State.DONE:
            self._read = self._read_after
        return rest

    def _give_arguments(self) -> None:
        """The name as soon as an object of arguments has begun, then its text as it grows."""
        reader = self._reader
        if not self._announced:
            if reader.name is None or reader.arguments_at < 0 or reader.raw[reader.arguments_at] != "{":
                return
            self._announced, self._sent_to = True, reader.arguments_at
            self._announce(reader.name)
        end = reader.readable
        self._append(reader.raw[self._sent_to : end])
        self._sent_to = max(self._sent_to, end)

    def _give_up(self, rest: str) -> str:
        """No call after all. What has been read is text and is not looked at again."""
        if not self._skips:
            self._text(self._opening + self._reader.raw)
        self._read = self._read_text
        return rest

    def _read_raw(self, text: str) -> str:
        """After arguments that are no JSON: the rest belongs to them."""
        if not self._skips:
            self._append(text)
        return ""


class HermesParser(JsonCallParser):
    """`<tool_call>{...}</tool_call>`, any number of them, with text before, between and after."""

    def __init__(self, plan: ToolPlan, new_id: NewId) -> None:
        super().__init__(plan, new_id)
        self._blank = True  # no text given since the start or the last call

    def _read_text(self, text: str) -> str:
        at = text.find(HERMES_OPEN)
        if at < 0:
            keep = overlap(text, HERMES_OPEN)
            safe = text[: len(text) - keep]
            if self._blank and not safe.strip():  # white space alone before a call says nothing
                self._blanks.append(safe)
                self._held = text[len(text) - keep :]
                return ""
            self._blank = False
            self._text(self._take_blanks() + safe)
            self._held = text[len(text) - keep :]
            return ""
        opening = HERMES_OPEN
        if self._blank and not text[:at].strip():
            opening = self._take_blanks() + text[: at + len(HERMES_OPEN)]
        else:
            self._text(self._take_blanks() + text[:at])
        self._begin_call(opening)
        return text[at + len(HERMES_OPEN) :]

    def _read_after(self, text: str) -> str:
        rest = text.lstrip(_SPACE)
        if rest.startswith(HERMES_CLOSE):
            rest = rest[len(HERMES_CLOSE) :]
        elif HERMES_CLOSE.startswith(rest):
            self._held = rest
            return ""
        self._read, self._blank = self._read_text, True
        return rest

    def _read_raw(self, text: str) -> str:
        at = text.find(HERMES_CLOSE)
        if at < 0:
            keep = overlap(text, HERMES_CLOSE)
            super()._read_raw(text[: len(text) - keep])
            self._held = text[len(text) - keep :]
            return ""
        super()._read_raw(text[:at])
        self._read, self._blank = self._read_text, True
        return text[at + len(HERMES_CLOSE) :]


class LlamaParser(JsonCallParser):
    """Llama 3's JSON: output begins with `{`, or a `<|python_tag|>` stands before it; `;` between calls.

    Without the tag an object that has a name, but no arguments, is an answer in JSON, as with vLLM.
    """

    strict_keys = True
    may_lack_arguments = False

    def __init__(self, plan: ToolPlan, new_id: NewId) -> None:
        super().__init__(plan, new_id)
        self._fresh = True  # a call may begin here without a tag

    def _read_text(self, text: str) -> str:
        if self._fresh:
            rest = text.lstrip(_SPACE)
            if not rest or (LLAMA_TAG.startswith(rest) and rest != LLAMA_TAG):
                self._blanks.append(text[: len(text) - len(rest)])
                self._held = rest
                return ""
            self._fresh = False
            text = self._take_blanks() + text
            if rest[0] == "{":
                self._begin_call(text[: len(text) - len(rest)])
                return rest
        at = text.find(LLAMA_TAG)
        if at < 0:
            keep = overlap(text, LLAMA_TAG)
            self._text(text[: len(text) - keep])
            self._held = text[len(text) - keep :]
            return ""
        self._text(text[:at])
        self._fresh = self.may_lack_arguments = True
        return text[at + len(LLAMA_TAG) :]

    def _read_after(self, text: str) -> str:
        rest = text.lstrip(_SPACE + ";")
        if not rest:
            return ""
        self._read, self._fresh = self._read_text, True
        return rest


class RequiredParser(JsonCallParser):
    """A JSON list of calls, as required_schema() describes it. Where it was cut short, it is no text for a user."""

    def _end(self) -> None:
        """Nothing: what is held back is a piece of the list."""

    def _read_text(self, text: str) -> str:
        rest = text.lstrip(_SPACE)
        if not rest:
            self._blanks.append(text)
            return ""
        blanks = self._take_blanks()
        if rest[0] != "[":  # the engine did not hold to the schema
            self._read = self._read_plain
            return blanks + text
        self._read = self._read_after
        return rest[1:]

    def _read_plain(self, text: str) -> str:
        self._text(text)
        return ""

    def _read_after(self, text: str) -> str:
        rest = text.lstrip(_SPACE + ",")
        if rest.startswith("{"):
            self._begin_call("")
            return rest
        if rest:
            self._read = self._read_nothing if rest[0] == "]" else self._read_plain
        return rest

    def _read_nothing(self, text: str) -> str:
        """After the end of the list."""
        del text
        return ""


_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama": LlamaParser,
    "required": RequiredParser,
    "named": NamedParser,
}


def make_parser(plan: ToolPlan, new_id: NewId) -> ToolParser:
    """A parser for one choice. `new_id` gives a new call's id."""
    return _PARSERS[plan.kind](plan, new_id)
