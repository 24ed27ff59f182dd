"""The unix channel over real sockets: descriptors, credentials, bounds, and both kinds of client."""

import asyncio
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shared.errors import Overloaded, PeerGone, PeerProtocolError, PeerTimeout, SettingsError
from shared.transport import unix_channel
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_channel import UnixLink, UnixServer
from shared.transport.unix_framing import pack_message
from tests.support.ask_answer import ANSWER, ASK, Answer, Ask, until
from tests.support.quickest import quickest_s

ROOT = Path(__file__).resolve().parents[2]


def num_open_fds():
    return len(os.listdir("/proc/self/fd"))


class Served:
    """A server that echoes, and remembers."""

    def __init__(self, path, **options):
        self.connected, self.ended = [], []
        self.fds_for = lambda _number: ()
        self.server = UnixServer(
            path,
            into=ASK,
            out=ANSWER,
            on_message=self.on_message,
            on_connect=self.connected.append,
            on_disconnect=lambda connection, error: self.ended.append((connection, error)),
            **options,
        )

    def on_message(self, connection, _seq, ask, raw):
        connection.send(Answer(ask.number), raw, self.fds_for(ask.number))


@pytest.fixture
async def served(tmp_path):
    served = Served(tmp_path / "pool.sock")
    await served.server.start()
    yield served
    served.server.close()


@pytest.fixture
async def link(served):
    got, downs = [], []
    link = UnixLink(
        served.server.path,
        out=ASK,
        into=ANSWER,
        on_message=lambda *args: got.append(args),
        on_down=downs.append,
    )
    link.got, link.downs = got, downs
    await link.connect()
    yield link
    link.close()


async def test_messages_of_any_size_come_back_in_order(link):
    sizes = [0, 1, 1_000, 300_000, 5_000_000, 2]
    for n, size in enumerate(sizes):
        assert link.send(Ask(n), [bytes([n]) * size]) == n
    await until(lambda: len(link.got) == len(sizes))
    assert link.got == [(n, Answer(n), [bytes([n]) * size], []) for n, size in enumerate(sizes)]


async def test_descriptors_arrive_open_private_and_on_the_right_message(served, link):
    memory = os.memfd_create("pages")
    os.ftruncate(memory, 4096)
    before = num_open_fds()
    served.fds_for = lambda number: (memory, memory) if number % 3 == 0 else ()
    for n in range(30):
        link.send(Ask(n), [bytes(50_000)])
        if n % 7 == 0:
            await until(lambda n=n: len(link.got) == n + 1)
    await until(lambda: len(link.got) == 30)
    assert [len(fds) for *_, fds in link.got] == [2 if n % 3 == 0 else 0 for n in range(30)]
    first, *_ = link.got[0][3]
    with mmap.mmap(first, 4096) as view:
        view[:5] = b"hello"
    assert os.pread(memory, 5, 0) == b"hello"
    assert not os.get_inheritable(first)
    for *_, fds in link.got:
        for fd in fds:
            os.close(fd)
    assert num_open_fds() == before  # the server keeps no copy
    os.close(memory)


async def test_descriptors_of_a_message_still_queued_may_be_closed_by_the_sender(served, link):
    read_end, write_end = os.pipe()
    served.connected[0].send(Answer(0), [bytes(8_000_000)])
    served.connected[0].send(Answer(1), fds=[write_end])
    os.close(write_end)
    await until(lambda: len(link.got) == 2)
    (received,) = link.got[1][3]
    os.write(received, b"x")
    assert os.read(read_end, 1) == b"x"
    os.close(received)
    os.close(read_end)


async def test_the_server_knows_who_connected_and_can_hold_its_pidfd(served, link):
    connection = served.connected[0]
    assert (connection.peer.pid, connection.peer.uid) == (os.getpid(), os.getuid())
    signal.pidfd_send_signal(connection.pidfd, 0)
    kept = connection.take_pidfd()
    link.close()
    await until(lambda: served.ended)
    signal.pidfd_send_signal(kept, 0)
    os.close(kept)


async def test_the_pidfd_nobody_took_is_closed_with_the_connection(served):
    before = num_open_fds()
    for _ in range(3):
        reader, writer = await asyncio.open_unix_connection(served.server.path)
        writer.close()
        await writer.wait_closed()
        del reader
    await until(lambda: len(served.ended) == 3)
    assert num_open_fds() == before


