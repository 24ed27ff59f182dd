"""The keeper as a process: what it holds outlives its creators, and nothing that a peer does harms it."""

import asyncio
import contextlib
import os
import random
import resource
import select
import signal
import struct
import subprocess
import sys

import pytest

from deploy.local.probes import probe_keeper
from deploy.local.supervision import Health
from shared.errors import PeerGone, ResourceError
from shared.ids import Epoch
from shared.mempool.keeper_client import KeeperClient, KeeperFull, KeeperStale
from shared.transport.unix_framing import pack_message
from shared.transport.unix_socket import close_fds
from shared.wire import keeper as wire
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import ROOT, until

MAX_PSS_BYTES = 25 << 20


@pytest.fixture
def keeper(tmp_path):
    process = KeeperProcess(tmp_path)
    yield process
    process.stop()


def memfd(content: bytes) -> int:
    fd = os.memfd_create("kept")
    os.pwrite(fd, content, 0)
    return fd


def fetched(client: KeeperClient, space: str, kind: wire.Kind) -> list[bytes]:
    out = []
    for run in client.fetch_space(space, kind):
        out += [os.pread(fd, 64, 0) for fd in run.fds]
        close_fds(run.fds)
    return out


@pytest.mark.slow
def test_five_thousand_pages_come_back_in_order_and_the_process_stays_small(keeper):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        old = keeper.client(5)
        small_bytes = keeper.pss_bytes("Pss_Anon")
        for first in range(0, 5000, 1000):
            fds = [memfd(struct.pack("<Q", first + i)) for i in range(1000)]
            old.keep("s@cuda:0", "cuda-page", first, fds, meta=b"meta")
            close_fds(fds)
        old.close()
        new = keeper.client(6)
        assert new.welcome.num_fds == 5000
        assert [struct.unpack("<Q", b)[0] for b in fetched(new, "s@cuda:0", "cuda-page")] == list(range(5000))
        assert keeper.pss_bytes() < MAX_PSS_BYTES
        assert keeper.pss_bytes("Pss_Anon") - small_bytes < 2 << 20
        assert new.forget("s@cuda:0", "cuda-page", 0, 5000) == 5000
        until(lambda: keeper.num_open() < 32, "descriptors are closed")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_kept_outlives_connections_and_keeps_its_meta(keeper):
    client = keeper.client(5)
    fd = memfd(b"bytes")
    client.keep("s", "pages", 0, [fd], count=77, meta=b"what it is")
    os.close(fd)
    client.close()
    after = keeper.client(6)
    (run,) = after.fetch_space("s", "pages")
    assert (run.first_page, run.num_pages, run.meta) == (0, 77, b"what it is")
    assert os.pread(run.fds[0], 5, 0) == b"bytes"
    close_fds(run.fds)
    assert after.fetch_space("s", "table") == []
    assert [(s.space, s.num_fds) for s in after.list_spaces()] == [("s", {"pages": 1})]
    after.forget_space("s")
    assert after.list_spaces() == []


def test_an_old_generation_is_refused_and_changes_nothing(keeper):
    old, fd = keeper.client(5), memfd(b"old")
    old.keep("s", "pages", 0, [fd], count=1)
    new = keeper.client(6)
    assert new.welcome.previous_generation == 5
    for attempt in (
        lambda: old.keep("s", "pages", 0, [fd], count=1),
        lambda: old.forget("s", "pages", 0, 1),
        lambda: old.fetch_space("s", "pages"),
        lambda: old.connect(),
    ):
        with pytest.raises(KeeperStale) as refused:
            attempt()
        assert refused.value.highest_generation == 6
    assert fetched(new, "s", "pages")[0][:3] == b"old"
    assert old.connected
    os.close(fd)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        b"\x00" * 64,
        struct.pack("<IHH", 1 << 31, 3, 0),
        struct.pack("<IHH", 100, 3, 254),
        struct.pack("<IHHI", 8, 1, 0, 4) + b"spam",
    ],
)
def test_a_malformed_frame_costs_the_sender_its_connection_and_nobody_else(keeper, data):
    client, fd = keeper.client(5), memfd(b"kept")
    client.keep("s", "pages", 0, [fd], count=1)
    before = keeper.num_open()
    peer = keeper.peer()
    peer.send(data, (fd, fd, fd))
    assert peer.ended()
    until(lambda: keeper.num_open() == before, "descriptors of the malformed frame are closed")
    assert fetched(client, "s", "pages")[0][:4] == b"kept"
    os.close(fd)


def test_random_bytes_and_descriptors_never_harm_it(keeper):
    """Right frames around random bodies, and cut or flipped ones; 300 peers."""
    source = random.Random(7)
    client, fd = keeper.client(5), memfd(b"kept")
    client.keep("s", "pages", 0, [fd], count=1)
    bodies = [
        b"",
        *(wire.TO_KEEPER.pack(m)[2] for m in (wire.ListSpaces(), wire.Fetch(space="s", kind="pages"))),
    ]
    for _ in range(300):
        body = bytearray(source.choice(bodies) + source.randbytes(source.randrange(40)))
        if body:
            body[source.randrange(len(body))] ^= 1 << source.randrange(8)
        frames = [wire.TO_KEEPER.schema, bytes(8), bytes(body)]
        data = pack_message(frames, num_fds=source.choice([0, 0, 1, 2]))
        with contextlib.suppress(OSError):
            peer = keeper.peer()
            peer.send(data[: source.randrange(1, len(data) + 1)], (fd,) * source.randrange(3))
    assert fetched(client, "s", "pages")[0][:4] == b"kept"
    until(lambda: keeper.num_open() < 32, "descriptors are closed")
    assert "keeper_bug" not in keeper.log.read_text()
    os.close(fd)


