"""Ends of attempts reach the scheduler before the placement after them, and soon when there is none."""

import asyncio
import time

import pytest

from services.gateway import scheduler_link
from services.gateway.scheduler_link import SchedulerLink
from shared.errors import Overloaded, PeerGone
from shared.transport.zmq_channel import RouterServer
from shared.wire.placement import FROM_SCHEDULER, TO_SCHEDULER, Ended, GatewayHello, Place
from tests.integration.test_transport_zmq import until


class Got(list):
    """Messages; a connection's first one apart."""

    def __init__(self):
        super().__init__()
        self.hellos = []


@pytest.fixture
async def scheduler(tmp_path):
    got = Got()

    def hear(_identity, _seq, message, _raw):
        (got.hellos if isinstance(message, GatewayHello) else got).append(message)

    server = RouterServer(f"ipc://{tmp_path}/place", into=TO_SCHEDULER, out=FROM_SCHEDULER, on_message=hear)
    await server.start()
    yield server, got
    server.close()


async def linked(server):
    link = SchedulerLink(server.address, on_message=lambda *_: None, on_down=lambda: None)
    link.open()
    await until(lambda: link.up)
    return link


def place(name):
    return Place(request_id=name, attempt=1, num_prompt_tokens=1)


async def test_the_first_message_says_how_long_requests_may_run(scheduler):
    server, got = scheduler
    link = SchedulerLink(
        server.address, on_message=lambda *_: None, on_down=lambda: None, request_deadline_ms=7_200_000
    )
    link.open()
    await until(lambda: got.hellos)
    assert got.hellos[0].request_deadline_ms == 7_200_000
    link.close()


async def test_ends_travel_before_the_next_placement(scheduler):
    server, got = scheduler
    link = await linked(server)
    link.ended("a", 1)
    link.ended("b", 2)
    link.place(place("c"))
    await until(lambda: len(got) == 3)
    assert got == [
        Ended(request_id="a", attempt=1),
        Ended(request_id="b", attempt=2),
        place("c"),
    ]
    link.close()


async def test_an_end_without_a_placement_waits_some_milliseconds_only(scheduler):
    server, got = scheduler
    link = await linked(server)
    took_s = []
    for number in range(3):
        begin = time.monotonic()
        link.ended("a", number)
        await until(lambda number=number: len(got) == number + 1)
        took_s.append(time.monotonic() - begin)
    assert min(took_s) < 0.5
    link.close()


async def test_closing_sends_what_waits_and_a_closed_link_sends_no_more(scheduler):
    server, got = scheduler
    link = await linked(server)
    link.ended("a", 1)
    link.close()
    await until(lambda: got)
    with pytest.raises(PeerGone):
        link.place(place("b"))
    link.ended("c", 1)
    link.close()
    await asyncio.sleep(0.02)
    assert len(got) == 1


async def test_ends_that_could_not_be_sent_are_told_in_order_when_the_link_is_up_again(scheduler):
    """The scheduler may only have stood still, and counts these attempts as running."""
    server, got = scheduler
    link = await linked(server)
    link.place(place("a"))
    await until(lambda: got)
    server.close()
    await until(lambda: not link.up)
    link.ended("a", 1)
    link.ended("b", 2)
    await asyncio.sleep(0.02)
    await server.start()
    await until(lambda: len(got) == 3)
    assert got[1:] == [Ended(request_id="a", attempt=1), Ended(request_id="b", attempt=2)]
    link.close()


async def test_of_ends_that_wait_the_newest_are_kept(scheduler, monkeypatch):
    monkeypatch.setattr(scheduler_link, "MAX_ENDED", 3)
    server, got = scheduler
    link = SchedulerLink(server.address, on_message=lambda *_: None, on_down=lambda: None)
    for number in range(5):
        link.ended("a", number)
    link.open()
    await until(lambda: len(got) == 3)
    assert [end.attempt for end in got] == [2, 3, 4]
    link.close()


async def test_a_queue_that_is_full_keeps_the_ends_back_and_loses_none(scheduler, monkeypatch):
    server, got = scheduler
    link = await linked(server)
    send, num_refused = link._link.send, 0

    def refuse_twice(message, **more):
        nonlocal num_refused
        if num_refused < 2:
            num_refused += 1
            raise Overloaded("the queue is full", retry_after_ms=100)
        return send(message, **more)

    monkeypatch.setattr(link._link, "send", refuse_twice)
    link.ended("a", 1)
    link.ended("a", 2)
    await until(lambda: len(got) == 2)
    assert [end.attempt for end in got] == [1, 2]
    link.close()


async def test_a_gateway_says_the_same_name_on_each_connection_and_another_one_another(scheduler):
    server, got = scheduler
    one = await linked(server)
    await until(lambda: len(got.hellos) == 1)
    server.close()
    await until(lambda: not one.up)
    await server.start()
    await until(lambda: len(got.hellos) == 2)
    other = await linked(server)
    await until(lambda: len(got.hellos) == 3)
    first, again, another = (hello.gateway for hello in got.hellos)
    assert first == again != another
    one.close()
    other.close()
