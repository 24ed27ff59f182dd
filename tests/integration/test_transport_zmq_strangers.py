"""Connections that never say who they are: they end, and keep nobody else out."""

import asyncio

from tests.integration.test_transport_zmq import dial, opened, serve  # noqa: F401 - a fixture
from tests.support.ask_answer import Answer, Ask, until


async def strange_server(opened, **options):  # noqa: F811
    """It accepts who asks with number 1."""
    lost = []

    def on_message(identity, _seq, ask, _raw):
        if ask.number == 1:
            server.accept(identity)
        server.send(identity, Answer(ask.number))

    server = await serve(opened, on_message, on_lost=lost.append, **options)
    return server, lost


async def test_a_connection_that_is_not_accepted_in_time_ends_whatever_it_says(opened):  # noqa: F811
    server, lost = await strange_server(opened, hello_ms=1_500)
    downs, got = [], []
    link = dial(opened, server.address, got)
    await link.connect()
    link.send(Ask(1))
    await until(lambda: got)
    stranger = dial(opened, server.address, [], on_down=lambda: downs.append(1))
    await stranger.connect()
    stranger.send(Ask(2))
    await until(lambda: downs)
    assert len(lost) == 1
    await asyncio.sleep(1.7)
    assert link.up
    link.send(Ask(3))
    await until(lambda: len(got) == 2)


async def test_of_too_many_connections_the_oldest_stranger_makes_room(opened):  # noqa: F811
    server, lost = await strange_server(opened, hello_ms=60_000, max_peers=3)
    got, downs = [], []
    link = dial(opened, server.address, got)
    await link.connect()
    link.send(Ask(1))
    await until(lambda: got)
    for name in "abc":
        await dial(opened, server.address, [], on_down=lambda name=name: downs.append(name)).connect()
    await until(lambda: downs)
    assert downs == ["a"]
    assert len(lost) == 1
    assert link.up


async def test_where_all_are_accepted_the_newcomer_is_refused(opened):  # noqa: F811
    server, lost = await strange_server(opened, hello_ms=60_000, max_peers=1)
    got = []
    link = dial(opened, server.address, got)
    await link.connect()
    link.send(Ask(1))
    await until(lambda: got)
    dial(opened, server.address, [])
    await asyncio.sleep(0.5)  # it dials again and again
    assert len(server._peers) == 1
    assert link.up
    assert not lost
