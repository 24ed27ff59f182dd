"""Our ZeroMQ and libzmq's: each at either end, over TCP and unix sockets, with heartbeats and without."""

import asyncio
import os
import time

import pytest
import zmq

from shared.errors import SettingsError
from shared.transport import zmtp
from shared.transport.zmq_channel import DealerLink, RouterServer
from tests.integration.test_transport_zmq import ANSWER, ASK, Answer, Ask, until
from tests.support.quickest import ever


@pytest.fixture
def libzmq():
    """Makes libzmq sockets and closes them."""
    context, made = zmq.Context(), []

    def make(kind, **options):
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        made.append(socket)
        return socket

    yield make
    for socket in made:
        socket.close()
    context.term()


def addresses(tmp_path):
    return ["tcp://127.0.0.1:0", f"ipc://{tmp_path}/socket"]


@pytest.mark.parametrize("where", [0, 1])
async def test_a_libzmq_dealer_talks_to_our_router(libzmq, tmp_path, where):
    server = RouterServer(
        addresses(tmp_path)[where],
        into=ASK,
        out=ANSWER,
        on_message=lambda identity, _seq, ask, raw: server.send(identity, Answer(ask.number), raw),
    )
    await server.start()
    raw = libzmq(zmq.DEALER)
    raw.connect(server.address)
    big = os.urandom(5 << 20)
    for number in range(50):
        raw.send_multipart(ASK.pack(Ask(number), seq=number, raw=[b"", b"x" * 255, b"y" * 256]))
    raw.send_multipart(ASK.pack(Ask(50), raw=[big]))
    for number in range(51):
        assert await asyncio.to_thread(raw.poll, 30_000)
        _, answer, extra = ANSWER.unpack(raw.recv_multipart())
        assert answer == Answer(number)
    assert extra == [big]
    server.close()


@pytest.mark.parametrize("where", [0, 1])
async def test_our_dealer_talks_to_a_libzmq_router(libzmq, tmp_path, where):
    raw = libzmq(zmq.ROUTER)
    raw.bind(addresses(tmp_path)[where].replace(":0", ":*"))
    got = []
    link = DealerLink(
        raw.getsockopt_string(zmq.LAST_ENDPOINT),
        out=ASK,
        into=ANSWER,
        on_message=lambda *args: got.append(args),
    )
    await link.connect()
    big = os.urandom(5 << 20)
    link.send(Ask(1), [b"", big])
    assert await asyncio.to_thread(raw.poll, 30_000)
    identity, *frames = raw.recv_multipart()
    assert ASK.unpack(frames) == (0, Ask(1), [b"", big])
    raw.send_multipart([identity, *ANSWER.pack(Answer(2), raw=[big])])
    await until(lambda: got)
    assert got == [(0, Answer(2), [big])]
    link.close()


@pytest.mark.parametrize(
    "options", [{}, {"HEARTBEAT_IVL": 200, "HEARTBEAT_TIMEOUT": 1500, "HEARTBEAT_TTL": 1500}]
)
async def test_a_quiet_connection_lives_on_heartbeats(libzmq, options):
    raw = libzmq(zmq.ROUTER, **options)
    port = raw.bind_to_random_port("tcp://127.0.0.1")

    async def lives():
        """3.5 s. Who is stopped for longer than a heartbeat may be away is given up, and rightly."""
        downs = []
        link = DealerLink(
            f"tcp://127.0.0.1:{port}",
            out=ASK,
            into=ANSWER,
            on_message=lambda *_: None,
            on_down=lambda: downs.append(1),
        )
        await link.connect(30_000)
        await asyncio.sleep(3.5)
        is_up = link.up and not downs
        link.close()
        return is_up

    assert await ever(lives)


async def test_a_peer_that_says_nothing_is_given_up_after_its_greeting_or_before():
    server = RouterServer("tcp://127.0.0.1:0", into=ASK, out=ANSWER, on_message=lambda *_: None)
    await server.start()
    host, port = server.address.removeprefix("tcp://").split(":")
    for begins_with in (b"", zmtp.GREETING, zmtp.GREETING + zmtp.ready(b"DEALER")):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begins_with)
        begin = time.monotonic()
        async with asyncio.timeout(30):
            await reader.read()  # PINGs nobody answers, then the end
        assert time.monotonic() - begin < 10
        writer.close()
    server.close()


@pytest.mark.parametrize(
    "bytes_after_greeting",
    [
        zmtp.ready(b"SUB"),
        b"".join(zmtp.encode([b"too", b"early"])),
        zmtp.ready(b"DEALER") + b"\x02" + (1 << 40).to_bytes(8, "big"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_cut_off_at_once(bytes_after_greeting):
    server = RouterServer("tcp://127.0.0.1:0", into=ASK, out=ANSWER, on_message=lambda *_: None)
    await server.start()
    host, port = server.address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(zmtp.GREETING + bytes_after_greeting)
    async with asyncio.timeout(30):
        await reader.read()
    writer.close()
    server.close()


async def test_a_star_is_every_interface_and_nonsense_is_refused():
    server = RouterServer("tcp://*:*", into=ASK, out=ANSWER, on_message=lambda *_: None)
    await server.start()
    port = int(server.address.rpartition(":")[2])
    link = DealerLink(f"tcp://localhost:{port}", out=ASK, into=ANSWER, on_message=lambda *_: None)
    await link.connect()
    link.close()
    server.close()
    for wrong in (
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://h:70000",
        "ipc://",
        f"ipc:///{'x' * 200}",
        "udp://a:1",
    ):
        with pytest.raises(SettingsError):
            await RouterServer(wrong, into=ASK, out=ANSWER, on_message=lambda *_: None).start()


async def test_a_unix_socket_left_by_a_killed_server_is_taken_over_and_removed_at_the_end(tmp_path):
    path = tmp_path / "socket"
    made = [RouterServer(f"ipc://{path}", into=ASK, out=ANSWER, on_message=lambda *_: None) for _ in range(2)]
    for server in made:  # the second finds the first one's file
        await server.start()
    link = DealerLink(f"ipc://{path}", out=ASK, into=ANSWER, on_message=lambda *_: None)
    await link.connect()
    made[0].close()
    assert path.exists()  # it is not its own any more
    made[1].close()
    assert not path.exists()
    await until(lambda: not link.up)
    link.close()
