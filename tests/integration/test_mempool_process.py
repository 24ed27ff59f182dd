"""A real mempool process, real engine and client processes, real deaths."""

import asyncio
import fcntl
import mmap
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress

import msgspec
import pytest

from shared.ids import InstanceId
from shared.kv.page import PageState, unpack_word
from shared.kv.words import u32_list, u64_list
from shared.mempool.engine_attachment import EngineAttachment, SealEntry
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_framing import pack_message
from shared.wire import mempool as wire
from tests.integration.gateway_rig import until as until_async
from tests.integration.mempool_rig import (
    BLOCK_BYTES,
    DESCRIPTION,
    ROOT,
    SEED,
    EngineProcess,
    MempoolProcess,
    PatientClient,
    chain,
    content,
    until,
)


@pytest.fixture
def mempool(tmp_path):
    process = MempoolProcess(tmp_path)
    yield process
    process.stop()


@pytest.fixture
def engine(mempool):
    process = EngineProcess(mempool.socket, "prefill-0")
    yield process
    process.kill()


@pytest.fixture
async def client(mempool):
    client = PatientClient(mempool.socket, InstanceId("decode-0"))
    client.start()
    assert await client.wait_connected(30_000)
    yield client
    await client.close()


@pytest.fixture
def attachment(mempool):
    with closing(EngineAttachment(mempool.socket, InstanceId("decode-0"), DESCRIPTION, 4)) as attachment:
        assert attachment.wait_connected(30)
        yield attachment


def raw_attach(path, **fields):
    """(Attached or refusal, fds, link) of a hand-made engine."""
    link = BlockingUnixLink(path, out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=lambda *_: None)
    link.connect()
    options = {"instance": "raw", "description": DESCRIPTION, "quota_pages": 1} | fields
    reply, _, fds = link.call(wire.Attach(kind="engine", **options))
    return reply, fds, link


def page_pairs(acquired):
    return list(zip(u32_list(acquired.pages), u64_list(acquired.epochs), strict=True))


