"""transfer() by the caller's own copies on a real mempool: the same contract whoever copies, and whoever dies."""

import asyncio
import contextlib
import os
import re
import signal
import time

import pytest

from shared.errors import CopyFailed, InvalidRequest, NotHeld, PeerTimeout, StaleEpoch
from shared.mempool import direct as direct_module
from shared.wire.mempool_api import MatchFlags, TransferFlags
from tests.integration.direct_rig import NUM, WAYS, D, P, host, kept_host, soon
from tests.integration.mempool_rig import content
from tests.support.quickest import quickest_s

__all__ = ["host", "kept_host"]  # fixtures


# -- the contract, whoever copies -------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_given_targets_hold_the_bytes_after_the_answer(host, way):
    api = await host.open(direct=way != "mediated")
    sources, targets = await host.ready(api, way)
    assert await api.transfer(D, sources[::-1], targets) == targets
    assert host.read(1, targets) == host.read(0, sources[::-1])
    if way != "mediated":
        assert api.direct.counters["direct"] == 1
        api.direct.tell()
        await soon(lambda: host.mempool.status()["api"]["counters"].get("transfers_direct") == 1, "counted")


@pytest.mark.parametrize("way", WAYS)
async def test_pages_that_a_caller_owns_and_has_not_named_are_sources_too(host, way):
    api = await host.open(direct=way != "mediated")
    _, targets = await host.ready(api, way)
    owned = await api.alloc_mem(NUM)
    for at, address in enumerate(owned):
        host.engines[0].write(address.page, content(bytes([200 + at]) * 32))
    await api.transfer(D, owned, targets)
    assert host.read(1, targets) == host.read(0, owned)
    if way != "mediated":
        assert api.direct.counters["direct"] == 1


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_not_the_callers_is_refused_and_nothing_arrives(host, way):
    api, other = await host.open(direct=way != "mediated"), await host.open()
    sources, targets = await host.ready(api, way)
    before = host.read(1, targets)
    theirs = await host.sources(other, 1)
    cases = [
        (StaleEpoch, [sources[0]._replace(epoch=sources[0].epoch + 1)], targets[:1]),
        (StaleEpoch, sources[:1], [targets[0]._replace(epoch=targets[0].epoch - 1)]),
        (NotHeld, theirs, targets[:1]),
        (NotHeld, sources[:1], await other.alloc_mem(1, "hbm", D)),
        (InvalidRequest, [sources[0], sources[0]], targets[:2]),
        (InvalidRequest, sources[:2], [targets[0], targets[0]]),
        (InvalidRequest, sources[:2], targets[:1]),
        (InvalidRequest, [], targets[:1]),
        (InvalidRequest, [targets[0]], targets[:1]),
        (InvalidRequest, sources[:1], [sources[1]]),
    ]
    for error, given, into in cases:
        with pytest.raises(error):
            await api.transfer(D, given, into)
    assert host.read(1, targets) == before


@pytest.mark.parametrize("way", WAYS)
async def test_given_back_pages_are_neither_sources_nor_targets(host, way):
    api = await host.open(direct=way != "mediated")
    sources, targets = await host.ready(api, way)
    assert await api.free_mem([targets[0], sources[1]]) == 2
    with pytest.raises(StaleEpoch):
        await api.transfer(D, sources[:1], targets[:1])
    with pytest.raises(NotHeld):
        await api.transfer(D, sources[1:2], targets[1:2])
    tokens = [7_000_000 + i for i in range(4)]
    await api.insert(tokens, targets[2:3])
    with pytest.raises(NotHeld):
        await api.transfer(D, sources[2:3], targets[2:3])
    assert len(await api.match(tokens, MatchFlags.PIN, D)) == 1
    with pytest.raises(InvalidRequest):  # pinned, and nobody writes it
        await api.transfer(D, sources[2:3], targets[2:3])


async def test_what_only_the_mempool_does_goes_by_way_of_it(host):
    """Private data, moves, the target's own pages, no targets: as ever, with the bytes in place."""
    got = []
    api, other = await host.open(), await host.open(D)
    other._on_delivered = got.append
    sources, targets = await host.ready(api)
    with pytest.raises(Exception, match="receives"):
        await api.transfer(D, sources, targets, private=b"p")
    theirs = await other.alloc_mem(NUM)
    await api.transfer(D, sources, theirs)
    assert host.read(1, theirs) == host.read(0, sources)
    mine = await api.alloc_mem(NUM)
    await api.transfer(P, sources, mine)
    assert host.read(0, mine) == host.read(0, sources)
    await api.transfer(D, mine, targets, TransferFlags.FREE_SOURCE)
    assert host.read(1, targets) == host.read(0, sources)
    with pytest.raises(StaleEpoch):
        await api.transfer(D, mine, targets)
    assert api.direct.counters["direct"] == 0
    assert api.direct.counters["mediated: own pages"] == 1


# -- beside other calls of the connection -------------------------------------------------------------------


async def test_pages_of_a_copy_under_way_are_given_back_when_it_has_ended(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    await soon(lambda: gates, "it has begun")
    freeing = [asyncio.create_task(api.free_mem([page])) for page in (targets[0], sources[0])]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in freeing)
    state = host.mempool.counts()
    gates[0].is_open.set()
    assert await copying == targets
    assert await asyncio.gather(*freeing) == [1, 1]
    assert host.mempool.counts() != state


