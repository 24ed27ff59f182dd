"""Server-sent events: one token, one event, one write.

The constant parts of every event are encoded once per choice; a token costs the JSON text of its delta, two
concatenations and a write, all inside the callback that ZeroMQ woke. Nothing is sent before the first token,
so that until then an attempt can be repeated and an error still has an HTTP status of its own.
"""

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from services.gateway import metrics
from services.gateway.answer import Answer
from services.gateway.call import Call, PromptLogprobs
from services.gateway.choices import Choice
from services.gateway.http_errors import error_event, status_of
from shared.wire.requests import TokenChunk

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\nx-accel-buffering: no\r\n"
)
_MARK = "\u0001"  # stands for the delta while the constant parts are encoded; never in real constants

_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=4_096)
def _plain_choice(is_chat: bool, index: int) -> tuple[bytes, bytes]:
    """What stands before and after the JSON text of the delta in a choice without log probabilities."""
    head, _, tail = _encode(_choice(is_chat, index, {"content": _MARK} if is_chat else _MARK)).partition(
        _encode(_MARK)
    )
    return head, tail


def _stopped_choice(is_chat: bool, index: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
    choice = _choice(is_chat, index, {} if is_chat else "", None, finish_reason)
    return _encode(choice | {"stop_reason": stop_reason})


@lru_cache(maxsize=4_096)
def _last_choice(is_chat: bool, index: int, finish_reason: str) -> bytes:
    return _stopped_choice(is_chat, index, finish_reason, None)


@lru_cache(maxsize=4_096)
def _role_choice(index: int) -> bytes:
    return _encode(_choice(True, index, {"role": "assistant", "content": ""}))


def _choice(
    is_chat: bool,
    index: int,
    delta: dict[str, Any] | str,
    logprobs: Any = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    key = "delta" if is_chat else "text"
    return {"index": index, key: delta, "logprobs": logprobs, "finish_reason": finish_reason}


class EventShape:
    """The constant parts of one answer's events.

    Args: usage_key: True when stream_options.include_usage asks for `"usage":null` in every event.
    """

    def __init__(
        self, kind: str, request_id: str, created: int, model: str, fingerprint: str, usage_key: bool
    ) -> None:
        self.is_chat = kind == "chat"
        base: dict[str, Any] = {
            "id": request_id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + _encode(base)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage_key else b"]}\n\n"

    def halves(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON text of a content delta without log probabilities."""
        before, after = _plain_choice(self.is_chat, index)
        return self._head + before, after + self._tail

    def role(self, index: int, prompt_ids: list[int] | None = None) -> bytes:
        """The first event of a chat's choice."""
        if prompt_ids is None:
            return self._head + _role_choice(index) + self._tail
        told = b'],"prompt_token_ids":' + _encode(prompt_ids)
        return self._head + _role_choice(index) + told + self._tail[1:]

    def last(self, index: int, finish_reason: str, stop_reason: str | int | None = None) -> bytes:
        """The event that ends a choice. `stop_reason`: the stop string or token that was asked to."""
        if stop_reason is None:
            return self._head + _last_choice(self.is_chat, index, finish_reason) + self._tail
        return self._head + _stopped_choice(self.is_chat, index, finish_reason, stop_reason) + self._tail

    def event(
        self,
        index: int,
        delta: dict[str, Any] | str,
        logprobs: Any,
        token_ids: list[int] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> bytes:
        """Any other event of a choice. `delta`: an object for chat, text for completions."""
        choice = _choice(self.is_chat, index, delta, logprobs)
        if token_ids is not None:
            choice["token_ids"] = token_ids
        if prompt_ids is not None:
            choice["prompt_token_ids"] = prompt_ids
        return self._head + _encode(choice) + self._tail

    def closing(self, usage: dict[str, Any] | None, receipt: Any) -> bytes:
        """The event without choices that carries usage or the receipt; b"" when neither is asked for."""
        if usage is None and receipt is None:
            return b""
        body = {}
        if usage is not None:
            body["usage"] = usage
        if receipt is not None:
            body["quire_receipt"] = receipt
        return self._head + b"]," + _encode(body)[1:] + b"\n\n"


class StreamAnswer(Answer):
    """Events of one HTTP request, for all its prompts and choices."""

    def __init__(self, *, shape: EventShape, include_usage: bool, **common: Any) -> None:
        super().__init__(**common)
        self._shape = shape
        self._include_usage = include_usage
        self._headers = STREAM_HEADERS + b"x-request-id: %b\r\n" % self.request_id.encode()
        self._started = False
        self._held = b""  # the last event of a prompt, until the turn of the loop ends

    def sink(self, choices: list[Choice], *, echo: str | None = None) -> "StreamSink":
        """Sink of one prompt with these choices (their indices are those of the response)."""
        self.choices += choices
        return StreamSink(self, self._shape, choices, echo)

    def emit_last(self, event: bytes) -> None:
        """The last event of a prompt. The worker's Finished comes with it, as a rule: both go out in one write."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self._let_go)
        self._held += event

    def _let_go(self) -> None:
        if self._held and not self.ended:
            self.emit(b"")

    def emit(self, event: bytes) -> None:
        """One event on the wire, after those that were held."""
        if self._held:
            event, self._held = self._held + event, b""
        if not self._started:
            self._start()
            self.push.write(event)
        elif not self.push.write(event):
            metrics.SLOW_READERS.inc()
            self.span.fail("slow reader")
            self.push.cut()
            self.stop_calls()
            if not self.ended:
                self.end(499)

    def _start(self) -> None:
        """The first event leaves; each of a choice has content, or says that there is none."""
        self._started = True
        self.shown_ns = time.monotonic_ns()
        self.push.start_stream(self._headers)

    def complete(self) -> None:
        """Usage, receipt, [DONE]."""
        usage = self.usage() if self._include_usage else None
        closing = self._shape.closing(usage, self.receipt() if self.wants_receipt else None)
        if not self._started:  # at most one event to show
            self._start()
        self.push.end_stream(self._held + closing + DONE)
        self.end(200)

    def fail(self, code: str, message: str, retry_after_ms: int | None) -> None:
        """An error response, or one error event and [DONE] when the stream has begun."""
        if self.ended:
            return
        self._let_go()
        if self.ended:  # the reader was too slow
            return
        if not self._started:
            self.refuse(code, message, retry_after_ms)
            return
        metrics.ERRORS.labels(code).inc()
        self.span.fail(f"{code}: {message}")
        self.push.end_stream(error_event(code, message) + DONE)
        self.stop_calls()
        self.end(status_of(code))


class StreamSink:
    """Turns one call's token chunks into events."""

    def __init__(
        self, answer: StreamAnswer, shape: EventShape, choices: list[Choice], echo: str | None
    ) -> None:
        self._answer = answer
        self._shape = shape
        self._choices = choices
        self._halves = [shape.halves(choice.index) for choice in choices]
        self._echo = echo
        self._echo_logprobs: list[dict[str, Any] | None] = [None] * len(choices)
        self._num_open = len(choices)
        self._stopped_here = False  # a stop string ended a choice that the worker goes on with
        self._begun = False
        self.mark_sent: Callable[[], None] | None = None  # the call's flow: no retry from then on

    def chunk(self, chunk: TokenChunk) -> bool:
        """Called for every token: keep it short."""
        choice = self._choices[chunk.index]
        answer = self._answer
        if choice.finish_reason is not None or answer.ended:
            return False
        if not answer.first_ns:
            answer.note_first()
        text = choice.feed(chunk)
        if choice.is_plain:
            if text:
                head, tail = self._halves[chunk.index]
                event = head + _encode(text) + tail
            else:
                event = b""
        else:
            event = self._rich(choice, text)
        if choice.finish_reason is not None:
            self._num_open -= 1
            self._stopped_here |= chunk.finish_reason is None
            event += self._finish(choice)
        if event:
            if not self._begun:
                event = self._begin() + event
            if self._num_open:
                answer.emit(event)
            else:
                answer.emit_last(event)
        return self._stopped_here and self._num_open == 0

    def scored(self, call: Call, rows: PromptLogprobs) -> None:
        """The event that echoes the prompt will carry them."""
        if self._echo is not None:
            for position, choice in enumerate(self._choices):
                choice.put_prompt_logprobs(rows, call.first_token)
                self._echo_logprobs[position] = choice.take_logprobs()

    def discard(self) -> None:
        """The attempt was given up before anything was sent."""
        for choice in self._choices:
            choice.reset()
        self._echo_logprobs = [None] * len(self._choices)
        self._num_open = len(self._choices)
        self._stopped_here = False
        self._answer.discarded()

    def complete(self, call: Call) -> None:
        """The worker ended, or every choice met a stop string."""
        del call
        if self._answer.ended:
            return
        if self._num_open:
            self._answer.fail("peer.protocol", "The engine ended without a finish reason.", None)
        else:
            self._answer.call_done()

    def fail(self, call: Call, code: str, message: str, retry_after_ms: int | None) -> None:
        """No more output will come."""
        del call
        self._answer.fail(code, message, retry_after_ms)

    def _begin(self) -> bytes:
        """First bytes of this prompt: role events for chat, the echoed prompt for completions."""
        self._begun = True
        if self.mark_sent is not None:
            self.mark_sent()
        shape = self._shape
        if shape.is_chat:
            return b"".join([shape.role(choice.index, choice.take_prompt_ids()) for choice in self._choices])
        if self._echo is not None:
            rows, echo = zip(self._choices, self._echo_logprobs, strict=True), self._echo
            return b"".join(
                shape.event(choice.index, echo, logprobs, choice.take_token_ids(), choice.take_prompt_ids())
                for choice, logprobs in rows
            )
        return b""

    def _rich(self, choice: Choice, text: str) -> bytes:
        """Events with log probabilities, token ids or tool calls; the first carries what is no text."""
        shape = self._shape
        logprobs, ids = choice.take_logprobs(), choice.take_token_ids()
        if not shape.is_chat:
            if not (text or logprobs or ids):
                return b""
            prompt_ids = choice.take_prompt_ids() if self._echo is None else None  # else with the echo
            return shape.event(choice.index, text, logprobs, ids, prompt_ids)
        deltas: list[dict[str, Any]] = choice.deltas(text)
        if (logprobs is not None or ids) and not deltas:
            deltas = [{"content": ""}]
        events = []
        for delta in deltas:
            events.append(shape.event(choice.index, delta, logprobs, ids))
            logprobs, ids = None, None
        return b"".join(events)

    def _finish(self, choice: Choice) -> bytes:
        assert choice.finish_reason is not None, "the choice has ended"
        return self._shape.last(choice.index, choice.finish_reason, choice.stop_reason)