async def test_other_users_are_refused(tmp_path):
    served = Served(tmp_path / "pool.sock", allowed_uids=frozenset({os.getuid() + 1}))
    await served.server.start()
    link = UnixLink(served.server.path, out=ASK, into=ANSWER, on_message=lambda *_: None)
    await link.connect()
    await until(lambda: not link.up)
    assert served.server.num_refused == 1
    assert served.connected == []
    served.server.close()


async def test_the_socket_is_private_and_removed_at_close(served):
    assert stat.S_IMODE(served.server.path.stat().st_mode) == 0o600
    served.server.close()
    assert not served.server.path.exists()


async def test_a_stale_socket_is_replaced_but_a_served_one_and_a_file_are_not(tmp_path):
    path = tmp_path / "pool.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    served = Served(path)
    await served.server.start()
    with pytest.raises(SettingsError, match="another process serves"):
        await Served(path).server.start()
    served.server.close()
    path.write_text("precious")
    with pytest.raises(SettingsError, match="not a socket"):
        await Served(path).server.start()
    assert path.read_text() == "precious"
    with pytest.raises(SettingsError, match="107 bytes"):
        await Served(tmp_path / ("x" * 120)).server.start()


async def test_more_connections_than_allowed_are_refused(tmp_path):
    served = Served(tmp_path / "pool.sock", max_connections=2)
    await served.server.start()
    links = [UnixLink(served.server.path, out=ASK, into=ANSWER, on_message=lambda *_: None) for _ in range(3)]
    for link in links:
        await link.connect()
    await until(lambda: not links[2].up)
    assert [link.up for link in links] == [True, True, False]
    served.server.close()
    await until(lambda: not any(link.up for link in links))


GOOD = ASK.pack(Ask(1))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        pack_message([b"only one frame"]),
        pack_message([b"other/1", *GOOD[1:]]),
        pack_message([GOOD[0], GOOD[1], b"\xc1"]),
        pack_message(GOOD, num_fds=1),
        pack_message(ANSWER.pack(Answer(1))),
    ],
)
async def test_a_malformed_message_ends_its_connection_and_no_other(served, link, garbage):
    reader, writer = await asyncio.open_unix_connection(served.server.path)
    writer.write(garbage)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert served.server.num_malformed == 1
    assert isinstance(served.ended[0][1], PeerProtocolError)
    link.send(Ask(1))
    await until(lambda: link.got)


async def test_descriptors_from_a_client_are_refused_and_closed(served):
    before = num_open_fds()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(served.server.path))
    socket.send_fds(sock, [pack_message(GOOD, num_fds=1)], [0])
    await until(lambda: served.ended)
    assert isinstance(served.ended[0][1], PeerProtocolError)
    sock.close()
    assert num_open_fds() == before


async def test_what_waits_for_a_client_that_does_not_read_is_bounded(served, monkeypatch):
    monkeypatch.setattr(unix_channel, "MAX_QUEUED_BYTES", 1_000_000)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(served.server.path))
    await until(lambda: served.connected)

    def flood():
        for _ in range(100):
            served.connected[0].send(Answer(0), [bytes(100_000)])

    with pytest.raises(Overloaded):
        flood()
    sock.close()
    await until(lambda: served.ended)
    with pytest.raises(PeerGone):
        served.connected[0].send(Answer(0))


async def test_a_lost_server_is_noticed_and_the_link_can_connect_again(served, link, tmp_path):
    served.server.close()
    await until(lambda: link.downs)
    with pytest.raises(PeerGone):
        link.send(Ask(1))
    with pytest.raises(PeerGone):
        await link.connect()
    again = Served(served.server.path)
    await again.server.start()
    await link.connect()
    link.send(Ask(5))
    await until(lambda: link.got)
    again.server.close()


CHILD = """
import sys, time
from pathlib import Path
from tests.integration.test_transport_unix import ASK, ANSWER, Ask
from shared.transport.unix_blocking import BlockingUnixLink
link = BlockingUnixLink(Path(sys.argv[1]), out=ASK, into=ANSWER, on_message=lambda *_: None)
link.connect()
link.call(Ask(1))
print("ready", flush=True)
time.sleep(60)
"""


