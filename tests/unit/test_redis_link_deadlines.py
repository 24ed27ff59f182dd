"""Deadlines of calls on one Redis connection: one timer for all, each call its own end."""

import asyncio

import pytest

from shared.errors import PeerGone, PeerTimeout
from shared.transport.redis_link import _Connection


class Wire(asyncio.Transport):
    """Takes everything, answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data) -> None:
        self.written.append(bytes(data))


@pytest.fixture
async def connection():
    found = _Connection(lambda _: None)
    found.connection_made(Wire())
    yield found
    found.connection_lost(None)


async def test_a_short_deadline_behind_a_long_one_is_kept_and_the_long_one_goes_on(connection):
    long = connection.ask(("GET", "a"), 3_600)
    short = connection.ask(("GET", "b"), 0.01)
    with pytest.raises(PeerTimeout, match="within 10 ms"):
        await short
    assert not long.done()
    connection.data_received(b"+for a\r\n")
    assert await long == b"for a"
    connection.data_received(b"+late\r\n")  # its place was kept: it is nobody else's
    third = connection.ask(("GET", "c"), 3_600)
    connection.data_received(b"+for c\r\n")
    assert await third == b"for c"


async def test_every_call_ends_by_its_own_deadline(connection):
    asked = [connection.ask(("GET", "x"), 0.01 * number) for number in (3, 1, 2)]
    for future in (asked[1], asked[2], asked[0]):
        with pytest.raises(PeerTimeout):
            await future
    assert len(connection.waiting) == 3


async def test_what_waits_when_the_connection_ends_ends_with_it(connection):
    asked = connection.ask(("GET", "x"), 3_600)
    connection.connection_lost(None)
    with pytest.raises(PeerGone):
        await asked
