"""The last event of a prompt shares a write with the end of the stream, but waits for it one turn only."""

import asyncio

from services.gateway.streaming import DONE
from tests.support.stream_answer import stream_answer


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
    push = Recorder()
    return stream_answer(push), push


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