def start_client(path):
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, cwd=ROOT)


async def test_a_killed_client_is_noticed_within_100_ms_and_its_pidfd_tells(served):
    async def attempt():
        served.ended.clear()
        child = start_client(served.server.path)
        await asyncio.to_thread(child.stdout.readline)
        pidfd = served.connected[-1].take_pidfd()
        begin = time.monotonic()
        child.kill()
        await until(lambda: served.ended)
        took_s = time.monotonic() - begin
        child.wait()
        child.stdout.close()
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)
        return took_s

    assert await quickest_s(attempt, 0.1) < 0.1


class Engine:
    """A blocking link with what it was told."""

    def __init__(self, path, **options):
        self.got, self.downs, self.threads = [], [], set()
        self.link = BlockingUnixLink(
            path, out=ASK, into=ANSWER, on_message=self.on_message, on_down=self.downs.append, **options
        )

    def on_message(self, *message):
        self.threads.add(threading.current_thread().name)
        self.got.append(message)


async def test_an_engine_attaches_with_descriptors_then_talks_from_any_thread(served):
    memory = os.memfd_create("pages")
    served.fds_for = lambda number: (memory,) if number == 0 else ()
    engine = Engine(served.server.path)

    def attach():
        engine.link.connect()
        reply, raw, fds = engine.link.call(Ask(0), [b"description"])
        engine.link.start()
        return reply, raw, fds

    reply, raw, fds = await asyncio.to_thread(attach)
    assert (reply, raw, len(fds)) == (Answer(0), [b"description"], 1)
    assert os.fstat(fds[0]).st_ino == os.fstat(memory).st_ino

    def send(first):
        for n in range(first, first + 200):
            engine.link.send(Ask(n), [bytes(n)])

    await asyncio.gather(*(asyncio.to_thread(send, first) for first in (1, 1_000, 2_000)))
    await until(lambda: len(engine.got) == 600)
    assert sorted(message.number for _, message, _, _ in engine.got) == [
        *range(1, 201), *range(1_000, 1_200), *range(2_000, 2_200)
    ]  # fmt: skip
    assert engine.threads == {"quire-unix-link"}
    await asyncio.to_thread(engine.link.close)
    assert engine.downs == [None]
    with pytest.raises(PeerGone):
        engine.link.send(Ask(1))
    for fd in (memory, *fds):
        os.close(fd)


async def test_an_engine_hears_that_the_server_went_away(served):
    engine = Engine(served.server.path)
    await asyncio.to_thread(engine.link.connect)
    engine.link.start()
    await until(lambda: served.connected)
    served.server.close()
    await until(lambda: engine.downs)
    assert isinstance(engine.downs[0], PeerGone)
    assert not engine.link.up
    engine.link.close()


async def test_a_message_that_an_engine_cannot_handle_by_a_bug_ends_its_link(served):
    """Its reader was gone, its link looked up, and it heard nothing any more."""
    engine = Engine(served.server.path)

    def bug(*_):
        raise KeyError("our bug")

    engine.link._on_message = bug
    await asyncio.to_thread(engine.link.connect)
    engine.link.start()
    engine.link.send(Ask(1))
    await until(lambda: engine.downs)
    assert isinstance(engine.downs[0], KeyError)
    assert not engine.link.up
    engine.link.close()


async def test_an_engine_waits_no_longer_than_told(served):
    served.server._on_message = lambda *_: None
    engine = Engine(served.server.path, send_timeout_ms=200)
    await asyncio.to_thread(engine.link.connect)
    with pytest.raises(PeerTimeout, match="did not answer"):
        await asyncio.to_thread(engine.link.call, Ask(1), timeout_ms=50)
    begin = time.monotonic()

    def flood():  # the loop that serves it is this very thread: nobody reads
        for _ in range(1_000):
            engine.link.send(Ask(1), [bytes(100_000)])

    with pytest.raises(PeerTimeout, match="did not read"):
        flood()
    assert time.monotonic() - begin < 10.0
    assert not engine.link.up
    engine.link.close()


async def test_connecting_to_nothing_is_said_at_once(tmp_path):
    with pytest.raises(PeerGone):
        Engine(tmp_path / "none.sock").link.connect()
