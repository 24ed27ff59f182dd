"""Token ids to text, as they come.

Tokenizers whose decoder is ByteLevel (GPT-2, Llama 3, Qwen, DeepSeek, the demo model) spell every token as bytes,
so their text is a table and an incremental UTF-8 decoder: exact for any ids, 0.2 us a token. All others
(sentencepiece's kind) go through tokenizers' DecodeStream, about 1.5 us a token.
"""

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.gateway.core.tool_parsers import HERMES_CLOSE, HERMES_OPEN, LLAMA_TAG

PRIMER_TOKENS = 16
TOOL_TOKENS = frozenset({HERMES_OPEN, HERMES_CLOSE, LLAMA_TAG})
INVALID_PREFIX = "Invalid prefix encountered"


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins: code point -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out = {code: code for code in printable}
    spare = 256
    for byte in range(256):
        if byte not in out:
            out[spare] = byte
            spare += 1
    return out


_Utf8 = codecs.getincrementaldecoder("utf-8")
_BYTE_OF = _byte_alphabet()
_STAND_INS = frozenset(map(chr, _BYTE_OF))
STAND_IN_OF = {byte: chr(code) for code, byte in _BYTE_OF.items()}  # for str.translate of an ASCII text


def spelled_bytes(token: str) -> bytes:
    """Bytes of a token as the ByteLevel decoder reads it: stand-ins for bytes, unless one character is none."""
    if _STAND_INS.issuperset(token):
        return token.translate(_BYTE_OF).encode("latin-1")
    return token.encode()


class Detokenizer(Protocol):
    """One choice's incremental text: a character whose bytes span tokens appears with its last token."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often all of its own."""
        ...

    def feed_apart(self, token_id: int) -> tuple[str, str]:
        """The same in two: what tokens before left incomplete for good, and from where this one begins."""
        ...

    def flush(self) -> str:
        """The output has ended: an incomplete last character, as replacement characters."""
        ...


class ByteTable:
    """Every token's bytes and text, for tokenizers with a ByteLevel decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        self.texts: list[str | None] = [""] * size  # None: no whole characters
        self.fragments: dict[int, bytes] = {}  # of those
        self.longest_bytes = 1
        for token, token_id in vocabulary.items():
            spelled = spelled_bytes(token)
            self.longest_bytes = max(self.longest_bytes, len(spelled))
            try:
                self.texts[token_id] = spelled.decode()
            except UnicodeDecodeError:
                self.texts[token_id] = None
                self.fragments[token_id] = spelled
        self.shown = self.texts.copy()  # without special tokens
        self.shown_with_tools = self.shown.copy()  # but with those that open and close tool calls
        for token_id, added in tokenizer.get_added_tokens_decoder().items():
            if added.special:
                self.shown[token_id] = ""
                if added.content not in TOOL_TOKENS:
                    self.shown_with_tools[token_id] = ""

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id without a token."""
        text = self.texts[token_id] if 0 <= token_id < len(self.texts) else ""
        return self.fragments[token_id] if text is None else text.encode()


