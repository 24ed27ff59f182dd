"""Token ids to text, as they come, and log probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shared.wire.requests import TokenLogprob

PRIMER_TOKENS = 16
INVALID_PREFIX = "Invalid prefix encountered"


class Detokenizer:
    """One choice's incremental text, as vLLM's: a character whose bytes span tokens appears with its last
    token, and bytes that never become a character never appear. A stop token is not fed.

    Args: prompt_token_ids: primes the decoder, because some tokenizers write a word's leading space only
        after another word. Its last few ids are enough.
    Cost: a few microseconds a token (tokenizers' DecodeStream, in Rust).
    """

    __slots__ = ("_skip_special", "_step", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        primer = list(prompt_token_ids[-PRIMER_TOKENS:])
        self._step = DecodeStream(ids=primer, skip_special_tokens=skip_special_tokens).step

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often all of its own."""
        try:
            return self._step(self._tokenizer, token_id) or ""
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # non-monotonic, invalid UTF-8 output breaks the stream's state; begin again, as vLLM does
            self._step = DecodeStream(skip_special_tokens=self._skip_special).step
            return self._step(self._tokenizer, token_id) or ""


class TokenTexts:
    """Text and bytes of single tokens, for log probabilities. Cached: the vocabulary is finite."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=65536)(self._text)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


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
    text = texts.text(item.token_id)
    return {"token": text, "logprob": max(item.logprob, -9999.0), "bytes": list(text.encode())}


def _best(row: Sequence[TokenLogprob], count: int) -> list[TokenLogprob]:
    return sorted(row, key=lambda each: -each.logprob)[:count]


class CompletionLogprobs:
    """The legacy completions form: four parallel lists, offsets in characters of the whole text."""

    def __init__(self, num_top: int, texts: TokenTexts, *, start_offset: int = 0) -> None:
        self._num_top = num_top
        self._texts = texts
        self._offset = start_offset

    def entries(self, rows: Sequence[Sequence[TokenLogprob] | None]) -> dict[str, Any]:
        """Lists for these positions only; None is the first prompt token, which nothing predicts."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            if row is None:
                self._add(out, "", None, None)
                continue
            text = self._texts.text(row[0].token_id)
            top = {
                self._texts.text(each.token_id): max(each.logprob, -9999.0)
                for each in [*_best(row, self._num_top), row[0]]
            }
            self._add(out, text, max(row[0].logprob, -9999.0), top)
        return out

    def _add(
        self, out: dict[str, Any], text: str, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        out["tokens"].append(text)
        out["token_logprobs"].append(logprob)
        out["top_logprobs"].append(top)
        out["text_offset"].append(self._offset)
        self._offset += len(text)
