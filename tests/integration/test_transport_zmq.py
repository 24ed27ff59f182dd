"""DealerLink and RouterServer over real sockets: order, bounds, malformed peers, death and freeze."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from shared.errors import Overloaded, PeerGone, PeerTimeout, SettingsError
from shared.free_ports import free_port
from shared.transport.zmq_channel import DealerLink, RouterServer
from shared.transport.zmtp_peer import ZmtpPeer
from tests.support.ask_answer import ANSWER, ASK, Answer, Ask, until
from tests.support.quickest import quickest_s

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def opened():
    """Closes what a test appends to it."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


async def serve(opened, on_message=None, **options):
    def answer(identity, _, ask, raw):
        server.send(identity, Answer(ask.number), raw)

    server = RouterServer(
        "tcp://127.0.0.1:0", into=ASK, out=ANSWER, on_message=on_message or answer, **options
    )
    await server.start()
    opened.append(server)
    return server


def dial(opened, address, got, **options):
    link = DealerLink(address, out=ASK, into=ANSWER, on_message=lambda *args: got.append(args), **options)
    opened.append(link)
    return link


async def test_answers_come_in_order_with_sequence_numbers_and_raw_frames(opened):
    server = await serve(opened)
    got = []
    link = dial(opened, server.address, got)
    await link.connect()
    assert [link.send(Ask(n), [b"raw", bytes([n % 256])]) for n in range(1_000)] == list(range(1_000))
    await until(lambda: len(got) == 1_000)
    assert got == [(n, Answer(n), [b"raw", bytes([n % 256])]) for n in range(1_000)]


async def test_a_link_can_send_the_moment_it_is_up(opened):
    server = await serve(opened)
    for _ in range(30):
        got = []
        link = DealerLink(
            server.address,
            out=ASK,
            into=ANSWER,
            on_message=lambda *args, got=got: got.append(args),
            on_up=lambda: link.send(Ask(1)),  # noqa: B023  the link of this turn
        )
        opened.append(link)
        await link.connect()
        await until(lambda got=got: got)


async def test_a_full_queue_takes_messages_again_as_soon_as_the_peer_has_read(opened):
    server = await serve(opened, on_message=lambda *_: None)
    link = dial(opened, server.address, [], high_water=50)
    await link.connect()
    sent = refused = 0
    while sent < 5_000:
        try:
            link.send(Ask(sent))
            sent += 1
        except Overloaded:
            refused += 1
            await asyncio.sleep(0)
        assert refused < 100_000


async def test_two_links_get_their_own_answers(opened):
    server = await serve(opened)
    got = [[], []]
    links = [dial(opened, server.address, box) for box in got]
    for link in links:
        await link.connect()
    for n in range(50):
        links[n % 2].send(Ask(n))
    await until(lambda: sum(map(len, got)) == 50)
    assert [m.number for _, m, _ in got[0]] == list(range(0, 50, 2))


async def test_a_link_opened_before_its_server_comes_up_by_itself(opened):
    address = f"tcp://127.0.0.1:{free_port()}"  # that nobody else is given until its server is there
    events = []
    link = dial(opened, address, [], on_up=lambda: events.append("up"), on_down=lambda: events.append("down"))
    with pytest.raises(PeerTimeout):
        await link.connect(timeout_ms=150)
    with pytest.raises(PeerGone):
        link.send(Ask(1))
    late = RouterServer(address, into=ASK, out=ANSWER, on_message=lambda *_: None)
    await late.start()
    opened.append(late)
    await until(lambda: link.up)
    late.close()
    await until(lambda: not link.up)
    assert events == ["up", "down"]


