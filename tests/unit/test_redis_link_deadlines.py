"""Deadlines of calls on one Redis connection: one timer for all, each call its own end."""

import asyncio
import errno

import pytest

from shared.errors import PeerGone, PeerTimeout
from shared.ids import BlockHash
from shared.prompttree import client as client_module
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.scripts import LOOKUP
from shared.transport.redis_link import RedisLink, _Connection
from tests.support.quickest import ever


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


def timers_of(monkeypatch):
    """(when made, when due) of every timer from now on, in seconds of the loop."""
    loop, found = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def noting(when, *args, **more):
        found.append((loop.time(), when))
        return call_at(when, *args, **more)

    monkeypatch.setattr(loop, "call_at", noting)
    return found


@pytest.mark.parametrize(("deadline_ms", "waits_ms"), [(20, 17.0), (100, 97.0), (3, 1.5)])
async def test_a_look_ups_deadline_has_room_for_a_timer_that_is_late(
    connection, monkeypatch, deadline_ms, waits_ms
):
    timers = timers_of(monkeypatch)

    async def is_so_long():
        """Not where a busy machine stops this process between two looks at the clock."""
        client = PromptTreeClient("redis://127.0.0.1:1/0", deadline_ms=deadline_ms)
        client._link._connection = connection
        timers.clear()
        assert await client.ask([BlockHash(bytes(32))], 16) is None
        assert client.num_failures == 1
        [(made_s, due_s)] = timers
        return (due_s - made_s) * 1000 == pytest.approx(waits_ms, abs=0.5)

    assert await ever(is_so_long)


async def test_a_redis_that_was_given_up_is_probed_also_where_that_could_not_be_logged(
    connection, monkeypatch
):
    class Log:
        def warning(self, event, **fields):
            raise OSError(errno.ENOSPC, event)

    monkeypatch.setattr(client_module, "_log", Log())
    client = PromptTreeClient("redis://127.0.0.1:1/0", deadline_ms=2)
    client._link._connection = connection
    errors = []
    while client.up:
        try:
            await client.lookup([BlockHash(bytes(32))], 16)
        except OSError as error:
            errors.append(error)
    assert len(errors) == 1
    assert client._probe is not None
    client._probe.cancel()


async def test_a_script_that_must_be_loaded_first_has_no_more_time_than_others(connection, monkeypatch):
    link = RedisLink("redis://127.0.0.1:1/0")
    link._connection = connection
    loop = asyncio.get_running_loop()
    timers, now_s = timers_of(monkeypatch), loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)  # it stands still, however slow this machine is
    running = asyncio.ensure_future(link.run(LOOKUP, "x", timeout_ms=40))
    await asyncio.sleep(0)
    now_s += 0.02
    connection.data_received(b"-NOSCRIPT No matching script.\r\n")
    for _ in range(5):
        await asyncio.sleep(0)
    now_s += 0.021
    with pytest.raises(PeerTimeout, match="within 20 ms"):
        await running
    made_s, due_s = timers[0]
    assert (due_s - made_s) * 1000 == pytest.approx(40, abs=1)
    assert all(due <= due_s + 0.001 for _, due in timers)
