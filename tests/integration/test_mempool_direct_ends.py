"""Own copies of callers when a connection, the caller or the mempool ends in their middle."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from shared.errors import PeerGone
from tests.integration.direct_rig import LENGTH, NUM, D, P, host, kept_host, soon
from tests.integration.mempool_rig import ROOT
from tests.integration.pages_rig import PagesEngine

__all__ = ["host", "kept_host"]  # fixtures


# -- ends: of the connection, the caller, the mempool -----------------------------------------------------------

CALLER = """
import asyncio, json, sys
from pathlib import Path
from tests.integration.direct_rig import D, NUM, Host, InsertFlags, MemPoolApi, P, SEED

async def main():
    folder = Path(sys.argv[1])
    host = Host.__new__(Host)
    host.gates = []
    api = MemPoolApi(folder / "api.sock", P, seed=SEED, block_tokens=4, pool_socket=folder / "mempool.sock")
    await api.connect()
    sources = await api.insert(list(range(4 * NUM)), await api.alloc_mem(NUM), InsertFlags.PIN)
    targets = await api.alloc_mem(NUM, "hbm", D)
    await api.transfer(D, sources, targets)
    await host.mapped(api, sources, targets)
    gates = host.hold_copies(api)
    copying = asyncio.create_task(api.transfer(D, sources, targets))
    while not gates:
        await asyncio.sleep(0.01)
    print(json.dumps([a.page for a in targets]), flush=True)
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        said = "ok"
        if word == "close":
            api.close()
        elif word == "let go":
            gates[0].is_open.set()
        else:
            said = type((await asyncio.gather(copying, return_exceptions=True))[0]).__name__
        print(said, flush=True)

asyncio.run(main())
"""


class Guest:
    """Another process, with a copy under way that ends when it is told."""

    def __init__(self, folder) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALLER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT,
        )  # fmt: skip
        self.targets = json.loads(self.process.stdout.readline())

    def tell(self, word: str) -> str:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def guest(host):
    made = Guest(host.mempool.socket.parent)
    yield made
    made.kill()


async def test_a_caller_that_leaves_in_the_middle_of_a_copy_keeps_its_pages_until_it_has_ended(host, guest):
    assert guest.tell("close") == "ok"
    await soon(lambda: host.mempool.counts().get("quarantined") == NUM, "its targets are nobody's")
    await asyncio.sleep(0.3)
    assert host.mempool.counts().get("quarantined") == NUM
    assert guest.tell("let go") == "ok"
    await soon(lambda: "quarantined" not in host.mempool.counts(), "they are free: it said so, and lives")
    assert guest.process.poll() is None


async def test_a_caller_that_is_killed_in_the_middle_of_a_copy_gives_its_pages_back_by_its_death(host, guest):
    os.kill(guest.process.pid, signal.SIGSTOP)
    await asyncio.sleep(0.2)
    assert "quarantined" not in host.mempool.counts(), "it stands still, and holds what it holds"
    granted = host.mempool.counts()["granted"]
    guest.process.kill()
    await soon(
        lambda: host.mempool.counts()["granted"] + host.mempool.counts().get("writing", 0) < granted + NUM, ""
    )
    await soon(lambda: "quarantined" not in host.mempool.counts(), "its pages are free")


async def test_a_mempool_that_dies_during_a_copy_makes_it_fail_and_its_successor_waits_for_the_copy(
    kept_host,
):
    host = kept_host
    guest = Guest(host.mempool.socket.parent)
    try:
        host.mempool.kill()
        for engine in host.engines:
            engine.close()
        host.mempool.start()
        # ranks and engines have reported
        host.engines = [PagesEngine(host.mempool.socket, *which) for which in ((P, "cpu:0"), (D, "cpu:1"))]
        await asyncio.sleep(0.5)
        table = host.mempool.counts()
        assert table.get("quarantined", 0) >= NUM, table
        assert guest.tell("let go") == "ok"
        assert guest.tell("result") == "PeerGone"
        await soon(
            lambda: "quarantined" not in host.mempool.counts(), "the guest has said that nothing of it runs"
        )
        assert guest.process.poll() is None, "and nobody killed it"
    finally:
        guest.kill()


async def test_a_caller_that_had_left_is_not_waited_for_by_a_successor(kept_host):
    host = kept_host
    guest = Guest(host.mempool.socket.parent)
    try:
        guest.tell("let go")
        guest.tell("close")
        await soon(lambda: "quarantined" not in host.mempool.counts(), "it has left")
        host.mempool.kill()
        for engine in host.engines:
            engine.close()
        host.mempool.start()
        host.engines = [PagesEngine(host.mempool.socket, *which) for which in ((P, "cpu:0"), (D, "cpu:1"))]
        lines = [line for line in host.mempool.log_lines() if line["event"] == "memory_adopted"]
        assert len(lines) == 2
        assert [line["num_awaited"] for line in lines] == [1, 1], "this process, with its engines"
    finally:
        guest.kill()


async def test_after_the_loss_of_the_mempool_nothing_is_copied(host):
    api = await host.open()
    sources, targets = await host.ready(api)
    host.mempool.kill()
    with pytest.raises(PeerGone):
        await api.transfer(D, sources, targets)
    assert api.direct.counters["direct"] == 0
    assert host.read(1, targets) == [bytes(LENGTH)] * NUM