async def test_malformed_messages_are_counted_and_the_server_goes_on(opened):
    refused = []
    server = await serve(opened, on_malformed=lambda identity, error: refused.append((identity, error)))
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(server.address)
    good = ASK.pack(Ask(1))
    bad = [
        [b""],
        [b"x", b"y"],
        [b"other/1", *good[1:]],
        [good[0], b"short", good[2]],
        [good[0], good[1], b"\xff\xff"],
        [good[0], good[1], ANSWER.pack(Answer(1))[2]],
        [*good, *[b""] * 9],
        [b"f"] * 2_000,
    ]
    for frames in bad:
        raw.send_multipart(frames)
    raw.send_multipart(good)
    assert await asyncio.to_thread(raw.poll, 30_000)
    assert raw.recv_multipart() == ANSWER.pack(Answer(1))
    assert server.num_malformed == len(bad) == len(refused)
    assert all(isinstance(identity, bytes) for identity, _ in refused)
    assert server.remote(refused[0][0]).startswith("127.0.0.1:")
    raw.close()
    context.term()


async def test_bytes_that_are_not_zeromq_do_not_disturb_the_server(opened):
    server = await serve(opened)
    host, port = server.address.removeprefix("tcp://").split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 64,
        os.urandom(512),
        b"\xff" + b"\x00" * 8 + b"\x7f",
    ):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.close()
    got = []
    link = dial(opened, server.address, got)
    await link.connect()
    link.send(Ask(1))
    await until(lambda: got)


async def test_a_malformed_answer_is_counted_by_the_link(opened):
    context = zmq.Context()
    raw = context.socket(zmq.ROUTER)
    raw.setsockopt(zmq.LINGER, 0)
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    got = []
    link = dial(opened, f"tcp://127.0.0.1:{port}", got)
    await link.connect()
    link.send(Ask(1))
    identity, *_ = await asyncio.to_thread(raw.recv_multipart)
    raw.send_multipart([identity, b"nonsense"])
    raw.send_multipart([identity, *ANSWER.pack(Answer(2))])
    await until(lambda: got)
    assert link.num_malformed == 1
    raw.close()
    context.term()


async def test_an_answer_to_a_peer_that_left_is_refused_not_lost_silently(opened):
    identities = []
    server = await serve(opened, on_message=lambda identity, *_: identities.append(identity))
    link = dial(opened, server.address, [])
    await link.connect()
    link.send(Ask(1))
    await until(lambda: identities)
    link.close()

    def refused():
        try:
            server.send(identities[0], Answer(1))
        except PeerGone:
            return True
        return False

    await until(refused)


async def test_a_wrong_or_taken_address_is_a_settings_error(opened):
    server = await serve(opened)
    with pytest.raises(SettingsError, match="cannot listen"):
        await RouterServer(server.address, into=ASK, out=ANSWER, on_message=lambda *_: None).start()
    with pytest.raises(SettingsError, match="cannot connect"):
        await dial(opened, "nonsense", []).connect()


async def test_closing_reports_down_once_and_may_be_repeated(opened):
    server = await serve(opened)
    downs = []
    link = dial(opened, server.address, [], on_down=lambda: downs.append(1))
    await link.connect()
    link.close()
    link.close()
    server.close()
    server.close()
    assert downs == [1]
    with pytest.raises(PeerGone):
        link.send(Ask(1))


async def test_a_callback_may_close_its_own_end(opened):
    server = await serve(opened)
    link = DealerLink(server.address, out=ASK, into=ANSWER, on_message=lambda *_: link.close())
    opened.append(link)
    await link.connect()
    for n in range(20):
        link.send(Ask(n))
    await until(lambda: not link.up)


async def test_a_handler_that_raises_leaves_no_other_message_behind(opened):
    got, told = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

    def handle(_identity, _seq, ask, _raw):
        got.append(ask.number)
        if ask.number % 10 == 0:
            raise ZeroDivisionError

    server = await serve(opened, on_message=handle)
    link = dial(opened, server.address, [])
    await link.connect()
    for n in range(100):
        link.send(Ask(n))
    await until(lambda: len(got) == 100)
    assert got == list(range(100))
    assert [type(error) for error in told] == [ZeroDivisionError] * 10


