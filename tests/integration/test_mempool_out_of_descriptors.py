"""A real mempool with few descriptors, a real peer that does not read, and one that opens and closes paths."""

import asyncio
import itertools
import os
import socket
import time

import pytest

from shared.free_ports import free_port
from shared.ids import InstanceId
from shared.transport import zmtp
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from shared.wire import mempool_peer
from tests.integration.mempool_rig import DESCRIPTION, PATIENCE_MS, MempoolProcess, until
from tests.integration.peer_rig import make_pair
from tests.support.quickest import ever

MOST = 120
LIMITED = ("sh", "-c", f'ulimit -n {MOST}; exec "$@"', "sh")


def attach(link):
    message = wire.Attach(kind="engine", instance=InstanceId("e"), description=DESCRIPTION, quota_pages=4)
    reply, _, fds = link.call(message, timeout_ms=PATIENCE_MS)
    return reply, fds


def test_out_of_descriptors_an_engine_is_refused_and_attaches_when_there_are_some(tmp_path):
    pool = MempoolProcess(tmp_path, prefix=LIMITED)

    def num_used() -> int:
        return len(os.listdir(f"/proc/{pool.process.pid}/fd"))

    def link():
        made = BlockingUnixLink(
            pool.socket, out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=lambda *_: None
        )
        made.connect(PATIENCE_MS)
        return made

    try:
        before = num_used()
        for free in (0, 2, 4, 6):
            engine = link()
            until(lambda: num_used() > before, "connected")
            others: list[socket.socket] = []
            while num_used() < MOST - free - 1:
                used = num_used()
                others.append(socket.socket(socket.AF_UNIX))
                others[-1].connect(str(pool.socket))
                until(lambda used=used: num_used() > used, "another one connected")
            reply, fds = attach(engine)
            assert fds == []
            assert (type(reply), reply.code) == (wire.AttachRefused, "descriptors.exhausted")
            assert f"RLIMIT_NOFILE is {MOST}" in reply.reason
            for each in (engine, *others):
                each.close()
            until(lambda: num_used() <= before, "all of them gone")
        engine = link()
        reply, fds = attach(engine)
        assert isinstance(reply, wire.Attached)
        assert len(fds) == 2
        close_fds(fds)
        engine.close()
        assert pool.process.poll() is None
    finally:
        pool.stop()


def peer_of(address: str) -> socket.socket:
    """A connection to a mempool that will speak as a peer's."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect((host, int(port)))
    sock.sendall(zmtp.GREETING)
    got = b""
    while len(got) < zmtp.GREETING_BYTES:
        got += sock.recv(zmtp.GREETING_BYTES - len(got))
    sock.sendall(zmtp.ready(b"DEALER"))
    return sock


def packed(message) -> bytes:
    return b"".join(zmtp.encode(mempool_peer.TO_SOURCE.pack(message)))


def test_a_peer_of_another_version_that_reads_nothing_does_not_end_the_mempool(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    pool = MempoolProcess(tmp_path, **{"peer-listen": address, "ucx-tls": "tcp"})
    try:
        sock = peer_of(address)
        hello = packed(mempool_peer.PeerHello(instance="x", boot_generation=1, version=2))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            sock.sendall(200_000 * hello)
        sock.close()
        again = peer_of(address)
        again.sendall(packed(mempool_peer.PeerHello(instance="y", boot_generation=1)))
        got = b""
        while b"peer_welcome" not in got:
            got += again.recv(4096)
        again.close()
        assert pool.process.poll() is None
    finally:
        pool.stop()


async def test_a_peer_that_opens_and_closes_paths_does_not_keep_others_from_theirs(tmp_path):
    pair = await make_pair(tmp_path)
    sock = peer_of(pair.a.address)
    try:
        sock.sendall(packed(mempool_peer.PeerHello(instance="bad", boot_generation=1)))
        for number in range(400):
            opens = mempool_peer.OpenPath(
                path_id=number, content_key=DESCRIPTION.content_key, description=b""
            )
            sock.sendall(packed(opens) + packed(mempool_peer.ClosePath(path_id=number)))
        await asyncio.sleep(0.5)
        numbers = itertools.count()

        async def is_pulled() -> bool:
            number = next(numbers)
            names = [f"x{number}", f"y{number}"]
            pair.hand_off(names, f"h{number}")
            begun_s = time.monotonic()
            got = await pair.pull(names, handoff=f"h{number}", wait_ms=8_000)
            return got.num_blocks == 2 and time.monotonic() - begun_s < 8

        assert await ever(is_pulled)
    finally:
        sock.close()
        await pair.a.close()
        await pair.b.close()
