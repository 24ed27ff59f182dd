"""A dial that this process' own pauses end, and a transport that closes without telling its peer."""

import asyncio
import time

import pytest
import uvloop

from shared.errors import PeerGone
from shared.transport import zmq_channel
from shared.transport.zmq_channel import DealerLink, RouterServer
from shared.transport.zmtp_peer import ZmtpPeer
from tests.support.ask_answer import ANSWER, ASK, Answer, Ask, until

PAUSE_S = 0.15
LIMIT_MS = 100


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/dial.ipc"


@pytest.fixture
def dialled(monkeypatch):
    """Every peer that connected; the first one's process stands still before anything else can happen.

    Later ones have as long as they need.
    """
    found: list[ZmtpPeer] = []
    connect = ZmtpPeer.connection_made

    def connection_made(peer, transport):
        connect(peer, transport)
        if peer._socket_type == b"DEALER":
            found.append(peer)
            if len(found) == 1:
                monkeypatch.setattr(zmq_channel, "CONNECT_TIMEOUT_MS", 60_000)
                time.sleep(PAUSE_S)

    monkeypatch.setattr(ZmtpPeer, "connection_made", connection_made)
    monkeypatch.setattr(zmq_channel, "CONNECT_TIMEOUT_MS", LIMIT_MS)
    return found


def on_uvloop(main):
    """Run it where the processes of a cluster run; errors of its loop are the test's."""
    errors = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await main()

    uvloop.run(watched())
    assert errors == []


async def exchange(address, check):
    """A link and its server, and what happened to the link."""
    events, got = [], []
    server = RouterServer(
        address,
        into=ASK,
        out=ANSWER,
        on_message=lambda who, _seq, ask, _raw: server.send(who, Answer(ask.number)),
    )
    await server.start()
    link = DealerLink(
        server.address, out=ASK, into=ANSWER, on_message=lambda _seq, answer, _raw: got.append(answer.number),
        on_up=lambda: events.append("up"), on_down=lambda: events.append("down"),
    )  # fmt: skip
    try:
        await check(link, events, got)
    finally:
        link.close()
        server.close()


def test_a_dial_that_was_given_up_after_it_connected_leaves_no_link_that_is_up_on_a_closed_transport(
    dialled, monkeypatch, address
):
    monkeypatch.setattr(zmq_channel, "loop_timeout", asyncio.timeout)  # a limit that counts the pause

    async def check(link, events, got):
        link.open()

        def answered():
            if link.up:
                link.send(Ask(7))
            return got

        await until(answered)
        assert len(dialled) == 2, "it dialled again"
        assert dialled[0]._closed
        assert events.count("up") - events.count("down") == 1

    on_uvloop(lambda: exchange(address, check))


def test_a_process_that_stands_still_while_it_dials_keeps_the_connection(dialled, address):
    async def check(link, events, _got):
        await link.connect()
        assert events == ["up"]
        assert len(dialled) == 1

    on_uvloop(lambda: exchange(address, check))


def test_a_link_that_is_closed_before_its_handshake_never_comes_up(address):
    async def check(link, events, _got):
        link.open()
        while link._dialled is None:  # noqa: ASYNC110 - the turn counts in which the dial begins
            await asyncio.sleep(0)
        peer = link._dialled
        link.close()
        assert peer._closed
        await asyncio.sleep(0.05)
        assert events == []
        assert not link.up

    on_uvloop(lambda: exchange(address, check))


class Dead:
    """A transport as uvloop leaves it behind a dial that is cancelled: closed, and connection_lost() never comes."""

    def __init__(self, peer):
        self.abort = peer._transport.abort
        peer._transport = self

    def is_closing(self):
        return True

    def write(self, data):
        raise RuntimeError("unable to perform operation on <it>; the handler is closed")

    pause_reading = resume_reading = lambda self: self.write(b"")


@pytest.mark.parametrize("more", [False, True])
def test_a_transport_that_closed_untold_is_a_lost_connection_to_its_senders(address, more):
    async def check(link, events, _got):
        await link.connect()
        if more:  # queued before, to be written at the end of this turn
            link.send(Ask(1), more=True)
        Dead(link._peer)
        with pytest.raises(PeerGone):
            link.send(Ask(2))
        assert events == ["up"], "nobody hears of it inside a send()"
        await until(lambda: events[:3] == ["up", "down", "up"])
        link.send(Ask(3))

    on_uvloop(lambda: exchange(address, check))


def test_a_transport_that_closed_before_the_handshake_never_makes_a_link_that_is_up(monkeypatch, address):
    connect = ZmtpPeer.connection_made
    ended = []

    def connection_made(peer, transport):
        connect(peer, transport)
        if peer._socket_type == b"DEALER" and not ended:
            ended.append(Dead(peer))

    monkeypatch.setattr(ZmtpPeer, "connection_made", connection_made)

    async def check(link, events, got):
        await link.connect()
        link.send(Ask(1))
        await until(lambda: got)
        assert ended
        assert events == ["up"]

    on_uvloop(lambda: exchange(address, check))


def test_a_transport_that_closed_untold_is_noticed_by_the_next_heartbeat(address):
    async def check(link, events, _got):
        await link.connect()
        Dead(link._peer)
        await until(lambda: events[:3] == ["up", "down", "up"])

    on_uvloop(lambda: exchange(address, check))
