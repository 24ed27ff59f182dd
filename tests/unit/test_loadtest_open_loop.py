"""loadtest/open_loop.py against a client that only records: what later turns carry, and when they go out."""

import asyncio
import json
import time

from loadtest.open_loop import OpenLoop, Plan
from loadtest.workloads import tokens
from loadtest.workloads.request import Answer, Request, Segment

FIRST = Request(0, 0.0, "s", 0, (Segment(1, 4),), 3)
SECOND = Request(1, 1.0, "s", 1, (Segment(1, 4), Answer(0, 3), Segment(2, 2)), 3, depends_on=0, think_ms=30)


class RecordingClient:
    """Answers each request with three token ids after 20 ms."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []

    def request_bytes(self, path: str, body: dict) -> bytes:
        return json.dumps({"path": path, **body}).encode()

    async def post(self, request: bytes, *, timeout_s: float, reply) -> None:
        self.bodies.append(json.loads(request))
        reply.started = time.perf_counter()
        await asyncio.sleep(0.02)
        event = {"choices": [{"text": "three words here", "token_ids": [11, 12, 13]}]}
        reply.status = 200
        reply.pieces = [
            (time.perf_counter(), b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
        ]


async def run(**plan):
    client = RecordingClient()
    outcomes = await OpenLoop(client, Plan(model="m", **plan)).run([FIRST, SECOND])  # pyright: ignore
    return client.bodies, outcomes


async def test_a_later_turn_carries_what_was_really_answered_and_waits_its_think_time():
    for _ in range(10):  # a busy machine may be late, but not each time
        bodies, outcomes = await run(real_history=True)
        if outcomes[1].lag_ms < 30:
            break
    ids = tokens.TokenRange()
    begin, tail = tokens.prompt_ids(FIRST.prompt, ids), tokens.prompt_ids(SECOND.prompt[2:], ids)
    assert bodies[1]["prompt"] == [*begin, 11, 12, 13, *tail]
    assert bodies[1]["max_tokens"] == 3
    assert bodies[1]["user"] == "s"
    assert outcomes[1].sent_ms >= outcomes[0].ended_ms + 30
    assert outcomes[1].lag_ms < 30  # it was late by its own fault only


async def test_planned_histories_and_words_are_there_where_asked_for():
    bodies, _ = await run()
    assert bodies[1]["prompt"] == tokens.prompt_ids(SECOND.prompt, tokens.TokenRange())
    assert "return_token_ids" not in bodies[1]
    bodies, _ = await run(text=True, real_history=True)
    assert [one["role"] for one in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"] == "three words here"
    assert bodies[1]["path"] == "/v1/chat/completions"


class FailingClient(RecordingClient):
    """Says 503 after 20 ms."""

    async def post(self, request: bytes, *, timeout_s: float, reply) -> None:
        await asyncio.sleep(0.02)
        reply.status = 503


async def test_a_request_that_fails_was_in_flight_until_it_did():
    outcomes = await OpenLoop(FailingClient(), Plan(model="m")).run([FIRST])  # pyright: ignore
    assert outcomes[0].error.startswith("StreamError: status 503")
    assert outcomes[0].jct_ms >= 19
