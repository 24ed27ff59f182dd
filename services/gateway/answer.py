"""What all answers have in common: one HTTP request, one or more calls, one end.

An answer ends in exactly one way: complete, failed, or the client left. Whatever the way, end() gives the
admission's places back, ends the root span and counts; the routes wait in wait_for_end().
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from services.gateway import metrics
from services.gateway.call import Call
from services.gateway.choices import Choice
from services.gateway.cluster import Cluster
from services.gateway.core.admission import Admission, Admitted
from services.gateway.core.siblings import Siblings
from services.gateway.edge import STATUS
from services.gateway.http_body import Receive, Scope
from services.gateway.http_errors import error_body, header_block, header_lines, status_of, type_of
from services.gateway.push import PUSH_KEY, Push
from services.gateway.receipt import receipt_of
from shared.errors import InvalidRequest
from shared.observe.log import get_logger
from shared.observe.trace import Span

_log = get_logger("gateway.answer")


class Answer(ABC):
    """Base of StreamAnswer and WholeAnswer.

    Args: grammar_field: the body's, that asks for a grammar, which only the engine can judge; "": none does.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        admission: Admission,
        ticket: Admitted,
        scope: Scope,
        push: Push,
        request_id: str,
        span: Span,
        received_ns: int,
        wants_receipt: bool,
        grammar_field: str = "",
    ) -> None:
        self.cluster = cluster
        self.push = push
        self.request_id = request_id
        self.span = span
        self.wants_receipt = wants_receipt
        self.calls: list[Call] = []
        self.ended = False
        self.choices: list[Choice] = []
        self.first_ns = 0  # monotonic; 0: no token yet, of an attempt that was not given up
        self.shown_ns = 0  # monotonic, when content began to leave ahead of the end; 0: none has
        self._grammar_field = grammar_field
        self._admission = admission
        self._ticket = ticket
        self._scope = scope
        self._received_ns = received_ns
        self._num_done = 0
        self._on_end: Callable[[int], None] | None = None

    def run(self, calls: list[Call]) -> None:
        """Start every call; their sinks belong to this answer."""
        self.calls = calls
        if len(calls) > 1:
            siblings = Siblings()
            for call in calls:
                call.flow.siblings = siblings
        metrics.IN_FLIGHT.inc(len(calls))
        for call in calls:
            if not self.ended:  # the first may have failed at once
                self.cluster.submit(call)

    async def wait_for_end(self, receive: Receive) -> None:
        """Until the response is complete or the client is gone, whichever comes first."""
        while not self.ended:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.client_gone()
                return

    def run_alone(self, on_end: Callable[[int], None]) -> None:
        """Instead of wait_for_end(): `on_end` hears the status, a client that leaves is noticed by callback."""
        if self.ended:
            on_end(self._scope[STATUS])
            return
        self._on_end = on_end
        self.push.when_gone(self.client_gone)

    def client_gone(self) -> None:
        """Stop all work for a client that left. Harmless when the answer has ended: a reader too slow was cut off."""
        if self.ended:
            return
        metrics.ABORTS.inc()
        self.span.set("quire.client_gone", True)
        self.stop_calls()
        self.end(499)

    def stop_calls(self) -> None:
        """Cancel what still runs; finished calls ignore it."""
        for call in self.calls:
            self.cluster.cancel(call)

    def note_first(self) -> None:
        """The first token of the answer has come."""
        self.first_ns = time.monotonic_ns()
        self.span.event("decode.first_token")

    def discarded(self) -> None:
        """An attempt of one call was given up, its tokens with it."""
        self.first_ns = min((call.first_ns for call in self.calls if call.first_ns), default=0)

    def call_done(self) -> None:
        """One call is complete; the last one completes the answer."""
        self._num_done += 1
        if self._num_done == len(self.calls) and not self.ended:
            self.complete()

    @abstractmethod
    def complete(self) -> None:
        """Write what is left to write and end. Runs once."""

    @abstractmethod
    def fail(self, code: str, message: str, retry_after_ms: int | None) -> None:
        """Answer with an error. Runs once."""

    def refuse(self, code: str, message: str, retry_after_ms: int | None) -> None:
        """Error response of an answer of which no byte was sent."""
        status = status_of(code)
        metrics.ERRORS.labels(code).inc()
        self.span.fail(f"{code}: {message}")
        head = header_lines(header_block(status, retry_after_ms, self.request_id))
        # all else that a body asks for has been checked here
        param = self._grammar_field or None if code == InvalidRequest.code else None
        self.push.respond(status, head, error_body(message, type_of(status), param, code))
        self.stop_calls()
        self.end(status)

    def end(self, status: int) -> None:
        """Give back what the request held. Runs once."""
        assert not self.ended, "an answer ends once"
        self.ended = True
        self._scope[STATUS] = status
        now_ns = time.monotonic_ns()
        num_output = self.num_output_tokens
        self._admission.leave(self._ticket, now_ms=now_ns // 1_000_000)
        metrics.IN_FLIGHT.inc(-len(self.calls))
        if self.shown_ns:
            metrics.TTFT.observe((self.shown_ns - self._received_ns) / 1e6)
        if status == 200:
            self._note_tpot(now_ns)
        if status == 200:
            num_prompt, num_cached = self._num_input_tokens()
            metrics.PROMPT_TOKENS.inc(num_prompt)
            metrics.CACHED_TOKENS.inc(num_cached)
            metrics.OUTPUT_TOKENS.inc(num_output)
        self.span.set("http.status_code", status)
        self.span.set("quire.output_tokens", num_output)
        self.span.end()
        # Answer, calls and sinks name each other, as do scope and connection: cut here, so that reference
        # counts free a request at once.
        self.calls, self.choices = [], []
        self._scope.pop(PUSH_KEY, None)
        if self._on_end is not None:
            self._on_end(status)

    def _note_tpot(self, now_ns: int) -> None:
        """Choices of one prompt run side by side, so the longest one took all the time; prompts wait for each other."""
        if not self.first_ns or len(self.calls) != 1:
            return
        num_steps = max([choice.num_tokens for choice in self.choices]) - 1
        if num_steps > 0:
            metrics.TPOT.observe((now_ns - self.first_ns) / 1e6 / num_steps)

    @property
    def num_output_tokens(self) -> int:
        """Over all choices, the tokens that ended them included."""
        return sum([choice.num_tokens for choice in self.choices])

    def _num_input_tokens(self) -> tuple[int, int]:
        """Over all prompts, and those of them that no stage computed."""
        calls = self.calls
        return sum([call.num_prompt_tokens for call in calls]), sum([call.cached_tokens for call in calls])

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object over all prompts and choices."""
        (prompt, cached), output = self._num_input_tokens(), self.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def receipt(self) -> list[dict[str, Any]] | dict[str, Any]:
        """Where every prompt's KV came from and why it ran there; a list when there are several prompts."""
        receipts = [receipt_of(call) for call in self.calls]
        return receipts[0] if len(receipts) == 1 else receipts
