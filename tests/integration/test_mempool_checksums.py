"""A byte of a sealed page changes that must not: no reader gets the block, by a lease, a copy or another host.

A real mempool that looks at every page (`checksum_rate` 1), real engines that write where they must not.
"""

import asyncio
import importlib.util
import os
import random
from contextlib import closing

import pytest

from shared.ids import InstanceId
from shared.kv.words import u32_list, u64_list
from tests.integration.mempool_rig import (
    BLOCK_BYTES,
    EngineProcess,
    MempoolProcess,
    PatientClient,
    chain,
    content,
    until,
)
from tests.integration.pages_rig import PagesEngine
from tests.integration.peer_rig import make_pair
from tests.support.control_plane import until_async

pytestmark = [pytest.mark.timeout(180)]
NAMES = [f"n{i}" for i in range(6)]


def counter(mempool: MempoolProcess, name: str) -> int:
    return mempool.status()["counters"].get(name, 0)


def summed(mempool: MempoolProcess, count: int) -> None:
    """Wait until so many pages have sums: what changes earlier is not noticed."""
    until(lambda: counter(mempool, "checks_pages_summed") >= count, f"{count} sums")


async def none_pinned(client: PatientClient) -> None:
    """Pages that are looked at stay pinned until it is done, which is behind the answer or the leases' end."""

    async def is_so() -> bool:
        return (await client.status()).num_pinned == 0

    await until_async(is_so)


def owned(got) -> list[tuple[int, int]]:
    return list(zip(u32_list(got.pages), u64_list(got.epochs), strict=True))


@pytest.fixture
def mempool(tmp_path):
    process = MempoolProcess(tmp_path, checksum_rate=1)
    yield process
    process.stop()


@pytest.fixture
def engine(mempool):
    process = EngineProcess(mempool.socket, "prefill-0", quota=16)
    yield process
    process.kill()


@pytest.fixture
async def client(mempool):
    client = PatientClient(mempool.socket, InstanceId("decode-0"))
    client.start()
    assert await client.wait_connected(30_000)
    yield client
    await client.close()


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
@pytest.mark.parametrize("wrong", [0, 3, 5])
async def test_a_reader_gets_what_is_before_the_page_that_changed_and_the_rest_is_computed_again(
    mempool, engine, client, wrong, at
):
    pages = engine.do("save", *NAMES)
    summed(mempool, len(NAMES))
    got = await client.acquire(chain(*NAMES))
    assert got.num_blocks == len(NAMES)
    engine.do("scribble", pages[wrong], at)
    client.release(got.lease_id)
    got = await client.acquire(chain(*NAMES))
    assert got.num_blocks == wrong
    assert engine.do("read", owned(got), NAMES[:wrong]) == [True] * wrong
    assert bool(got.lease_id) == bool(wrong)  # of nothing there is no lease
    if wrong:
        client.release(got.lease_id)
    assert (await client.status()).num_leases == 0
    assert counter(mempool, "checks_pages_corrupt") == 1
    assert counter(mempool, "blocks_condemned") == len(NAMES) - wrong
    engine.do("save", *NAMES)  # computed again
    got = await client.acquire(chain(*NAMES))
    assert engine.do("read", owned(got), NAMES) == [True] * len(NAMES)
    client.release(got.lease_id)


async def test_pages_that_others_read_meanwhile_stay_theirs_and_are_free_when_they_end(
    mempool, engine, client
):
    pages = engine.do("save", *NAMES)
    summed(mempool, len(NAMES))
    held = await client.acquire(chain(*NAMES))
    engine.do("scribble", pages[2], 7)
    got = await client.acquire(chain(*NAMES))
    assert got.num_blocks == 2
    status = await client.status()
    assert status.num_pinned == len(NAMES)  # by who was first, and by what this lease was about to get
    client.release(got.lease_id)
    client.release(held.lease_id)
    await none_pinned(client)
    assert await client.delete(chain(*NAMES)) == 2  # the others cannot be asked for
    fresh = [f"f{i}" for i in range(64)]  # as many as there are pages: those of condemned blocks too
    for first in range(0, 64, 8):
        engine.do("save", *fresh[first : first + 8])
    got = await client.acquire(chain(*fresh[:8]))
    assert engine.do("read", owned(got), fresh[: got.num_blocks]) == [True] * got.num_blocks


