"""Log probabilities in OpenAI's two forms."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct

from services.gateway.detokenize import TokenTexts
from shared.wire.requests import TokenLogprob

Rows = Sequence[Sequence[TokenLogprob] | None]
LEAST = -9999.0  # stands for minus infinity, which JSON has no word for; vLLM's value
_logprob = attrgetter("logprob")


def chat_logprobs(
    rows: Sequence[Sequence[TokenLogprob]], num_top: int, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Entries of choices[].logprobs.content; each row is the sampled token, then the alternatives."""
    out = []
    for row in rows:
        entry = _chat_entry(row[0], texts)
        entry["top_logprobs"] = [_chat_entry(each, texts) for each in _best(row, num_top)]
        out.append(entry)
    return out


def _chat_entry(item: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    """`bytes` are the token's own, also where they are no whole characters and `token` cannot show them."""
    return {
        "token": texts.text(item.token_id),
        "logprob": max(item.logprob, LEAST),
        "bytes": list(texts.bytes_of(item.token_id)),
    }


def _best(row: Sequence[TokenLogprob], count: int) -> list[TokenLogprob]:
    return sorted(row, key=_logprob, reverse=True)[:count]  # equals stay in order


class Echo(Struct, frozen=True):
    """A prompt's text, which its answers begin with.

    Args: num_hidden: tokens before the text, put there by add_special_tokens; skips_special: it has no special tokens.
    """

    text: str
    num_hidden: int = 0
    skips_special: bool = False


class TextOffsets:
    """Where tokens stand in their text, in characters; a part of a character is where the character is.

    Args: decode: a detokenizer's feed_apart(); start: of the first; num_hidden: tokens that add nothing.
    """

    def __init__(
        self, decode: Callable[[int], tuple[str, str]], *, start: int = 0, num_hidden: int = 0
    ) -> None:
        self._decode = decode
        self._at = start
        self._num_hidden = num_hidden

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens. Cost: 0.3 us a token, 2 us with sentencepiece's kind."""
        decode, at = self._decode, self._at
        out: list[int] = []
        for token_id in token_ids:
            if self._num_hidden:
                self._num_hidden -= 1
                out.append(at)
            else:
                before, text = decode(token_id)
                at += len(before)
                out.append(at)
                at += len(text)
        self._at = at
        return out


class CompletionLogprobs:
    """The legacy completions form: four parallel lists, offsets in characters of the whole text.

    Args: offsets: of the output's tokens.
    """

    def __init__(self, num_top: int, texts: TokenTexts, offsets: TextOffsets) -> None:
        self._num_top = num_top
        self._texts = texts
        self._offsets = offsets
        self._first_token = 0
        self._num_prompt = 0
        self._prompt_offsets = offsets

    def begin_with_prompt(self, num_rows: int, first_token: int, offsets: TextOffsets) -> None:
        """The first rows are the prompt's; the very first is None, for nothing predicts its first token."""
        self._num_prompt, self._first_token, self._prompt_offsets = num_rows, first_token, offsets

    def _offsets_of(self, rows: Rows) -> list[int]:
        ids = [self._first_token if row is None else row[0].token_id for row in rows]
        num_prompt = min(self._num_prompt, len(ids))
        self._num_prompt -= num_prompt
        return self._prompt_offsets.of(ids[:num_prompt]) + self._offsets.of(ids[num_prompt:])

    def entries(self, rows: Rows) -> dict[str, Any]:
        """Lists for these positions only; offsets go on from the last call's.

        Cost: about 3 us a row of two. An echo may have a hundred thousand rows, and the loop waits.
        """
        text_of, num_top = self._texts.text, self._num_top
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for row in rows:
            if row is None:
                text, logprob, top = text_of(self._first_token), None, None
            else:
                text = text_of(row[0].token_id)
                top = {text_of(each.token_id): each.logprob for each in _best(row, num_top)}
                # the sampled token always, so one more than asked for when it is not among the best: as OpenAI
                top[text] = logprob = row[0].logprob
                if logprob < LEAST or min(top.values()) < LEAST:
                    logprob, top = max(logprob, LEAST), {each: max(top[each], LEAST) for each in top}
            tokens.append(text)
            logprobs.append(logprob)
            tops.append(top)
        offsets = self._offsets_of(rows)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
