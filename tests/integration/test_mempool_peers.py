"""Two real mempools that reach each other over the network, with engines and clients: blocks come, bytes are right."""

import asyncio
import importlib.util
import json
import os
import signal
import time
from functools import partial
from itertools import count

import msgspec
import pytest

from shared.free_ports import free_port
from shared.ids import HandoffId, InstanceId
from shared.mempool.engine_attachment import EngineAttachment
from tests.integration.mempool_rig import DESCRIPTION, EngineProcess, PatientClient, chain, until
from tests.integration.peer_rig import make_pair
from tests.support.quickest import ever

NAMES = [f"n{i}" for i in range(12)]
TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"
DETECTED_S = 2.0  # on a quiet machine
LATE_S = 4 * DETECTED_S  # far from the time that a reader would wait

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def pair(tmp_path):
    found = await make_pair(tmp_path, **{"trace-dir": tmp_path / "spans"})
    yield found
    await found.a.close()
    await found.b.close()


async def test_a_handoff_of_another_host_arrives_byte_by_byte_its_answer_comes_back_and_all_pins_end(
    pair, tmp_path
):
    assert pair.a.client.peer_address == pair.a.address
    pair.hand_off(NAMES, "h1")
    got = await pair.pulled(NAMES, handoff="h1")
    assert got.num_blocks == len(NAMES)
    assert pair.b.read(got, NAMES) == [True] * len(NAMES)
    pair.b.client.release(got.lease_id)
    await pair.until_at_rest()
    assert (await pair.b.status()).counters["remote_blocks"] == len(NAMES)
    assert await ever(partial(comes_back, pair, count()))
    await asyncio.to_thread(until, lambda: returned(tmp_path / "spans"), "a span kv.return", 60)
    assert returned(tmp_path / "spans")[-1] == {"blocks": 2, "path": "remote", "copy_bytes": 2 * 8192}
    await pair.until_at_rest()


def returned(folder):
    """What spans kv.return of the trace say."""
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    spans = [json.loads(line) for line in lines if line.endswith("\n")]
    return [s["attributes"] for s in spans if s.get("name") == "kv.return" and s["trace_id"] in TRACE]


async def comes_back(pair, numbers):
    """PD-Caching-3: what decode completes behind a hand-off is found where its prompt was computed."""
    number = next(numbers)
    prompt = [f"p{number}"]
    answer = [*prompt, f"q{number}", f"r{number}"]
    pair.hand_off(prompt, f"back{number}")
    got = await pair.b.client.acquire(
        chain(*prompt), handoff_id=HandoffId(f"back{number}"), wait_ms=5_000,
        source_mempool=pair.a.client.peer_address, traceparent=TRACE,
    )  # fmt: skip
    pair.b.client.release(got.lease_id)
    pair.b.engine.do("save_behind", 1, *answer)
    until_s = time.monotonic() + 10
    while await pair.a.client.match(chain(*answer)) < len(answer):
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(0.05)
    found = await pair.a.client.acquire(chain(*answer))
    assert pair.a.read(found, answer) == [True] * len(answer)
    pair.a.client.release(found.lease_id)
    assert (await pair.a.status()).counters["blocks_pushed_back"] >= 2
    return True


async def test_a_reader_that_is_first_waits_and_later_ones_find_the_path_open(pair):
    numbers = count()

    async def is_served_though_first():
        number = next(numbers)
        names = [f"{number}-{i}" for i in range(4)]
        waiting = asyncio.create_task(pair.pull(names, handoff=f"first{number}", wait_ms=20_000))
        await asyncio.sleep(0.3)
        pair.hand_off(names, f"first{number}")
        got = await waiting
        pair.b.client.release(got.lease_id)
        return pair.b.read(got, names[: got.num_blocks]) == [True] * 4

    assert await ever(is_served_though_first)
    times = []
    for i in range(8):
        names = [f"x{i}", f"y{i}"]
        pair.hand_off(names, f"later{i}")
        begun_s = time.monotonic()
        got = await pair.pulled(names, handoff=f"later{i}")
        times.append(time.monotonic() - begun_s)
        assert pair.b.read(got, names) == [True, True]
        pair.b.client.release(got.lease_id)
    assert min(times) < 0.2, times
    await pair.until_at_rest()


