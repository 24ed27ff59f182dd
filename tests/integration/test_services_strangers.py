"""Connections to the scheduler and to workers that shake hands, answer heartbeats and say nothing."""

import json

import pytest

from shared.transport.zmq_channel import DealerLink
from shared.wire.placement import FROM_SCHEDULER, TO_SCHEDULER
from shared.wire.reports import REPORT_REPLIES, REPORTS
from shared.wire.requests import TO_GATEWAY, TO_WORKER, Abort, Alive
from tests.integration.test_worker_front import running
from tests.support.ask_answer import until
from tests.support.control_plane import hello, place
from tests.support.lone_scheduler import scheduler_of_one

ROOM = 3  # connections that each server takes here


@pytest.fixture
async def dial():
    """A function that connects to an address; its links are closed at the end."""
    links = []

    async def connected(address, out, into, got=None, downs=None):
        got, downs = [] if got is None else got, [] if downs is None else downs
        link = DealerLink(
            address, out=out, into=into, on_message=lambda _, message, raw: got.append(message),
            on_down=lambda: downs.append(link),
        )  # fmt: skip
        links.append(link)
        await link.connect()
        return link

    yield connected
    for link in links:
        link.close()


@pytest.fixture
async def scheduler(tmp_path):
    async with scheduler_of_one(tmp_path) as made:
        yield made


async def a_newcomer_gets_in(dial, server, channels, says):
    """With a server of ROOM places, one of them taken by a peer that has said something."""
    server._max_peers = ROOM
    first = await dial(server.address, *channels)
    first.send(says("first"))
    await until(lambda: server._peers and not server._unaccepted)
    downs = []
    strangers = [await dial(server.address, *channels, downs=downs) for _ in range(ROOM - 1)]
    await until(lambda: len(server._peers) == ROOM)
    assert not downs, "who has nothing to say yet may stay while there is room"
    got = []
    late = await dial(server.address, *channels, got=got)
    late.send(says("late"))
    await until(lambda: downs)  # and comes back, in the place of the next one
    assert downs[0] is strangers[0]
    await until(lambda: len(server._peers) - len(server._unaccepted) == 2)
    assert first.up
    assert late.up
    return got


async def test_strangers_keep_no_gateway_out_of_the_scheduler(scheduler, dial):
    channels = TO_SCHEDULER, FROM_SCHEDULER
    got = await a_newcomer_gets_in(dial, scheduler._places, channels, place)  # Place first, as old gateways
    await until(lambda: got)
    assert got[0].request_id == "late"


async def test_strangers_keep_no_worker_out_of_the_scheduler(scheduler, dial):
    channels = REPORTS, REPORT_REPLIES
    await a_newcomer_gets_in(dial, scheduler._reports, channels, lambda name: hello(name, role="colocated"))
    assert {known.instance for known in scheduler.instances} == {"c0", "first", "late"}


async def test_strangers_keep_no_gateway_out_of_a_worker(tmp_path, dial):
    shape = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = {"first": Alive(), "late": Abort(request_id="none", attempt=1)}
    async with running(str(tmp_path)) as (rig, gateway):
        gateway.alive()
        await until(lambda: rig.front.num_gateways)
        gateway.link.close()
        await until(lambda: not rig.front._router._peers)
        await a_newcomer_gets_in(dial, rig.front._router, (TO_WORKER, TO_GATEWAY), words.__getitem__)
