"""Two messages and patience: what tests of every kind of channel need."""

import asyncio
import time

from msgspec import Struct

from shared.wire.codec import Channel


class Ask(Struct, frozen=True, tag="ask"):
    number: int


class Answer(Struct, frozen=True, tag="answer"):
    number: int


ASK: Channel[Ask] = Channel(b"test.ask/1", Ask)
ANSWER: Channel[Answer] = Channel(b"test.answer/1", Answer)


async def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never became true"
        await asyncio.sleep(0.002)