async def test_a_source_that_is_killed_is_a_miss_within_2_s_and_its_successor_serves(pair):
    pair.hand_off(NAMES, "h1")
    assert (await pair.pulled(NAMES[:1], handoff="h1")).num_blocks == 1
    waiting = asyncio.create_task(pair.pull(["other"], wait_ms=20_000))
    await asyncio.sleep(0.2)
    pair.a.mempool.kill()
    begun_s = time.monotonic()
    assert (await waiting).num_blocks == 0
    assert time.monotonic() - begun_s < LATE_S
    pair.a.mempool.start()
    assert await pair.a.client.wait_connected(30_000)
    pair.a.engine.kill()
    pair.a.engine = EngineProcess(pair.a.mempool.socket, "engine-a2", quota=16)
    pair.hand_off(["z1", "z2"], "h2")
    got = await pair.pulled(["z1", "z2"], handoff="h2")
    assert pair.b.read(got, ["z1", "z2"]) == [True, True]


async def test_a_source_that_stands_still_is_a_miss_within_2_s(pair):
    pair.hand_off(NAMES, "h1")
    assert (await pair.pulled(NAMES[:2], handoff="h1")).num_blocks == 2
    os.kill(pair.a.mempool.process.pid, signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        assert (await pair.pull(NAMES, wait_ms=20_000)).num_blocks == 2
        assert time.monotonic() - begun_s < LATE_S
    finally:
        os.kill(pair.a.mempool.process.pid, signal.SIGCONT)


async def test_an_address_that_nobody_has_is_a_miss_in_time(pair):
    begun_s = time.monotonic()
    got = await pair.b.client.acquire(
        chain("x"), handoff_id=HandoffId("h"), wait_ms=30_000, source_mempool=f"tcp://127.0.0.1:{free_port()}"
    )
    assert got.num_blocks == 0
    assert time.monotonic() - begun_s < LATE_S
    got = await pair.b.client.acquire(
        chain("x"), handoff_id=HandoffId("h"), wait_ms=30_000, source_mempool="nowhere"
    )
    assert got.num_blocks == 0


async def test_a_reader_that_is_killed_leaves_no_pins(pair):
    pair.hand_off(NAMES, "h1")
    assert (await pair.pulled(NAMES[:1], handoff="h1")).num_blocks == 1
    waiting = asyncio.create_task(pair.pull(["never"], wait_ms=20_000))
    await asyncio.sleep(0.2)
    pair.b.mempool.kill()
    assert (await waiting).num_blocks == 0
    until_s = time.monotonic() + 30
    while (await pair.a.status()).num_leases:
        assert time.monotonic() < until_s
        await asyncio.sleep(0.05)


async def test_blocks_that_are_there_in_another_cut_are_a_miss_and_the_source_says_so_once(pair):
    other = msgspec.structs.replace(DESCRIPTION, tp_rank=1)
    attachment = await asyncio.to_thread(
        EngineAttachment, pair.b.mempool.socket, InstanceId("other"), other, 4
    )
    client = PatientClient(pair.b.mempool.socket, InstanceId("other"))
    client.start()
    try:
        assert await client.wait_connected(30_000)
        pair.hand_off(NAMES, "h1")
        until_s, numbers = time.monotonic() + 60, count()
        while (await pair.a.status()).counters.get("peer_misses_other_cut", 0) < 2:
            assert time.monotonic() < until_s  # the reader may have given one up before the source read it
            got = await client.acquire(
                chain(*NAMES),
                handoff_id=HandoffId(f"x{next(numbers)}"),
                wait_ms=500,
                source_mempool=pair.a.address,
            )
            assert got.num_blocks == 0
        said = [line for line in pair.a.mempool.log_lines() if line["event"] == "blocks_in_another_cut"]
        assert [line["peer"] for line in said] == ["b"]
    finally:
        await client.close()
        attachment.close()
