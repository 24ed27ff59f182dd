"""The nine calls on a real mempool process; every byte that moved is read through a client that maps the pages."""

import asyncio
import subprocess
import sys

import pytest

from shared.errors import InstanceUnknown, NotHeld, OutOfPages, PeerGone, StaleEpoch
from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import InsertFlags, MatchFlags, Medium, TransferFlags
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import ROOT, MempoolProcess, chain, content, until
from tests.integration.pages_rig import PagesEngine

P, D = InstanceId("prefill-0"), InstanceId("decode-0")
SEED = chain_seed("f", "tenant")
TOKENS = list(range(100, 118))  # four full blocks of 4, and a tail of two
LENGTH = 6000
# with a machine that may stop the mempool, or an engine
PATIENCE = dict.fromkeys(("copy-timeout-ms", "out-timeout-ms", "pull-patience-ms"), 60_000)


@pytest.fixture
def mempool(tmp_path):
    settings = {
        "api-socket": tmp_path / "api.sock", "dram-bytes": 128 * 8192, "dram-for-host": "true",
        "idle-punch-ms": 0, **PATIENCE,
    }  # fmt: skip
    process = MempoolProcess(tmp_path, **settings)
    yield process
    process.stop()


@pytest.fixture
def engines(mempool):
    """Prefill and decode, each with a space of 64 pages."""
    made = [
        PagesEngine(mempool.socket, P, "cpu:0", quota=40),
        PagesEngine(mempool.socket, D, "cpu:1", quota=8),
    ]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(params=["", "own copies"])
def own(request, mempool):
    """Options of a caller that leaves every transfer to the mempool, and of one that copies by itself what it can."""
    return {"pool_socket": mempool.socket} if request.param else {}


async def open_api(mempool, instance=P, **options) -> MemPoolApi:
    api = MemPoolApi(mempool.socket.parent / "api.sock", instance, seed=SEED, block_tokens=4, **options)
    await api.connect()
    return api


def blocks(count: int, salt: int = 0) -> list[bytes]:
    return [content(bytes([salt + i]) * 32) for i in range(count)]


async def test_all_nine_calls_move_the_bytes_that_they_say(mempool, engines, own):
    prefill, decode = engines
    got: list[wire.Delivered] = []
    api, other = await open_api(mempool, **own), await open_api(mempool, D, on_delivered=got.append, **own)

    pages = await api.alloc_mem(5)
    for address, data in zip(pages, blocks(5), strict=True):
        prefill.write(address.page, data)
    placed = await api.insert(TOKENS, pages, InsertFlags.PIN)
    assert placed == pages
    assert await api.match(TOKENS) == placed

    sent = await api.transfer(D, placed, flags=TransferFlags.HBM, private=b"request 7")
    assert [decode.read(a.page, LENGTH) for a in sent] == blocks(5)
    assert [d.private for d in got] == [b"request 7"]
    assert await other.free_mem(sent) == 5

    named = await api.transfer_with_insert(D, TOKENS, placed)
    assert [decode.read(a.page, LENGTH) for a in named] == blocks(5)
    assert await other.match(TOKENS) == named

    assert await api.free_mem(placed) == 5  # its pins
    gone = await api.swap_out(2)
    assert {a.medium for a in gone} == {Medium.DRAM}
    held = await api.match(TOKENS, MatchFlags.PIN)
    cold = [a for a in held if a.medium == Medium.DRAM]
    assert len(cold) == 2
    warm = await api.swap_in(cold)
    assert {a.medium for a in warm} == {Medium.HBM}
    now = held[:3] + warm
    assert [prefill.read(a.page, LENGTH) for a in now] == blocks(5)
    assert await api.free_mem(now) == 5
    assert await api.delete(TOKENS) == 5 + 2, "five pages in HBM, two copies in DRAM"
    assert await other.delete(TOKENS) == 5
    assert mempool.status()["num_indexed"] == 0
    api.close()
    other.close()


async def test_pages_go_through_host_memory_and_back_to_a_given_list(mempool, engines, own):
    prefill, _ = engines
    api = await open_api(mempool, **own)
    mine = await api.alloc_mem(3)
    for address, data in zip(mine, blocks(3, 50), strict=True):
        prefill.write(address.page, data)
    dram = await api.transfer(P, mine, await api.alloc_mem(3, "dram"), TransferFlags.FREE_SOURCE)
    back = await api.transfer(P, dram, await api.alloc_mem(3))
    assert {a.medium for a in dram} == {Medium.DRAM}
    assert [prefill.read(a.page, LENGTH) for a in back] == blocks(3, 50)
    with pytest.raises(StaleEpoch):
        await api.transfer(P, mine)
    other = await open_api(mempool, **own)
    with pytest.raises(NotHeld):
        await other.transfer(P, back)
    other.close()
    api.close()