class ByteDetokenizer:
    """See Detokenizer. Equals tokenizer.decode() of all ids, whatever they are.

    Args: show_tool_tokens: do not skip the special tokens that stand around tool calls; parsers need them.
    """

    __slots__ = ("_decode", "_decoder", "_fragments", "_is_split", "_texts")

    def __init__(
        self, table: ByteTable, *, skip_special_tokens: bool = True, show_tool_tokens: bool = False
    ) -> None:
        if skip_special_tokens:
            self._texts = table.shown_with_tools if show_tool_tokens else table.shown
        else:
            self._texts = table.texts
        self._fragments = table.fragments
        self._decoder: codecs.IncrementalDecoder | None = None  # most choices never split a character
        self._is_split = False  # the decoder holds the beginning of a character

    def feed(self, token_id: int) -> str:
        """See Detokenizer."""
        try:
            text = self._texts[token_id]
        except IndexError:  # an id between the tokenizer's vocabulary and the model's padded one
            return ""
        if text is not None and not self._is_split:
            return text
        if text == "":  # a special token does not end a character
            return ""
        if self._decoder is None:
            self._decoder = _Utf8("replace")
        out = self._decoder.decode(self._fragments[token_id] if text is None else text.encode())
        self._is_split = bool(self._decoder.getstate()[0])
        return out

    def feed_apart(self, token_id: int) -> tuple[str, str]:
        """See Detokenizer."""
        decoder = self._decoder
        if not self._is_split or decoder is None:
            return "", self.feed(token_id)
        state = decoder.getstate()
        out = self.feed(token_id)
        if not out.startswith("\ufffd"):
            return "", out
        after = decoder.getstate()
        decoder.setstate(state)
        text = self._texts[token_id]
        first = (self._fragments[token_id] if text is None else text.encode())[:1]
        # What was begun is not completed if the first byte leaves it and is, or begins, a character of its own.
        is_broken = len(decoder.decode(first)) + bool(decoder.getstate()[0]) > 1
        decoder.setstate(after)
        left = len(state[0].decode(errors="replace")) if is_broken else 0
        return out[:left], out[left:]

    def flush(self) -> str:
        """See Detokenizer."""
        self._is_split = False
        return self._decoder.decode(b"", final=True) if self._decoder is not None else ""


class StreamDetokenizer:
    """See Detokenizer. Equals tokenizer.decode() of all ids as long as byte tokens spell valid UTF-8.

    Args: prompt_token_ids: primes the decoder, because some tokenizers write a word's leading space only
        after another word. Its last few ids are enough. Of a character that they begin and the output ends, the
        output shows its own bytes, as replacement characters: so do ByteLevel's.
    """

    __slots__ = ("_pending", "_skip_special", "_step", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        primer = list(prompt_token_ids[-PRIMER_TOKENS:])
        # DecodeStream takes no text for given that ends so: it may be a part of a character.
        while primer and tokenizer.decode(primer, skip_special_tokens=skip_special_tokens).endswith("\ufffd"):
            primer.pop()
        self._step = DecodeStream(ids=primer, skip_special_tokens=skip_special_tokens).step
        self._pending: list[int] = []  # ids that no text has been given for

    def feed(self, token_id: int) -> str:
        """See Detokenizer."""
        try:
            text = self._step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Bytes that are no UTF-8 changed text given already. Begin again after them, as vLLM does.
            self._step = DecodeStream(skip_special_tokens=self._skip_special).step
            self._pending.append(token_id)
            return self.flush()
        if text:
            self._pending.clear()
            return text
        self._pending.append(token_id)
        return ""

    def feed_apart(self, token_id: int) -> tuple[str, str]:
        """See Detokenizer."""
        if not self._pending:
            return "", self.feed(token_id)
        pending = self._pending.copy()
        out = self.feed(token_id)
        left = self._tokenizer.decode(pending, skip_special_tokens=self._skip_special)
        return (left, out[len(left) :]) if out.startswith(left) else ("", out)

    def flush(self) -> str:
        """See Detokenizer."""
        pending, self._pending = self._pending, []
        if not pending:
            return ""
        return self._tokenizer.decode(pending, skip_special_tokens=self._skip_special)


class TokenTexts:
    """Text and bytes of single tokens, and detokenizers over many."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.table = ByteTable(tokenizer) if is_byte_level(tokenizer) else None
        self.text = lru_cache(maxsize=65536)(self._text)
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        show_tool_tokens: bool = False,
    ) -> Detokenizer:
        """A new detokenizer for one choice of this prompt."""
        if self.table is not None:
            return ByteDetokenizer(
                self.table, skip_special_tokens=skip_special_tokens, show_tool_tokens=show_tool_tokens
            )
        return StreamDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def _text(self, token_id: int) -> str:
        if self.table is not None:
            return self.table.bytes_of(token_id).decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _bytes_of(self, token_id: int) -> bytes:
        if self.table is not None:
            return self.table.bytes_of(token_id)
        return self._text(token_id).encode()


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder is ByteLevel and nothing else."""
    if tokenizer.decoder is None:
        return False
    state = json.loads(tokenizer.decoder.__getstate__())
    if state["type"] == "Sequence":
        return [each["type"] for each in state["decoders"]] == ["ByteLevel"]
    return state["type"] == "ByteLevel"
