"""One choice of an answer: its token chunks become text, log probabilities, tool calls and a finish reason."""

from collections.abc import Sequence
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import encode

from services.gateway.core.stop import StopSearch, StopStrings
from services.gateway.core.tools import (
    NewId,
    ToolParser,
    ToolPlan,
    call_json,
    delta_json,
    make_parser,
    read_whole,
)
from services.gateway.detokenize import PRIMER_TOKENS, Detokenizer
from services.gateway.logprobs import CompletionLogprobs, Echo, Rows, TextOffsets, chat_logprobs
from services.gateway.text import ModelText
from shared.wire.requests import TokenChunk, TokenLogprob


class ChoiceSpec(Struct, frozen=True):
    """What all choices of a request have in common."""

    is_chat: bool
    stops: StopStrings | None = None
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    num_top_logprobs: int | None = None  # None: no log probabilities at all
    tool_plan: ToolPlan | None = None  # None: output is never read as tool calls
    return_token_ids: bool = False  # the prompt's too
    stop_token_ids: frozenset[int] = frozenset()  # that the request names


class Choice:
    """feed() every chunk; `finish_reason` is set with the last one that counts, and `stop_reason` if one was asked for.

    Args:
        index: in the response, over all prompts.
        prompt_ids: of which the last prime the detokenizer.
        new_id: makes ids of tool calls.
        echo: the prompt's text, if the answer begins with it.
    """

    __slots__ = (
        "_decode", "_decode_rest", "_echo", "_ids", "_kept", "_legacy_logprobs", "_new_id", "_owes_prompt", "_parser",
        "_prompt_ids", "_rows", "_spec", "_stop", "_text", "finish_reason", "index", "is_plain", "num_tokens", "parts",
        "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        spec: ChoiceSpec,
        text: ModelText,
        prompt_ids: Sequence[int],
        *,
        new_id: NewId,
        echo: Echo | None = None,
    ) -> None:
        self.index = index
        self.is_plain = spec.num_top_logprobs is None and spec.tool_plan is None and not spec.return_token_ids
        self._spec = spec
        self._text = text
        self._prompt_ids = prompt_ids if spec.return_token_ids else prompt_ids[-PRIMER_TOKENS:]
        self._new_id = new_id
        self._echo = echo
        self.reset()

    def reset(self) -> None:
        """As if no chunk had come."""
        spec, text = self._spec, self._text
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or the named token
        self._owes_prompt = spec.return_token_ids
        detokenizer = self._detokenizer()
        self._decode, self._decode_rest = detokenizer.feed, detokenizer.flush
        self._stop = StopSearch(spec.stops, include=spec.include_stop) if spec.stops is not None else None
        self._parser: ToolParser | None = None
        if spec.tool_plan is not None:
            self._parser = make_parser(spec.tool_plan, self._new_id)
        self.parts: list[str] = []  # text, when the answer is collected
        self._ids: list[int] = []
        self._kept: dict[str, list[bytes]] = {}  # lists of log probabilities, as JSON without brackets
        self._rows: list[Sequence[TokenLogprob] | None] = []
        self._legacy_logprobs: CompletionLogprobs | None = None
        if spec.num_top_logprobs is not None and not spec.is_chat:
            start = len(self._echo.text) if self._echo is not None else 0
            offsets = TextOffsets(self._detokenizer().feed_apart, start=start)
            self._legacy_logprobs = CompletionLogprobs(spec.num_top_logprobs, text.texts, offsets)

    def _detokenizer(self) -> Detokenizer:
        """A new one for the output."""
        return self._text.detokenizer(
            self._prompt_ids[-PRIMER_TOKENS:],
            skip_special_tokens=self._spec.skip_special_tokens,
            show_tool_tokens=self._spec.tool_plan is not None,
        )

    def feed(self, chunk: TokenChunk) -> str:
        """New text that is safe to show. Cost: a few microseconds a token without stop strings."""
        ids = chunk.token_ids
        if self._stop is not None:
            return self._feed_watching(chunk)
        self.num_tokens += len(ids)
        if self._spec.return_token_ids:
            self._ids += ids
        if chunk.logprobs is not None:
            self._rows += chunk.logprobs
        if chunk.finish_reason is None and len(ids) == 1:  # nearly every chunk
            return self._decode(ids[0])
        out = "".join([self._decode(each) for each in self._shown(chunk)])
        if chunk.finish_reason is None:
            return out
        self._end(chunk)
        return out + self._decode_rest()

    def _end(self, chunk: TokenChunk) -> None:
        """The engine ended the choice, with this chunk."""
        self.finish_reason = chunk.finish_reason
        if chunk.stop_token_id in self._spec.stop_token_ids:
            self.stop_reason = chunk.stop_token_id

    def _shown(self, chunk: TokenChunk) -> list[int]:
        """The chunk's tokens but for the one that ended the choice."""
        if chunk.stop_token_id is None or self._spec.include_stop:
            return chunk.token_ids
        return chunk.token_ids[:-1]

    def _feed_watching(self, chunk: TokenChunk) -> str:
        """The same with stop strings: token by token, so that usage ends where the text does."""
        stop = self._stop
        assert stop is not None
        out = ""
        shown = self._shown(chunk)
        for position, token_id in enumerate(chunk.token_ids):
            self.num_tokens += 1
            self._ids.append(token_id)
            if chunk.logprobs is not None:
                self._rows.append(chunk.logprobs[position])
            if position < len(shown):
                armed = self.num_tokens > self._spec.min_tokens
                out += stop.feed(self._decode(token_id), armed=armed)
            if stop.found is not None:
                self.finish_reason, self.stop_reason = "stop", stop.found
                return out
        if chunk.finish_reason is not None:
            self._end(chunk)
            out += stop.feed(self._decode_rest(), armed=False) + stop.flush()
        return out

    def deltas(self, text: str) -> list[dict[str, Any]]:
        """Chat deltas for new text; at the end also what was held back, and the right finish reason."""
        parser = self._parser
        if parser is None:
            return [{"content": text}] if text else []
        found = parser.feed(text) if text else []
        if self.finish_reason is not None:
            found += parser.flush()
            self.finish_reason = parser.finish_reason(self.finish_reason)
        return [delta_json(delta) for delta in found]

    # ---- what a whole answer shows ----

    def text(self) -> str:
        """All collected text."""
        return "".join(self.parts)

    def message(self) -> dict[str, Any]:
        """The assistant's message of a whole chat answer; sets the right finish reason."""
        text, plan = self.text(), self._spec.tool_plan
        out: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if plan is not None:
            was_cut = self.finish_reason == "length"
            content, calls, parser = read_whole(plan, text, self._new_id, was_cut=was_cut)
            if calls or plan.kind == "required":  # a list that was cut before its first call is no text
                out["content"] = content or None
            if calls:
                out["tool_calls"] = [call_json(call) for call in calls]
                assert self.finish_reason is not None, "the choice has ended"
                self.finish_reason = parser.finish_reason(self.finish_reason)
        return out

    def put_prompt_logprobs(self, rows: Rows, first_token: int) -> None:
        """With echo, before any chunk: the prompt's positions come first, and offsets begin with them."""
        self._rows = list(rows)
        if self._legacy_logprobs is not None and (echo := self._echo) is not None:
            decode = self._text.detokenizer(skip_special_tokens=echo.skips_special).feed_apart
            offsets = TextOffsets(decode, num_hidden=echo.num_hidden)
            self._legacy_logprobs.begin_with_prompt(len(rows), first_token, offsets)

    def keep_logprobs(self) -> None:
        """For a whole answer, with each chunk: at its end they would take seconds."""
        for key, value in (self.take_logprobs() or {}).items():
            if value:
                self._kept.setdefault(key, []).append(encode(value)[1:-1])

    def kept_logprobs(self) -> dict[str, Any] | None:
        """All of them, as take_logprobs() would have them."""
        lists = {key: Raw(b"[%b]" % b",".join(parts)) for key, parts in self._kept.items()}
        return ({**lists, "refusal": None} if self._spec.is_chat else lists) if lists else None

    def take_token_ids(self) -> list[int] | None:
        """Token ids since the last call; None when they were not asked for."""
        ids, self._ids = self._ids, []
        return ids if self._spec.return_token_ids else None

    def take_prompt_ids(self) -> list[int] | None:
        """The prompt's token ids, once; None when they were not asked for."""
        owed, self._owes_prompt = self._owes_prompt, False
        return list(self._prompt_ids) if owed else None

    def take_logprobs(self) -> dict[str, Any] | None:
        """OpenAI's logprobs object over the positions since the last call; None when there are none."""
        rows, self._rows = self._rows, []
        num_top = self._spec.num_top_logprobs
        if num_top is None or not rows:
            return None
        if self._legacy_logprobs is not None:
            return self._legacy_logprobs.entries(rows)
        known = [row for row in rows if row is not None]
        return {"content": chat_logprobs(known, num_top, self._text.texts), "refusal": None}
