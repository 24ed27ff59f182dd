"""Token ids of pieces of text, cached: the turns of a chat come back with every request.

A text is cut at the tokenizer's own special tokens. The tokenizer cuts there too, before it normalizes or
splits, so a piece's ids do not depend on what stands beside it: joining them gives what encoding the whole gives.
Of well-known tokenizers long pieces are cut once more, before newlines, where their patterns cut too; so texts
that begin alike share the ids of what they have in common.
"""

import json
import re
import sys
from array import array
from collections import OrderedDict
from typing import Any

from tokenizers import Tokenizer

ENTRY_BYTES = 300  # dictionary slot, list link, array head
LARGEST_SHARE = 8  # a piece larger than this part of the cache is not kept

# Pre-tokenizers that look at nothing outside the piece. Metaspace is one only if it does not ask whether the
# piece is the text's first.
_LOCAL_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Digits", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)


CHUNK_CHARS = 1024
# Before a newline that follows a letter or digit: no alternative of these patterns takes both, whatever follows.
# The letters are those of large, long settled Unicode blocks, on which all libraries agree.
_LINE_END = re.compile(
    r"\n(?<=[A-Za-z0-9\u00df-\u00f6\u00f8-\u024f\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]\n)"
)
KNOWN_PATTERNS = {
    # Llama 3; Qwen 2 and 3. GPT-2's is built into ByteLevel.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class SegmentCache:
    """Least recently used pieces go first. Not thread-safe: one event loop owns it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()

    def get(self, text: str) -> "array[int] | None":
        """The piece's ids. Cost: one hash of the text."""
        found = self._ids.get(text)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._ids.move_to_end(text)
        return found

    def put(self, text: str, ids: "array[int]") -> None:
        """Keep a piece; the oldest go until all fit."""
        size = _size(text, ids)
        if size > self.max_bytes // LARGEST_SHARE or text in self._ids:
            return
        self._ids[text] = ids
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            old = self._ids.popitem(last=False)
            self.used_bytes -= _size(*old)

    def __len__(self) -> int:
        return len(self._ids)


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + len(ids) * ids.itemsize + ENTRY_BYTES


class Borders:
    """Where a tokenizer's texts may be cut.

    Args: special: border token -> id; lines: whether newlines behind words are borders, too.
    """

    def __init__(self, special: dict[str, int], *, lines: bool) -> None:
        self.ids = {token: array("I", [token_id]) for token, token_id in special.items()}
        self.lines = lines
        self.chunk_chars = CHUNK_CHARS
        longest_first = sorted(special, key=len, reverse=True)  # as the tokenizer: leftmost, then longest
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None

    def split(self, text: str) -> list[str]:
        """Pieces of text at even places, border tokens at odd ones."""
        return [text] if self._pattern is None else self._pattern.split(text)

    def cut(self, piece: str) -> list[str]:
        """A piece in parts of at least chunk_chars, but for the last; texts that begin alike are cut alike."""
        if not self.lines or len(piece) <= self.chunk_chars:
            return [piece]
        out, start = [], 0
        while (found := _LINE_END.search(piece, start + max(1, self.chunk_chars))) is not None:
            out.append(piece[start : found.start()])
            start = found.start()
        out.append(piece[start:])
        return out


def borders_of(tokenizer: Tokenizer) -> Borders | None:
    """The tokenizer's borders; None when its pieces depend on their neighbours or it has none."""
    if not _is_local(state_of(tokenizer.pre_tokenizer)):
        return None
    special: dict[str, int] = {}
    lines = _cuts_at_lines(pre_tokenizers_of(tokenizer)) and _keeps_lines(state_of(tokenizer.normalizer))
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        lines = lines and "\n" not in added.content
        if added.normalized or not added.content:
            continue  # matched after normalizing, inside a piece
        if added.lstrip or added.rstrip or added.single_word:
            return None  # such a token reaches into the pieces beside it
        special[added.content] = token_id
    return Borders(special, lines=lines) if special or lines else None


def state_of(part: Any) -> dict[str, Any] | None:
    """What a part of a tokenizer is, as its file says it."""
    return None if part is None else json.loads(part.__getstate__())


def _is_local(state: dict[str, Any] | None) -> bool:
    if state is None or state["type"] in _LOCAL_PRE_TOKENIZERS:
        return True
    if state["type"] == "Sequence":
        return all(map(_is_local, state["pretokenizers"]))
    return state["type"] == "Metaspace" and state.get("prepend_scheme") in ("always", "never")


def pre_tokenizers_of(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One after the other, possibly none."""
    state = state_of(tokenizer.pre_tokenizer)
    return [] if state is None else state["pretokenizers"] if state["type"] == "Sequence" else [state]


def _cuts_at_lines(parts: list[dict[str, Any]]) -> bool:
    """Whether these pre-tokenizers cut between a word and a newline, and go on from there as from a start."""
    splits = 0
    for part in parts:
        if part["type"] == "ByteLevel" and not part["add_prefix_space"]:
            splits += bool(part["use_regex"])
        elif (
            part["type"] == "Split" and part["pattern"].get("Regex") in KNOWN_PATTERNS and not part["invert"]
        ):
            splits += part["behavior"] == "Isolated"
        elif part["type"] != "Digits":
            return False
    return splits > 0


def _keeps_lines(state: dict[str, Any] | None) -> bool:
    return state is None or state["type"] == "NFC"
