"""Log probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

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
        """Lists for these positions only; offsets go on from the last call's.

        Cost: about 3 us a row of two. An echo may have a hundred thousand rows, and the loop waits.
        """
        text_of, num_top, offset = self._texts.text, self._num_top, self._offset
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for row in rows:
            if row is None:
                text = "" if self._first_token is None else text_of(self._first_token)
                logprob, top = None, None
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
            offsets.append(offset)
            offset += len(text)
        self._offset = offset
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
