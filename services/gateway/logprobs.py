"""Log probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any

from services.gateway.detokenize import TokenTexts
from shared.wire.requests import TokenLogprob

Rows = Sequence[Sequence[TokenLogprob] | None]
LEAST = -9999.0  # stands for minus infinity, which JSON has no word for; vLLM's value


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
    return sorted(row, key=lambda each: -each.logprob)[:count]


class CompletionLogprobs:
    """The legacy completions form: four parallel lists, offsets in characters of the whole text.

    Args:
        start_offset: characters of an echoed prompt whose positions are not among the rows.
        first_token: the prompt's first token, which nothing predicts: its row is None.
    """

    def __init__(
        self, num_top: int, texts: TokenTexts, *, start_offset: int = 0, first_token: int | None = None
    ) -> None:
        self._num_top = num_top
        self._texts = texts
        self._offset = start_offset
        self._first_token = first_token

    def entries(self, rows: Rows) -> dict[str, Any]:
        """Lists for these positions only; offsets go on from the last call's."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            if row is None:
                text = "" if self._first_token is None else self._texts.text(self._first_token)
                self._add(out, text, None, None)
                continue
            # the sampled token always, so one more than asked for when it is not among the best: as OpenAI
            top = {
                self._texts.text(each.token_id): max(each.logprob, LEAST)
                for each in [*_best(row, self._num_top), row[0]]
            }
            self._add(out, self._texts.text(row[0].token_id), max(row[0].logprob, LEAST), top)
        return out

    def _add(
        self, out: dict[str, Any], text: str, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        out["tokens"].append(text)
        out["token_logprobs"].append(logprob)
        out["top_logprobs"].append(top)
        out["text_offset"].append(self._offset)
        self._offset += len(text)
