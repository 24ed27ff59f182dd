"""Runs a workload against one server: open loop, causal sessions, a bound on what is in flight.

A request goes out when it is due, whatever became of the others; a later turn is due when its arrival time has come and
the answer to the turn before ended its think time ago. How late requests really went out is measured (lag): where that
grows, the client is what is being measured, and `verdict` says so.
"""

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools

from loadtest.http_client import Reply, Sends, is_refused
from loadtest.outcomes import Outcome, take_cut, take_receipt, take_times
from loadtest.results import quantile
from loadtest.sse import StreamError, StreamTimes, read_pieces
from loadtest.workloads import tokens
from loadtest.workloads.request import Request

AHEAD = 32  # requests whose bytes are made before they are due, at most
SPARE_MS = 5.0  # to the next request's time, for making one more
# What a field of an answer raises that is not what it should be: one such answer ends one request, not the run.
NO_ANSWER = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
OVERLOADED = (408, 429)  # of the statuses that blame the request, those that blame the load
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the requests are sent.

    text: chat messages of words instead of token ids. real_history: later turns carry the real answers.
    token_ids: ask for them, so that tokens without text are seen. receipts: ask for Quire's.
    max_in_flight: more are not sent and count as the client's failure.
    max_lag_ms: p99 of the lag above which a run says nothing about the server.
    """

    model: str
    text: bool = False
    real_history: bool = False
    token_ids: bool = False
    receipts: bool = True
    ids: tokens.TokenRange = field(default_factory=tokens.TokenRange)
    max_in_flight: int = 512
    timeout_s: float = 300.0
    max_lag_ms: float = 50.0


@dataclass(slots=True)
class _Ended:
    """What a later turn needs of an earlier one."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    ok: bool = False
    at_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