async def test_an_engine_that_has_nearly_all_pages_is_asked_for_what_a_call_needs(mempool):
    engine = PagesEngine(mempool.socket, P, "cpu:0", quota=64)
    until(lambda: len(engine.granted) == 63, "it has nearly all of its space")
    api = await open_api(mempool)
    assert len(await api.alloc_mem(9)) == 9
    until(lambda: len(engine.granted) == 55, "it gave eight back")
    await api.free_mem(await api.alloc_mem(6))
    until(lambda: len(engine.granted) == 55, "it gets back what is not used")
    api.close()
    engine.close()


async def test_failures_are_typed_errors_and_change_nothing(mempool, engines, own):
    api = await open_api(mempool, **own)
    with pytest.raises(OutOfPages):
        await api.alloc_mem(63)
    with pytest.raises(InstanceUnknown):
        await api.alloc_mem(1, "hbm", InstanceId("elsewhere"))
    with pytest.raises(InstanceUnknown):
        await api.transfer(InstanceId("elsewhere"), await api.alloc_mem(1, "dram"))
    api.close()


async def test_what_a_caller_that_leaves_held_is_free_when_nobody_can_write_it(mempool, engines):
    code = (
        "import asyncio, sys; from shared.mempool.api import MemPoolApi\n"
        "async def main():\n"
        f"    api = MemPoolApi(sys.argv[1], 'prefill-0', seed={SEED!r}, block_tokens=4)\n"
        "    await api.connect(); await api.alloc_mem(4); print('ok', flush=True); api.close()\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    path = mempool.socket.parent / "api.sock"
    command = [sys.executable, "-c", code, str(path)]
    child = subprocess.Popen(  # noqa: ASYNC220  it never maps a page
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert child.stdout.readline() == "ok\n"
        until(lambda: mempool.counts().get("granted", 0) <= 63 + 8, "its pages are free")
        assert "quarantined" not in mempool.counts()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    api = await open_api(mempool)  # of this process, which has mapped the pages
    await api.alloc_mem(4)
    api.close()
    until(lambda: mempool.counts().get("quarantined") == 4, "nobody gets them while this process lives")


async def test_a_killed_mempool_ends_calls_and_its_successor_serves_them(mempool, engines):
    api = await open_api(mempool)
    await api.alloc_mem(2, "dram")
    mempool.kill()
    for _ in range(3_000):
        await asyncio.sleep(0.01)
        try:
            await api.match(TOKENS)
        except PeerGone:
            break
    else:
        raise AssertionError("the loss was not noticed")
    api.close()
    mempool.start()
    again = await open_api(mempool)
    with pytest.raises(InstanceUnknown):
        await again.match(TOKENS)
    again.close()


def test_blocks_leave_for_host_memory_and_come_back_byte_for_byte(mempool):
    engine = PagesEngine(mempool.socket, P, "cpu:0", quota=64)
    names = [chain(*[f"{prompt}.{i}" for i in range(9)]) for prompt in range(10)]
    for hashes in names:
        engine.unpin(engine.save(hashes, [content(h) for h in hashes])[::-1])
    until(lambda: mempool.status()["counters"].get("dram_blocks_out", 0) > 20, "blocks have gone out")
    counters = mempool.status()["counters"]
    assert not counters.get("dram_copies_failed")
    for hashes in names[:3]:
        pages = engine.acquire(hashes)
        assert len(pages) == len(hashes)
        assert [engine.read(page, LENGTH) for page in pages] == [content(h) for h in hashes]
    assert mempool.status()["counters"]["blocks_pulled_from_dram"] >= 18
    engine.close()


def test_host_memory_outlives_a_killed_mempool_byte_for_byte(tmp_path):
    keeper = KeeperProcess(tmp_path)
    settings = {"dram-bytes": 128 * 8192, "dram-for-host": "true", "keeper-socket": keeper.socket, **PATIENCE}
    mempool = MempoolProcess(tmp_path, **settings)
    engine = PagesEngine(mempool.socket, P, "cpu:0", quota=64)
    try:
        names = [chain(*[f"{prompt}.{i}" for i in range(9)]) for prompt in range(10)]
        for hashes in names:
            engine.unpin(engine.save(hashes, [content(h) for h in hashes])[::-1])
        engine.acquire(names[-1])  # what was said before it has been heard
        until(lambda: "writing" not in mempool.counts(), "copies have ended")
        before = {s["devices"][0]: s["num_indexed"] for s in mempool.status()["spaces"]}
        assert before["cpu:dram"] > 20
        mempool.kill()
        engine.close()
        mempool.start()
        engine = PagesEngine(mempool.socket, P, "cpu:0", quota=32)  # it reports: nothing is held
        after = {s["devices"][0]: s["num_indexed"] for s in mempool.status()["spaces"]}
        assert after == before
        for hashes in names[:3]:
            pages = engine.acquire(hashes)
            assert [engine.read(page, LENGTH) for page in pages] == [content(h) for h in hashes]
        assert mempool.status()["counters"]["blocks_pulled_from_dram"] >= 18
    finally:
        engine.close()
        mempool.stop()
        keeper.stop()