async def test_a_flood_of_messages_lets_other_callbacks_run(opened):
    got = []
    server = await serve(opened, on_message=lambda *args: got.append(args))
    link = dial(opened, server.address, [])
    await link.connect()
    for n in range(5_000):
        link.send(Ask(n))
    await until(lambda: got)
    turns = 0
    while len(got) < 5_000:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 1_000_000
    assert turns >= 5


CHILD = """
    import asyncio
    from tests.integration.test_transport_zmq import ASK, ANSWER, Answer
    from shared.transport.zmq_channel import RouterServer

    async def main():
        server = RouterServer("tcp://127.0.0.1:0", into=ASK, out=ANSWER, silent_ms=60_000,  # the test may be stopped
                              on_message=lambda i, s, ask, raw: server.send(i, Answer(ask.number)))
        await server.start()
        print(server.address, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@contextmanager
def started():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def child():
    with started() as found:
        yield found


async def test_a_killed_peer_is_noticed_within_100_ms(opened):
    async def attempt():
        with started() as (process, address):
            downs = []
            link = dial(opened, address, [], on_down=lambda: downs.append(time.monotonic()))
            await link.connect(30_000)
            begin = time.monotonic()
            process.kill()
            await until(lambda: downs)
            with pytest.raises(PeerGone):
                link.send(Ask(1))
            return downs[0] - begin

    assert await quickest_s(attempt, 0.1) < 0.1


async def test_a_frozen_peer_is_noticed_within_2_s_and_heard_again_when_it_wakes(opened, child):
    process, address = child
    downs, got = [], []
    link = dial(opened, address, got, on_down=lambda: downs.append(time.monotonic()))
    await link.connect(30_000)

    async def attempt():
        await asyncio.sleep(0.6)  # heartbeats flow
        await until(lambda: link.up)
        downs.clear()
        process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        await until(lambda: downs)
        process.send_signal(signal.SIGCONT)
        await until(lambda: link.up)
        return downs[0] - begin

    assert await quickest_s(attempt, 2.1) < 2.1

    def is_answered():
        if link.up:  # it may be down once more, where the machine stops its peer now
            link.send(Ask(7))
        return got

    await until(is_answered)
    assert got[-1][1] == Answer(7)


async def test_a_frozen_peer_is_kept_for_as_long_as_the_link_is_told_to(opened, child):
    process, address = child
    downs, got = [], []
    link = dial(opened, address, got, on_down=lambda: downs.append(1), silent_ms=60_000)
    await link.connect(30_000)
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)  # more than a link has without being told
    link.send(Ask(7))
    process.send_signal(signal.SIGCONT)
    await until(lambda: got)
    assert got == [(0, Answer(7), [])]
    assert not downs


@pytest.mark.parametrize(("silent_ms", "is_kept"), [(1_000, False), (60_000, True)])
async def test_a_server_keeps_a_silent_peer_for_as_long_as_it_is_told_to(
    opened, monkeypatch, silent_ms, is_kept
):
    lost = []
    server = await serve(opened, on_lost=lost.append, silent_ms=silent_ms)
    got = []
    link = dial(opened, server.address, got, silent_ms=60_000)
    await link.connect()
    monkeypatch.setattr(ZmtpPeer, "_send_command", lambda *_: None)  # no heartbeats, no answers to any
    if is_kept:
        await asyncio.sleep(2.5)
        link.send(Ask(1))
        await until(lambda: got)
        assert not lost
    else:
        await until(lambda: lost)


async def test_what_waits_for_a_peer_that_does_not_read_is_bounded(opened, child):
    process, address = child
    link = dial(opened, address, [], high_water=20, silent_ms=60_000)
    await link.connect(30_000)
    process.send_signal(signal.SIGSTOP)

    def flood():
        for _ in range(200):  # high water plus what the kernel's buffers take
            link.send(Ask(0), [bytes(100_000)])

    with pytest.raises(Overloaded) as refusal:
        flood()
    assert refusal.value.retry_after_ms
