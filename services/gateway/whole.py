"""Answers in one piece: collect every choice, respond once."""

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.answer import Answer
from services.gateway.call import Call, PromptLogprobs
from services.gateway.choices import Choice
from shared.wire.requests import TokenChunk

_encode = msgspec.json.Encoder().encode


class WholeAnswer(Answer):
    """One JSON body for all prompts and choices of a request. Nothing is sent before the end."""

    def __init__(self, *, kind: str, created: int, model: str, fingerprint: str, **common: Any) -> None:
        super().__init__(**common)
        self._is_chat = kind == "chat"
        self._base: dict[str, Any] = {
            "id": self.request_id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._sinks: list[WholeSink] = []

    def sink(self, choices: list[Choice], *, echo: str | None = None) -> "WholeSink":
        """Sink of one prompt with these choices (their indices are those of the response)."""
        self.choices += choices
        sink = WholeSink(self, choices, echo)
        self._sinks.append(sink)
        return sink

    def complete(self) -> None:
        """The response."""
        body = {
            **self._base,
            "choices": [self.render_choice(each, sink.echo) for sink in self._sinks for each in sink.choices],
            "usage": self.usage(),
        }
        if self._is_chat and (prompt_ids := self.choices[0].take_prompt_ids()) is not None:
            body["prompt_token_ids"] = prompt_ids
        if self.wants_receipt:
            body["quire_receipt"] = self.receipt()
        headers = b"content-type: application/json\r\nx-request-id: %b\r\n" % self.request_id.encode()
        self.push.respond(200, headers, _encode(body))
        self.end(200)

    def end(self, status: int) -> None:
        """See Answer.end()."""
        super().end(status)
        self._sinks = []

    def fail(self, code: str, message: str, retry_after_ms: int | None) -> None:
        """The error response; the other calls are stopped."""
        if not self.ended:
            self.refuse(code, message, retry_after_ms)

    def render_choice(self, choice: Choice, echo: str | None) -> dict[str, Any]:
        """One element of `choices`."""
        out: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            out["message"] = choice.message()
        else:
            out["text"] = (echo or "") + choice.text()
        out["logprobs"] = choice.kept_logprobs()
        out["finish_reason"] = choice.finish_reason
        out["stop_reason"] = choice.stop_reason
        ids = choice.take_token_ids()
        if ids is not None:
            out["token_ids"] = ids
            if not self._is_chat:  # of a chat the whole answer tells it: it has one prompt
                out["prompt_token_ids"] = choice.take_prompt_ids()
        return out


class WholeSink:
    """Collects one call's output."""

    def __init__(self, answer: WholeAnswer, choices: list[Choice], echo: str | None) -> None:
        self.choices = choices
        self._answer = answer
        self.echo = echo
        self._num_open = len(choices)
        self._stopped_here = False  # a stop string ended a choice that the worker goes on with
        self.mark_sent: Callable[[], None] | None = None  # never called: nothing is sent before the end

    def chunk(self, chunk: TokenChunk) -> bool:
        """New tokens of one choice."""
        choice = self.choices[chunk.index]
        if choice.finish_reason is None and not self._answer.ended:
            if not self._answer.first_ns:
                self._answer.note_first()
            text = choice.feed(chunk)
            if not choice.is_plain:
                choice.keep_logprobs()
            if text:
                choice.parts.append(text)
            if choice.finish_reason is not None:
                self._num_open -= 1
                self._stopped_here |= chunk.finish_reason is None
        return self._stopped_here and self._num_open == 0

    def scored(self, call: Call, rows: PromptLogprobs) -> None:
        """Every choice's log probabilities begin with the prompt's."""
        if self.echo is not None:
            for choice in self.choices:
                choice.put_prompt_logprobs(rows, call.first_token)

    def discard(self) -> None:
        """The attempt was given up."""
        for choice in self.choices:
            choice.reset()
        self._num_open = len(self.choices)
        self._stopped_here = False
        self._answer.discarded()

    def complete(self, call: Call) -> None:
        """The worker ended, or every choice met a stop string."""
        if self._answer.ended:
            return
        if self._num_open:
            self._answer.fail("peer.protocol", "The engine ended without a finish reason.", None)
            return
        self._answer.call_done()

    def fail(self, call: Call, code: str, message: str, retry_after_ms: int | None) -> None:
        """No more output will come."""
        del call
        self._answer.fail(code, message, retry_after_ms)