def test_descriptors_that_belong_to_no_request_are_closed(keeper):
    client, fd = keeper.client(5), memfd(b"x")
    before = keeper.num_open()
    with pytest.raises(ResourceError):  # two descriptors for one page
        client._call(wire.Keep(space="s", kind="cuda-page", first_page=0, count=1), wire.Done, (fd, fd))
    client._call(wire.ListSpaces(), wire.Spaces, (fd, fd, fd))
    assert client.connected
    until(lambda: keeper.num_open() == before, "descriptors are closed")
    os.close(fd)


def test_a_message_that_announces_more_than_came_ends_its_connection(keeper):
    peer, fd = keeper.peer(), memfd(b"x")
    peer.say(wire.KeeperHello(boot_generation=Epoch(5)))
    peer.say(wire.Keep(space="s", kind="cuda-page", first_page=0, count=3), (fd,), announced=3)
    assert peer.ended()
    assert keeper.client(6).list_spaces() == []
    os.close(fd)


def test_a_peer_that_never_reads_its_answers_stalls_nobody(keeper):
    peer = keeper.peer()
    peer.sock.settimeout(0.2)
    message = wire.ListSpaces()

    def talk() -> None:
        for _ in range(100_000):
            peer.say(message)

    with pytest.raises((BrokenPipeError, ConnectionResetError, TimeoutError)):
        talk()
    client = keeper.client(5)
    assert client.list_spaces() == []


def test_silent_peers_do_not_keep_a_new_mempool_out(keeper):
    holder = keeper.client(5)
    for _ in range(100):
        keeper.peer()
    assert holder.list_spaces() == []
    assert keeper.client(6).list_spaces() == []
    until(lambda: keeper.num_open() < 32, "connections are closed")


def test_a_full_keeper_says_so_and_goes_on(tmp_path):
    process = KeeperProcess(tmp_path, "--max-fds", "10")
    try:
        client, fd = process.client(5), memfd(b"x")
        client.keep("s", "cuda-page", 0, [fd] * 10)
        with pytest.raises(KeeperFull):
            client.keep("s", "cuda-page", 10, [fd])
        assert client.keep("s", "cuda-page", 0, [fd] * 10) == 10
        os.close(fd)
    finally:
        process.stop()


def test_a_limit_that_is_too_low_is_said_with_what_to_set(tmp_path):
    process = KeeperProcess(tmp_path, "--expected-fds", "100000000")
    try:
        text = process.log.read_text()
        assert "open_files_limit_too_low" in text
        assert "LimitNOFILE" in text
    finally:
        process.stop()


def test_a_restarted_keeper_gets_everything_again(keeper):
    fds = [memfd(bytes([n])) for n in range(3)]
    handed: list[int] = []

    def hand_over_all(client: KeeperClient) -> None:
        handed.append(1)
        client.keep("s", "cuda-page", 0, fds[:2])

    client = keeper.client(5, hand_over_all=hand_over_all)
    hand_over_all(client)
    keeper.process.kill()
    keeper.process.wait()
    with pytest.raises(PeerGone):
        client.keep("s", "cuda-page", 2, fds[2:])
    assert not client.restore()
    keeper.start()
    client.keep("s", "cuda-page", 2, fds[2:])
    assert (len(handed), client.num_reconnects) == (2, 1)
    assert [b[0] for b in fetched(client, "s", "cuda-page")] == [0, 1, 2]
    close_fds(fds)


def test_a_loop_sees_a_dead_keeper_at_the_descriptor_and_restores(keeper):
    client = keeper.client(5, hand_over_all=lambda _: None)
    poll = select.poll()
    poll.register(client.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    keeper.process.kill()
    keeper.process.wait()
    assert poll.poll(30_000)
    keeper.start()
    assert client.restore()
    assert client.list_spaces() == []


def test_without_a_keeper_every_call_succeeds_and_keeps_nothing():
    client = KeeperClient("", Epoch(5))
    assert client.connect() is False
    assert client.keep("s", "pages", 0, [0], count=3) == 0
    assert client.forget("s", "pages", 0, 3) == 0
    assert (client.fetch_space("s", "pages"), client.list_spaces(), client.restore()) == ([], [], True)
    with pytest.raises(PeerGone):
        KeeperClient("/nonexistent/keeper.sock", Epoch(5)).connect()


def test_sigterm_ends_it_and_removes_its_socket(keeper):
    keeper.client(5)
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.process.wait(30) == 0
    assert not keeper.socket.exists()


def test_two_keepers_never_share_a_socket(keeper):
    command = [sys.executable, "-m", "services.mempool.keeper", "--socket", str(keeper.socket)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert "another process serves" in second.stderr
    assert keeper.client(5).list_spaces() == []


def test_a_probe_wants_an_answer_and_leaves_nothing_behind(keeper):
    with contextlib.closing(keeper.client(1)) as mempool:
        before, log = keeper.num_open(), keeper.log.read_text()
        for _ in range(20):
            assert asyncio.run(probe_keeper(str(keeper.socket), timeout_s=30)) is Health.OK
        until(lambda: keeper.num_open() == before, "every connection of a probe has ended", 30)
        assert keeper.log.read_text() == log
        keeper.process.send_signal(signal.SIGSTOP)
        assert asyncio.run(probe_keeper(str(keeper.socket), timeout_s=0.5)) is Health.SILENT
        keeper.process.send_signal(signal.SIGCONT)
        assert mempool.list_spaces() == []
