"""The last event of a prompt shares a write with the end of the stream, but waits for it one turn only."""

import asyncio
from types import SimpleNamespace

from services.gateway.core.admission import Admission
from services.gateway.streaming import DONE, EventShape, StreamAnswer
from shared.observe.trace import start_span


class Recorder:
    def __init__(self):
        self.writes = []

    def start_stream(self, headers):
        del headers

    def write(self, data):
        self.writes.append(data)
        return True

    def end_stream(self, last):
        self.writes.append(last)


def make():
    push, admission = Recorder(), Admission(10)
    answer = StreamAnswer(
        shape=EventShape("chat", "id", 1, "m", "fp", False),
        include_usage=False,
        cluster=SimpleNamespace(cancel=lambda call: None),
        admission=admission,
        ticket=admission.enter("", 1, now_ms=0),
        scope={},
        push=push,
        request_id="id",
        span=start_span("test"),
        received_ns=0,
        wants_receipt=False,
    )
    return answer, push


async def test_with_the_end_in_the_same_turn_there_is_one_write():
    answer, push = make()
    answer.emit(b"first")
    answer.emit_last(b"last")
    answer.complete()
    await asyncio.sleep(0)
    assert push.writes == [b"first", b"last" + DONE]


async def test_without_the_end_it_leaves_after_the_turn():
    answer, push = make()
    answer.emit_last(b"last")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert push.writes == [b"last"]
    answer.complete()
    assert push.writes == [b"last", DONE]


async def test_a_failure_comes_after_it():
    answer, push = make()
    answer.emit_last(b"last")
    answer.fail("peer.gone", "gone", None)
    assert push.writes[0] == b"last"
    assert push.writes[1].endswith(DONE)
    assert b'"error"' in push.writes[1]


async def test_other_prompts_events_do_not_overtake_it():
    answer, push = make()
    answer.emit_last(b"one ")
    answer.emit(b"two")
    await asyncio.sleep(0)
    assert push.writes == [b"one two"]
