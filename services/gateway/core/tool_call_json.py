"""One tool call, {"name": ..., "arguments": {...}}, read from JSON text while it is being written. No I/O.

START -{-> KEY -string-> COLON -:-> VALUE -value-> NEXT -,-> KEY ... NEXT -}-> DONE; anything else -> BROKEN.

Only as strict as is needed to know where things end: strings, escapes and matching brackets. What lies inside
the arguments is the model's; OpenAI too passes on what the model wrote.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum

_SPACE = " \t\r\n"
_CLOSER = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\]*')  # inside a string
_DULL = re.compile(r'[^"{}\[\]]*')  # inside a value, outside a string
_SCALAR = re.compile(r"[^,}\]\s]*")
ARGUMENT_KEYS = ("arguments", "parameters")
_HARMLESS_KEYS = ("id", "type")  # written by some models beside the two that matter


@dataclass(slots=True)
class TextDelta:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class CallDelta:
    """A piece of a call. The first one of a call has id and name; arguments are appended to each other."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


Delta = TextDelta | CallDelta


class State(Enum):
    """Where a CallReader stands."""

    START = 0
    KEY = 1
    COLON = 2
    VALUE = 3
    NEXT = 4
    DONE = 5
    BROKEN = 6


class CallReader:
    """Feed text from the object's opening brace on.

    Args: strict_keys: a key that no call has makes it BROKEN, so that JSON meant as text is seen early.
    """

    __slots__ = (
        "_after_comma", "_at", "_closers", "_escaped", "_in_string", "_key", "_strict_keys", "_value_at",
        "arguments_at", "arguments_end", "name", "raw", "state",
    )  # fmt: skip

    def __init__(self, *, strict_keys: bool = False) -> None:
        self.raw = ""  # all text fed that belongs to the object
        self.state = State.START
        self.name: str | None = None
        self.arguments_at = -1  # where in `raw` the arguments begin; -1: not yet
        self.arguments_end = -1  # where they end; -1: not yet
        self._strict_keys = strict_keys
        self._at = 0
        self._key = ""
        self._value_at = -1  # start of the key or value being read; -1: between two
        self._in_string = False
        self._escaped = False  # the string's last character was a backslash
        self._closers: list[str] = []  # brackets that the value has open
        self._after_comma = False

    def feed(self, text: str) -> str:
        """Take text; returns what came after the object, "" until it is DONE or BROKEN.

        Cost: O(len(text)); every character is looked at once.
        """
        self.raw += text
        while self._at < len(self.raw) and self.state not in (State.DONE, State.BROKEN):
            self._step()
        if self.state in (State.DONE, State.BROKEN):
            rest, self.raw = self.raw[self._at :], self.raw[: self._at]
            return rest
        return ""

    @property
    def readable(self) -> int:
        """End of the arguments as far as they have been read."""
        return self._at if self.arguments_end < 0 else self.arguments_end

    def arguments(self) -> str:
        """The finished arguments as OpenAI's JSON text. Raises: ValueError when they are no object."""
        if self.arguments_at < 0:
            return "{}"  # a function without parameters, called without arguments
        text = self.raw[self.arguments_at : self.arguments_end]
        if text == "null":
            return "{}"
        if text.startswith('"'):  # encoded twice
            text = _string(text) or ""
        if not text.lstrip().startswith("{"):
            raise ValueError("arguments are no object")
        return text

    def _step(self) -> None:
        if self._value_at >= 0:
            self._read_on()
            return
        char = self.raw[self._at]
        if char in _SPACE:
            self._at += 1
            return
        state = self.state
        if state is State.START and char == "{":
            self.state = State.KEY
        elif state is State.KEY and char == '"':
            self._value_at, self._in_string = self._at, True
        elif (state is State.KEY and char == "}" and not self._after_comma) or (
            state is State.NEXT and char == "}"
        ):
            self.state = State.DONE if self.name else State.BROKEN
        elif state is State.COLON and char == ":":
            self.state = State.VALUE
        elif state is State.VALUE and char not in "}],:":
            self._begin_value(char)
            return
        elif state is State.NEXT and char == ",":
            self.state, self._after_comma = State.KEY, True
        else:
            self.state = State.BROKEN
            return
        self._at += 1

    def _begin_value(self, char: str) -> None:
        self._value_at = self._at
        if self._key in ARGUMENT_KEYS:
            if char not in '{"n' or self.arguments_at >= 0:
                self._value_at, self.state = -1, State.BROKEN
                return
            self.arguments_at = self._at
        if char in _CLOSER:
            self._closers.append(_CLOSER[char])
            self._at += 1
        elif char == '"':
            self._in_string = True
            self._at += 1

    def _read_on(self) -> None:
        """Continue the string, object, list or scalar that began at _value_at."""
        raw = self.raw
        if self._in_string:
            self._read_string()
            return
        if not self._closers:
            match = _SCALAR.match(raw, self._at)
            assert match is not None, "the pattern matches the empty string"
            self._at = match.end()
            if self._at < len(raw):
                self._end_value()
            return
        match = _DULL.match(raw, self._at)
        assert match is not None, "the pattern matches the empty string"
        self._at = match.end()
        if self._at == len(raw):
            return
        char = raw[self._at]
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char == self._closers[-1]:
            self._closers.pop()
        else:
            self.state = State.BROKEN
            return
        self._at += 1
        if not self._closers and not self._in_string:
            self._end_value()

    def _read_string(self) -> None:
        if self._escaped:
            self._at += 1
            self._escaped = False
            return
        match = _PLAIN.match(self.raw, self._at)
        assert match is not None, "the pattern matches the empty string"
        self._at = match.end()
        if self._at == len(self.raw):
            return
        self._escaped = self.raw[self._at] == "\\"
        self._at += 1
        if self._escaped:
            return
        self._in_string = False
        if not self._closers:
            self._end_value()

    def _end_value(self) -> None:
        text, self._value_at = self.raw[self._value_at : self._at], -1
        if self.state is State.KEY:
            self._key = _string(text) or ""
            known = self._key == "name" or self._key in ARGUMENT_KEYS or self._key in _HARMLESS_KEYS
            self.state = State.COLON if known or not self._strict_keys else State.BROKEN
            return
        self.state = State.NEXT
        if self._key == "name":
            self.name = _string(text)
            if not self.name:
                self.state = State.BROKEN
        elif self._key in ARGUMENT_KEYS:
            self.arguments_end = self._at
            if text[0] == "n" and text != "null":
                self.state = State.BROKEN


def _string(text: str) -> str | None:
    """The string that this JSON is. None if it is none, or one that no answer can carry: half a surrogate pair."""
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            value.encode()
            return value
    except (ValueError, RecursionError):
        pass
    return None