async def test_nobody_else_of_the_connection_writes_or_names_pages_of_a_copy_under_way(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, sources[:3], targets[:3]))
    await soon(lambda: gates, "it has begun")
    for attempt in (
        lambda: api.transfer(D, sources[3:4], targets[:1]),
        lambda: api.transfer_with_insert(D, list(range(4)), sources[3:4], targets[:1]),
        lambda: api.insert(list(range(4)), targets[:1]),
    ):
        with pytest.raises(InvalidRequest):
            await attempt()
    again = asyncio.create_task(
        api.transfer(D, sources[:3], targets[3:])
    )  # pinned sources: as often as one likes
    await soon(lambda: len(gates) == 2, "it has begun too")
    for gate in gates:
        gate.is_open.set()
    await asyncio.gather(copying, again)
    assert host.read(1, targets) == host.read(0, sources[:3]) * 2


async def test_a_page_that_the_mempool_may_write_is_left_to_it_until_it_has_answered(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    os.kill(host.mempool.process.pid, signal.SIGSTOP)
    try:
        # with flags: the mempool's
        waiting = asyncio.create_task(
            api.transfer(D, sources[:1], targets[:1], TransferFlags.HBM, timeout_ms=30_000)
        )
        await asyncio.sleep(0.05)
        second = asyncio.create_task(api.transfer(D, sources[1:2], targets[:1], timeout_ms=30_000))
        await asyncio.sleep(0.05)
        assert api.direct.counters["direct"] == 0
        await api.transfer(D, sources[1:], targets[1:])
        assert api.direct.counters["direct"] == 1, "the others are copied as ever, without the mempool"
    finally:
        os.kill(host.mempool.process.pid, signal.SIGCONT)
    await waiting
    with contextlib.suppress(InvalidRequest):
        await second
    await api.transfer(D, sources[:1], targets[:1])
    assert api.direct.counters["direct"] == 2


async def test_a_caller_that_waits_no_more_leaves_the_pages_busy_until_the_copy_has_ended(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    await soon(lambda: gates, "it has begun")
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    with pytest.raises(InvalidRequest):
        await api.transfer(D, sources, targets)
    with pytest.raises(CopyFailed, match="in time"):
        await api.transfer(D, sources, await api.alloc_mem(NUM, "hbm", D), timeout_ms=30)
    for gate in gates:
        gate.is_open.set()
    assert await api.free_mem(targets) == NUM


async def test_a_transfer_that_fails_before_its_copy_leaves_no_page_busy(host, monkeypatch):
    api = await host.open()
    sources, targets = await host.ready(api, "direct")

    def broken(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(api.direct.ways, "between", broken)
        with pytest.raises(RuntimeError, match="new thread"):
            await api.transfer(D, sources, targets)
    assert not api.direct.is_busy([*sources, *targets])
    await api.transfer(D, sources, targets)
    assert host.read(1, targets) == host.read(0, sources)


async def test_giving_back_does_not_wait_for_ever(host, monkeypatch):
    api = await host.open()
    sources, targets = await host.ready(api)
    monkeypatch.setattr(direct_module, "IDLE_TIMEOUT_S", 0.1)
    host.hold_copies(api)
    with pytest.raises(CopyFailed):
        await api.transfer(D, sources, targets, timeout_ms=10)
    with pytest.raises(PeerTimeout):
        await api.free_mem(targets)


async def test_a_long_copy_leaves_the_loop_its_turns(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    await soon(lambda: gates, "it has begun")

    async def longest_turn_s() -> float:
        longest = turns = 0
        began = last = time.monotonic()
        while time.monotonic() - began < 0.3 or turns <= 100:
            await asyncio.sleep(0)
            now = time.monotonic()
            longest, last, turns = max(longest, now - last), now, turns + 1
        return longest

    assert await quickest_s(longest_turn_s, 0.1) < 0.1
    assert not copying.done()
    gates[0].is_open.set()
    await copying


# -- words that change in the meantime ----------------------------------------------------------------------


@pytest.mark.parametrize("which", ["source", "target"])
async def test_a_page_that_is_another_after_the_copy_makes_it_fail(host, which):
    api = await host.open()
    sources, targets = await host.ready(api)
    gates = host.hold_copies(api)
    way = next(iter(api.direct.ways._found.values()))
    memory = getattr(way, which)
    words = memory.words.copy()
    memory.words = words  # stands for the table
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    await soon(lambda: gates, "it has begun")
    page = (sources if which == "source" else targets)[2].page
    words[page] += 1 << 8
    gates[0].is_open.set()
    with pytest.raises(StaleEpoch):
        await copying


async def test_a_page_that_is_another_before_the_copy_is_the_mempools_matter(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    way = next(iter(api.direct.ways._found.values()))
    way.target.words = way.target.words.copy()
    way.target.words[targets[0].page] += 1 << 8
    assert await api.transfer(D, sources, targets) == targets, "which has another opinion, and is right"
    assert api.direct.counters == {"mediated: not mapped yet": 1, "mediated: words": 1}


async def test_source_pages_are_mapped_without_the_right_to_write(host):
    api = await host.open()
    await host.ready(api)
    way = next(iter(api.direct.ways._found.values()))
    with open("/proc/self/maps") as found:  # noqa: ASYNC230  memory
        maps = dict(re.findall(r"^([0-9a-f]+)-[0-9a-f]+ (\S+)", found.read(), re.M))
    assert [maps[f"{int(base):x}"] for base in way.bases] == ["r--s", "rw-s"]
