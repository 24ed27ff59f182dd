"""A caller that copies by itself, on a real mempool: its pages, and copies that run until a test lets them go."""

import asyncio
import threading
from dataclasses import replace

import pytest

from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi
from shared.mempool.flights import wait_quiet
from shared.wire.mempool_api import InsertFlags, PageAddress
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import MempoolProcess, content
from tests.integration.pages_rig import PagesEngine

P, D = InstanceId("prefill-0"), InstanceId("decode-0")
SEED = chain_seed("f", "tenant")
LENGTH = 6000
WAYS = ["mediated", "direct", "parts"]  # parts: as direct, a page first and then the others, as between GPUs
NUM = 6


class Gate:
    """A copy that runs until it is let go; then its bytes are there."""

    def __init__(self, copy) -> None:
        self._copy = copy
        self.is_open = threading.Event()
        self._once = (
            threading.Lock()
        )  # who waits and who is about to unmap both ask: one copies, before either goes on

    def done(self) -> bool:
        if not self.is_open.is_set():
            return False
        with self._once:
            if self._copy is not None:
                self._copy()
                self._copy = None
        return True


class Host:
    """A mempool, prefill's and decode's pages, and a caller of prefill's with pinned sources and targets at decode."""

    # A mapping that its test closed too early waits for its mempool as long as the folder is there.
    _old_threads: frozenset[threading.Thread] = frozenset()

    def __init__(self, folder, **settings) -> None:
        self.mempool = MempoolProcess(
            folder, **{"api-socket": folder / "api.sock", "idle-punch-ms": 0, "copy-timeout-ms": 60_000}, **settings
        )  # fmt: skip
        self.engines = [
            PagesEngine(self.mempool.socket, P, "cpu:0", quota=8),
            PagesEngine(self.mempool.socket, D, "cpu:1", quota=8),
        ]
        self.apis: list[MemPoolApi] = []
        self.gates: list[Gate] = []
        self.salt = 0
        self._old_threads = frozenset(threading.enumerate())

    async def open(self, instance=P, *, direct=True) -> MemPoolApi:
        pool_socket = self.mempool.socket if direct else ""
        folder = self.mempool.socket.parent
        api = MemPoolApi(folder / "api.sock", instance, seed=SEED, block_tokens=4, pool_socket=pool_socket)
        await api.connect()
        self.apis.append(api)
        return api

    async def sources(self, api, num=NUM) -> list[PageAddress]:
        pages = await api.alloc_mem(num)
        self.salt += num
        for at, address in enumerate(pages):
            self.engines[0].write(address.page, content(bytes([(self.salt + at) % 256]) * 32))
        tokens = [self.salt * 1000 + i for i in range(4 * num)]
        return await api.insert(tokens, pages, InsertFlags.PIN)

    def read(self, which: int, pages) -> list[bytes]:
        return [self.engines[which].read(address.page, LENGTH) for address in pages]

    async def ready(self, api, way="direct", num=NUM):
        """Sources and targets, and the way mapped."""
        sources, targets = await self.sources(api, num), await api.alloc_mem(num, "hbm", D)
        await api.transfer(D, sources, targets)
        if way != "mediated":
            await self.mapped(api, sources, targets)
        if way == "parts":
            self.in_parts(api)
            sources, targets = list(sources), list(targets)  # whose columns are not known
        for address in targets:
            self.engines[1].write(address.page, bytes(LENGTH))
        return sources, targets

    async def mapped(self, api, sources, targets) -> None:
        for _ in range(6000):
            threads = set(threading.enumerate()) - self._old_threads
            mapping = any(thread.name == "quire-caller-map" for thread in threads)
            if api.direct.ways.has(sources, targets) and not mapping:  # nor compiling any more
                return
            await asyncio.sleep(0.01)
        raise AssertionError(api.direct.ways._found)

    def in_parts(self, api) -> None:
        """From now on this caller copies a page of a list first, and then the others."""
        found = api.direct.ways._found
        for key, way in found.items():
            found[key] = replace(way, first_pages=1)

    def hold_copies(self, api) -> list[Gate]:
        """From now on this caller's copies run until they are let go."""

        def gated(way):
            def submit(sources, targets, size):
                self.gates.append(Gate(lambda: way.submit(sources, targets, size)))
                return self.gates[-1]

            return submit

        api.direct.ways.copy_by(gated)
        return self.gates

    def close(self) -> None:
        for gate in self.gates:
            gate.is_open.set()
        for api in self.apis:
            api.close()
        for engine in self.engines:
            engine.close()
        self.mempool.stop()
        wait_quiet()


@pytest.fixture
async def host(tmp_path):
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def kept_host(tmp_path):
    """Its pages outlive the mempool."""
    keeper = KeeperProcess(tmp_path)
    made = Host(tmp_path, **{"keeper-socket": keeper.socket})
    yield made
    made.close()
    keeper.stop()


async def soon(holds, what: str) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)