async def test_many_leases_at_once_with_a_change_at_any_moment_never_give_a_wrong_block(
    mempool, engine, client
):
    """Whoever gets a block gets bytes that were right when it was looked at: the change is made before anybody asks."""
    chance = random.Random(os.environ.get("SEED", "1"))
    for turn in range(20):
        names = [f"{turn}-{i}" for i in range(6)]
        before = counter(mempool, "checks_pages_summed")
        pages = engine.do("save", *names)
        summed(mempool, before + len(names))
        wrong = chance.randrange(6)
        engine.do("scribble", pages[wrong], chance.randrange(BLOCK_BYTES))
        leases = await asyncio.gather(*(client.acquire(chain(*names)) for _ in range(8)))
        assert [lease.num_blocks for lease in leases] == [wrong] * 8
        for lease in leases:
            if lease.lease_id:
                client.release(lease.lease_id)
    await none_pinned(client)


def two_spaces(mempool: MempoolProcess):
    return (
        closing(PagesEngine(mempool.socket, "prefill-0", "cpu:a", quota=16)),
        closing(PagesEngine(mempool.socket, "decode-0", "cpu:b", quota=16)),
    )


def test_a_copy_of_a_page_that_changed_fails_and_later_ones_find_nothing(mempool):
    hashes = chain(*NAMES)
    source_of, target_of = two_spaces(mempool)
    with source_of as source, target_of as target:
        pages = source.save(hashes, [content(h) for h in hashes])
        summed(mempool, len(NAMES))
        page = pages[4][0]
        source.write(page, b"\xff" + source.read(page, BLOCK_BYTES)[1:])
        assert target.acquire(hashes) == []  # one copy for all of them
        assert counter(mempool, "checks_copies_wrong") == 1
        assert counter(mempool, "checks_pages_corrupt") == 1
        got = target.acquire(hashes)
        assert [target.read(page, BLOCK_BYTES) for page in got] == [content(h) for h in hashes[:4]]
        source.unpin(pages)
        again = source.save(hashes, [content(h) for h in hashes])
        got = target.acquire(hashes)
        assert [target.read(page, BLOCK_BYTES) for page in got] == [content(h) for h in hashes]
        source.unpin(again)
    until(lambda: mempool.status()["num_pinned"] == 0, "all pins end")


def test_a_right_copy_is_looked_at_and_taken(mempool):
    hashes = chain(*NAMES)
    source_of, target_of = two_spaces(mempool)
    with source_of as source, target_of as target:
        source.save(hashes, [content(h) for h in hashes])
        got = target.acquire(hashes)
        assert [target.read(page, BLOCK_BYTES) for page in got] == [content(h) for h in hashes]
        assert counter(mempool, "checks_pages_checked") == len(NAMES)
        assert counter(mempool, "checks_copies_wrong") == 0


def test_without_a_rate_nothing_is_looked_at(tmp_path):
    mempool = MempoolProcess(tmp_path, checksum_rate=0)
    try:
        with closing(PagesEngine(mempool.socket, "prefill-0", "cpu:a", quota=16)) as engine:
            engine.save(chain("a"), [content(chain("a")[0])])
            assert engine.acquire(chain("a"))
        assert counter(mempool, "checks_pages_summed") == 0
    finally:
        mempool.stop()


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
async def test_another_host_gets_what_is_before_the_page_that_changed(tmp_path):
    pair = await make_pair(tmp_path, checksum_rate=1)
    try:
        pages = pair.a.engine.do("save", *NAMES)
        summed(pair.a.mempool, len(NAMES))
        pair.a.engine.do("scribble", pages[3], 100)
        pair.a.engine.do("ready", "h1", *NAMES)
        got = await pair.pulled(NAMES, handoff="h1", num_blocks=3)
        assert pair.b.read(got, NAMES[:3]) == [True] * 3
        assert counter(pair.a.mempool, "checks_pages_corrupt") == 1
        assert counter(pair.b.mempool, "checks_pages_checked") >= 3
        pair.b.client.release(got.lease_id)
        pair.a.engine.do("save", *NAMES)
        got = await pair.pulled(NAMES)
        assert pair.b.read(got, NAMES) == [True] * len(NAMES)
        pair.b.client.release(got.lease_id)
        await pair.until_at_rest()
    finally:
        await pair.a.close()
        await pair.b.close()