async def test_bytes_that_one_process_sealed_are_read_by_another_by_hash(engine, client, attachment):
    names = ["a", "b", "c"]
    waiting = asyncio.create_task(client.acquire(chain(*names), handoff_id="h", wait_ms=30_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    engine.do("save", *names)
    engine.do("ready", "h", *names)
    got = await waiting
    assert got.num_blocks == 3
    for (page, epoch), block_hash in zip(page_pairs(got), chain(*names), strict=True):
        assert attachment.is_sealed(page, epoch)
        assert bytes(attachment.page_view(page)) == content(block_hash)
        assert attachment.is_sealed(page, epoch)
        assert unpack_word(attachment.word(page)) == (epoch, PageState.SEALED)
    assert (await client.status()).num_pinned == 3
    client.release(got.lease_id)
    assert (await client.status()).num_pinned == 0
    assert await client.match(chain("a", "b", "x")) == 2
    assert await client.delete(chain(*names)[2:]) == 1
    assert await client.match(chain(*names)) == 2


async def test_pages_of_a_killed_engine_return_and_sealed_ones_stay(mempool, engine, client):
    engine.do("save", "a", "b")
    engine.do("hold", 3, 2)
    until(lambda: mempool.counts().get("writing") == 2, "two pages are written")
    engine.kill()
    took_s = until(lambda: mempool.counts() == {"sealed": 2, "free": 62}, "pages return")
    print(f"granted and written pages of a killed engine returned after {took_s * 1e3:.0f} ms")
    assert (await client.acquire(chain("a", "b"))).num_blocks == 2


def test_pages_of_a_lost_connection_wait_until_their_process_is_dead(mempool, engine):
    engine.do("attach_and_leave", 5)
    until(lambda: mempool.counts().get("quarantined") == 5, "pages are quarantined")
    time.sleep(0.3)
    assert mempool.counts()["quarantined"] == 5
    engine.kill()
    until(lambda: mempool.counts() == {"free": 64}, "pages return")


async def test_engine_and_client_find_the_next_mempool_and_old_pages_are_misses(mempool, engine, client):
    names = ["a", "b"]
    pages = engine.do("save", *names)
    until(lambda: mempool.counts().get("sealed") == 2, "blocks are sealed")
    assert engine.do("read", pages, names) == [True, True]
    first_boot = engine.do("boot")
    mempool.kill()
    assert (await client.acquire(chain(*names))).num_blocks == 0
    # until it has seen the end of its connection the bytes are there, and nobody could change them
    until(lambda: engine.do("read", pages, names) == [False, False], "the engine has seen that it is gone")
    mempool.start()
    until(lambda: engine.do("boot") > first_boot, "the engine attaches again")
    assert await client.wait_connected(30_000)
    assert engine.do("read", pages, names) == [False, False]
    assert (await client.acquire(chain(*names))).num_blocks == 0
    again = engine.do("save", *names)
    until(lambda: engine.do("read", again, names) == [True, True], "blocks are sealed again")
    got = await client.acquire(chain(*names))
    assert [list(pair) for pair in page_pairs(got)] == again
    assert client.counters["losses"] == 1
    assert engine.do("counters")["losses"] == 1


async def test_a_view_of_the_old_memory_delays_the_new_attachment_and_never_reads_as_valid(
    mempool, engine, client, attachment
):
    engine.do("save", "old")
    first_boot = engine.do("boot")
    got = await client.acquire(chain("old"))
    ((page, _),) = page_pairs(got)
    view = attachment.page_view(page)
    mempool.kill()
    mempool.start()
    assert await client.wait_connected(30_000)
    until(lambda: engine.do("boot") > first_boot, "the other engine attaches")
    (new,) = engine.do("save", "new")
    assert new[0] == page, "the same number, another page"
    await asyncio.sleep(0.2)
    assert not attachment.connected
    assert not attachment.is_sealed(*new)
    assert bytes(view) == content(chain("old")[0]), "the old memory is still there"
    del view
    assert attachment.wait_connected(30)
    until(lambda: attachment.is_sealed(*new), "the new page reads as sealed")
    assert bytes(attachment.page_view(page)) == content(chain("new")[0])


async def test_pages_taken_before_a_loss_cannot_touch_the_next_pool(mempool, client, attachment):
    taken: list = []
    until(lambda: taken.extend(attachment.take_pages(4 - len(taken))) or len(taken) == 4, "quota")
    mempool.kill()
    until(lambda: attachment.counters.get("losses"), "the loss is noticed")
    mempool.start()
    assert attachment.wait_connected(30)
    attachment.writing(taken)
    for page, _ in taken:
        attachment.page_view(page)[:] = b"!" * BLOCK_BYTES
    hashes = chain("w", "x", "y", "z")
    entries = [SealEntry(p, e, h, SEED, 4) for (p, e), h in zip(taken, hashes, strict=True)]
    attachment.seal(entries)
    assert await client.wait_connected(30_000)
    assert await client.match(hashes[:1]) == 0
    assert mempool.status()["resident_bytes"] == 0, "nothing was written into the new pages"
    assert attachment.counters["pages_lost"] == 4
    until(lambda: len(attachment.take_pages(4)) == 4, "new pages are granted")


def test_table_is_read_only_and_memory_has_a_fixed_size_for_workers(mempool):
    reply, (page_fd, table_fd), link = raw_attach(mempool.socket)
    assert isinstance(reply, wire.Attached)
    length = os.fstat(table_fd).st_size
    mmap.mmap(table_fd, length, prot=mmap.PROT_READ).close()
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(table_fd, length)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(table_fd, b"x", 0)
    reopened = -1
    with suppress(PermissionError):  # only root gets so far
        reopened = os.open(f"/proc/self/fd/{table_fd}", os.O_RDWR)
    if reopened >= 0:
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, length)
        with pytest.raises(PermissionError):
            os.pwrite(reopened, b"x", 0)
        os.close(reopened)
    for size in (0, os.fstat(page_fd).st_size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(page_fd, size)
    assert fcntl.fcntl(page_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    os.close(page_fd)
    os.close(table_fd)
    link.close()


def test_another_layout_has_a_space_of_its_own(mempool, engine):
    other = msgspec.structs.replace(DESCRIPTION, dtype="bfloat16")
    with closing(EngineAttachment(mempool.socket, InstanceId("odd"), other, 4)) as odd:
        assert odd.wait_connected(30)
        until(lambda: mempool.counts().get("granted") == 12, "both have pages")
        assert [space["num_pages"] for space in mempool.status()["spaces"]] == [64, 64]
        first, second = mempool.status()["spaces"]
        assert first["content_key"] != second["content_key"]


def test_a_layout_too_many_is_refused_and_the_engine_goes_on_without_pages(tmp_path):
    mempool = MempoolProcess(tmp_path, **{"max-spaces": 1})
    try:
        engine = EngineProcess(mempool.socket, "prefill-0")
        try:
            _refused_for_want_of_a_space(mempool)
        finally:
            engine.kill()
    finally:
        mempool.stop()


def _refused_for_want_of_a_space(mempool):
    other = msgspec.structs.replace(DESCRIPTION, dtype="bfloat16")
    reply, fds, link = raw_attach(mempool.socket, description=other)
    link.close()
    assert (reply.code, fds) == ("spaces.full", [])
    with closing(EngineAttachment(mempool.socket, InstanceId("odd"), other, 4)) as odd:
        until(lambda: odd.counters.get("attaches_refused"), "the refusal arrives")
        assert not odd.connected
        assert odd.take_pages(1) == []
        assert not odd.is_sealed(0, 1)
        odd.page_view(0)[:] = b"?" * BLOCK_BYTES
    assert mempool.counts()["granted"] == 8


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_even_if_the_socket_lets_it_in(mempool):
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(30)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: print('no entry'); sys.exit()\n"
        "print('ended' if s.recv(1) == b'' else 'served')"
    )

    def attempt():
        command = [sys.executable, "-c", code, "mempool.sock"]
        done = subprocess.run(command, cwd=mempool.socket.parent, capture_output=True, text=True)
        return done.stdout.strip()

    assert mempool.socket.stat().st_mode & 0o777 == 0o600
    for folder in (mempool.socket.parent, *mempool.socket.parent.parents[:3]):
        folder.chmod(0o755)
    assert attempt() == "no entry"
    mempool.socket.chmod(0o666)
    assert attempt() == "ended"
    assert mempool.status()["peers_refused"] == 1


def test_malformed_bytes_end_their_connection_and_nothing_else(mempool, engine):
    engine.do("save", "a")
    rng = random.Random(7)
    attach = wire.TO_MEMPOOL.pack(wire.Attach(kind="client", instance="x"))
    good = pack_message(attach)
    bad_calls = [
        wire.Acquire(call_id=1, hashes=b"odd"),
        wire.Sealed(pages=b"", epochs=b"", hashes=b"", parents=b"", valid_tokens=b""),
        wire.Attach(kind="client", instance="x"),
    ]
    samples = [
        *(rng.randbytes(rng.randrange(1, 400)) for _ in range(60)),
        *(
            good[:i] + bytes([good[i] ^ (1 << rng.randrange(8))]) + good[i + 1 :]
            for i in range(0, len(good), 3)
        ),
        b"\xff" * 64,
        pack_message([b"quire.mempool/1", b"\0" * 8, b"\xc1"]),
        pack_message([b"quire.mempool/1", b"\0" * 8, msgspec.msgpack.encode({"type": "no such"})]),
        *(good + pack_message(wire.TO_MEMPOOL.pack(call)) for call in bad_calls),
    ]
    for sample in samples:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(30)
            peer.connect(os.fspath(mempool.socket))
            peer.sendall(sample)
            peer.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while peer.recv(4096):
                    continue
    assert mempool.process.poll() is None
    until(lambda: mempool.status()["attachments"] == ["engine prefill-0: 7 of 8 pages"], "all left")
    assert mempool.status()["peers_malformed"] > 20


async def test_quiet_pool_gives_memory_back(tmp_path):
    mempool = MempoolProcess(tmp_path, **{"idle-punch-ms": 200})
    engine = EngineProcess(mempool.socket, "prefill-0")
    try:
        engine.do("save", "a", "b", "c")
        until(lambda: mempool.counts().get("sealed") == 3, "blocks are sealed")
        resident = mempool.status()["resident_bytes"]
        assert resident >= 3 * BLOCK_BYTES
        client = PatientClient(mempool.socket, InstanceId("tool"))
        client.start()
        await client.wait_connected(30_000)
        assert await client.delete() == 3
        until(lambda: mempool.status()["resident_bytes"] == 0, "memory goes back")
        pages = engine.do("save", "d")
        until(lambda: engine.do("read", pages, ["d"]) == [True], "punched pages work")
        await client.close()
    finally:
        engine.kill()
        mempool.stop()


async def test_sigterm_ends_it_at_once_and_peers_live_on(mempool, engine, client):
    started = time.monotonic()
    assert mempool.terminate() == 0
    assert time.monotonic() - started < 5.0
    until(lambda: engine.do("boot") == 0, "the engine knows")
    # nothing of this ran since: the call itself finds that the mempool is gone, and does not wait for its answer
    assert (await client.acquire(chain("a"))).num_blocks == 0
    assert await client.status() is None
    assert not client.counters["calls_timed_out"]
    assert not mempool.socket.exists()


async def test_lease_of_a_caller_that_gave_up_is_released(mempool, engine, client):
    engine.do("save", "a")
    until(lambda: mempool.counts().get("sealed") == 1, "the block is sealed")
    mempool.process.send_signal(signal.SIGSTOP)  # so that it answers after both have given up
    try:
        task = asyncio.create_task(client.acquire(chain("a", "b"), handoff_id="h", wait_ms=200))
        await until_async(lambda: client.counters["calls"] == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        got = await client.acquire(chain("a", "b"), handoff_id="h2", wait_ms=300, timeout_ms=1)
        assert got.num_blocks == 0
        assert client.counters["calls_timed_out"] == 1
    finally:
        mempool.process.send_signal(signal.SIGCONT)
    # the client hears of both on this loop
    await until_async(lambda: mempool.status()["counters"].get("waits_expired") == 2)
    await until_async(lambda: mempool.status()["num_leases"] == 0)


def test_closing_an_attachment_returns_its_pages_while_the_process_lives(mempool):
    attachment = EngineAttachment(mempool.socket, InstanceId("short"), DESCRIPTION, 4)
    assert attachment.wait_connected(30)
    until(lambda: len(attachment.take_pages(2)) == 2, "pages are granted")
    attachment.close()
    until(lambda: mempool.counts() == {"free": 64}, "pages return")
    assert attachment.take_pages(1) == []
    attachment.page_view(0)[:1] = b"x"
    attachment.close()


def test_metrics_show_pages_by_state_and_settings_are_checked(mempool, engine):
    until(lambda: "quire_mempool_pages_granted_total 8.0" in mempool.get("/metrics"), "its quota is granted")
    text = mempool.get("/metrics")
    pages = re.findall(r'^quire_mempool_pages\{state="(\w+)"\} ([\d.]+)$', text, re.MULTILINE)
    assert sum(float(count) for _, count in pages) == 64
    for flags, word in (
        (["--capacity-byte", "1"], "capacity-bytes"),
        (["--granted-share", "2"], "granted_share"),
        (["--socket", str(mempool.socket), "--admin-listen", "127.0.0.1:0"], "another process serves"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "services.mempool", *flags], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert word in done.stderr