class OpenLoop:
    """One run. Use once: `outcomes = await OpenLoop(client, plan).run(requests)`.

    refused: why the server would never serve one of the requests (4xx), unreached: that nobody listens there; else "".
    """

    def __init__(
        self, client: Sends, plan: Plan, *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._client = client
        self._plan = plan
        self._progress = progress
        self._ended: dict[int, _Ended] = {}
        self._num_in_flight = 0
        self._num_done = 0
        self._begin_s = 0.0
        self.most_in_flight = 0
        self.refused = self.unreached = ""
        self._outcomes: list[Outcome] = []
        self._begun: set[int] = set()  # request_ids that were sent, or are not going to be
        self.gaps_ms: list[float] = []  # between tokens, of all answers

    async def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Send all and wait for all; outcomes in the order of the requests.

        Without Python's cyclic collector, whose pauses would be seen as the server's.
        """
        needed = {one.depends_on for one in requests if one.depends_on is not None}
        self._ended = {number: _Ended() for number in needed}
        self._outcomes = outcomes = [_outcome(request) for request in requests]
        loop = asyncio.get_running_loop()
        gc.collect()
        gc.disable()
        try:
            self._begin_s = loop.time()
            async with asyncio.TaskGroup() as group:
                ahead: deque[bytes | None] = deque()
                for place, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
                    self._prepare(ahead, requests[place : place + AHEAD], request.arrival_ms)
                    await self._sleep_until(request.arrival_ms)
                    group.create_task(self._one(request, outcome, ahead.popleft()))
        finally:
            gc.enable()
        return outcomes

    def so_far(self) -> list[Outcome]:
        """Of a run that was cancelled: what became of requests until then, but for those not sent yet."""
        return [one for one in self._outcomes if one.request_id in self._begun]

    def _prepare(self, ahead: deque[bytes | None], coming: Sequence[Request], due_ms: float) -> None:
        """Bytes of the first of `coming`, and of more of them while the first is not due: prompts cost CPU time.

        Later turns get None: their prompts are made when the answers are there.
        """
        while len(ahead) < len(coming) and (not ahead or due_ms - self._now_ms() > SPARE_MS):
            request = coming[len(ahead)]
            ahead.append(None if request.depends_on is not None else self._bytes_of(request))

    def _now_ms(self) -> float:
        return (asyncio.get_running_loop().time() - self._begin_s) * 1000

    async def _sleep_until(self, at_ms: float) -> None:
        if (wait_ms := at_ms - self._now_ms()) > 0:
            await asyncio.sleep(wait_ms / 1000)

    async def _one(self, request: Request, outcome: Outcome, ready: bytes | None) -> None:
        due_ms = request.arrival_ms
        if request.depends_on is not None:
            before = self._ended[request.depends_on]
            await before.done.wait()
            if not before.ok:
                self._skip(request, outcome, "the turn before it failed")
                return
            due_ms = max(due_ms, before.at_ms + request.think_ms)
            ready = self._bytes_of(request)
            await self._sleep_until(due_ms)
        if ready is None or self._num_in_flight >= self._plan.max_in_flight:
            why = f"{self._num_in_flight} requests are in flight, which is the client's bound"
            self._skip(
                request, outcome, why if ready is not None else "the server sent no token ids to go on with"
            )
            return
        outcome.due_ms, outcome.sent_ms = round(due_ms, 3), round(self._now_ms(), 3)
        outcome.lag_ms = round(max(0.0, outcome.sent_ms - due_ms), 3)
        self._begun.add(request.request_id)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        times = None
        try:
            times = await self._send(ready, outcome)
        finally:
            self._num_in_flight -= 1
            self._end(request, outcome, times)

    async def _send(self, ready: bytes, outcome: Outcome) -> StreamTimes | None:
        reply = Reply(0.0)
        try:
            await self._client.post(ready, timeout_s=self._plan.timeout_s, reply=reply)
            if reply.status != 200:
                raise StreamError(f"status {reply.status}: {reply.body[:300].decode(errors='replace')}")
            times = read_pieces(reply.pieces, reply.started)
            take_receipt(outcome, times.receipt)
        except asyncio.CancelledError:  # the run ends
            _take_part(outcome, reply)
            raise
        except (StreamError, OSError, TimeoutError, httptools.HttpParserError, *NO_ANSWER) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            outcome.jct_ms = round(self._now_ms() - outcome.sent_ms, 3)
            if 400 <= reply.status < 500 and reply.status not in OVERLOADED:
                self.refused = self.refused or str(error)
            elif is_refused(error):
                self.unreached = self.unreached or str(error)
            return None
        self.gaps_ms += times.gaps_ms
        take_times(outcome, times)
        return times

    def _skip(self, request: Request, outcome: Outcome, why: str) -> None:
        self._begun.add(request.request_id)
        outcome.skipped, outcome.error = True, why
        self._end(request, outcome, None)

    def _end(self, request: Request, outcome: Outcome, times: StreamTimes | None) -> None:
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, self._num_in_flight)
        ended = self._ended.get(request.request_id)
        if ended is None:
            return
        ended.ok, ended.at_ms = outcome.ok, self._now_ms()
        if times is not None:
            ended.token_ids, ended.text = times.token_ids, times.text
        ended.done.set()

    def _bytes_of(self, request: Request) -> bytes | None:
        """The HTTP request; None when a real answer is needed that brought no token ids."""
        plan = self._plan
        body: dict[str, Any] = {
            "model": plan.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": request.session,
        }
        if plan.receipts:
            body["quire_receipt"] = True
        if plan.text:
            answered = (lambda of: self._answer(of).text) if plan.real_history else None
            body["messages"] = tokens.messages(request.prompt, answered=answered)
            if plan.token_ids:
                body["return_token_ids"] = True
            return self._client.request_bytes(CHAT, body)
        ids_of = (lambda of: self._answer(of).token_ids) if plan.real_history else None
        prompt = tokens.prompt_ids(request.prompt, plan.ids, answered=ids_of)
        if plan.real_history and any(
            isinstance(part, tokens.Answer) and not self._answer(part.of).token_ids for part in request.prompt
        ):
            return None
        body["prompt"] = prompt
        if plan.real_history or plan.token_ids:
            body["return_token_ids"] = True
        return self._client.request_bytes(COMPLETIONS, body)

    def _answer(self, of: int) -> _Ended:
        return self._ended[of]


def _outcome(request: Request) -> Outcome:
    return Outcome(
        request_id=request.request_id,
        session=request.session,
        turn=request.turn,
        due_ms=request.arrival_ms,
        planned_prompt_tokens=request.prompt_tokens,
        planned_output_tokens=request.output_tokens,
    )


def _take_part(outcome: Outcome, reply: Reply) -> None:
    """Of an answer that the run's end cut off."""
    times = StreamTimes(reply.started)
    with contextlib.suppress(StreamError):
        read_pieces(reply.pieces, reply.started, times)
    take_cut(outcome, times, (time.perf_counter() - reply.started) * 1000)


def lag_p99_ms(outcomes: Sequence[Outcome]) -> float:
    """Of the requests that were sent; 0 when none was."""
    lags = [one.lag_ms for one in outcomes if not one.skipped]
    return quantile(lags, 0.99) if lags else 0.0


def verdict(outcomes: Sequence[Outcome], plan: Plan) -> str:
    """Why the run measured the client and not the server; "" when it did not."""
    bound = sum(one.skipped and "client's bound" in one.error for one in outcomes)
    if bound:
        most = plan.max_in_flight
        return f"{bound} requests were not sent: {most} in flight are the client's bound (--max-in-flight)"
    lag_ms = lag_p99_ms(outcomes)
    if lag_ms > plan.max_lag_ms:
        late = f"one request in a hundred went out {lag_ms:.0f} ms late or later"
        return f"{late}, {plan.max_lag_ms:.0f} are allowed (--max-lag-ms)"
    return ""
