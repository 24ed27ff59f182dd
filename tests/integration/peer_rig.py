"""Two mempools with an engine and a client each, on one host or on two; see test_mempool_peers.py."""

import asyncio
import time
from pathlib import Path

from shared.free_ports import free_port
from shared.ids import HandoffId, InstanceId
from shared.kv.words import u32_list, u64_list
from tests.integration.mempool_rig import EngineProcess, MempoolProcess, PatientClient, chain


class Host:
    """A mempool, an engine, and a client of the engine's instance."""

    def __init__(
        self,
        folder: Path,
        name: str,
        address: str,
        *,
        prefix: tuple[str, ...] = (),
        quota: int = 16,
        **settings: object,
    ) -> None:
        folder.mkdir()
        options = {"peer-listen": address, "ucx-tls": "tcp", "copy-timeout-ms": 3_000} | settings
        self.name, self.address = name, address
        self.mempool = MempoolProcess(folder, prefix=prefix, instance=name, **options)
        try:
            self.engine = EngineProcess(self.mempool.socket, f"engine-{name}", quota=quota)
        except BaseException as error:
            error.add_note(f"its mempool's exit status: {self.mempool.process.poll()}")
            self.mempool.stop()
            raise
        self.client: PatientClient

    async def connect(self) -> None:
        self.client = PatientClient(self.mempool.socket, InstanceId(f"engine-{self.name}"))
        self.client.start()
        assert await self.client.wait_connected(30_000)

    async def status(self):
        until_s = time.monotonic() + 30
        while (found := await self.client.status()) is None:  # a busy one answers late
            assert time.monotonic() < until_s
            await asyncio.sleep(0.1)
        assert sum(found.pages_by_state.values()) == found.num_pages
        return found

    def read(self, got, names: list[str]) -> list[bool]:
        pages = list(zip(u32_list(got.pages), u64_list(got.epochs), strict=True))
        return self.engine.do("read", pages, names)

    async def close(self) -> None:
        await self.client.close()
        self.kill()

    def kill(self) -> None:
        self.engine.kill()
        self.mempool.stop()


class Pair:
    """Source a, reader b."""

    def __init__(self, a: Host, b: Host) -> None:
        self.a, self.b = a, b
        self.num = 0

    async def pull(self, names: list[str], *, handoff: str = "", wait_ms: int = 5_000):
        self.num += 1
        return await self.b.client.acquire(
            chain(*names),
            handoff_id=HandoffId(handoff or f"h{self.num}"),
            wait_ms=wait_ms,
            source_mempool=self.a.client.peer_address,
        )

    async def pulled(self, names: list[str], *, handoff: str = "", num_blocks: int = 0):
        """pull() of all of these, or of so many; again, where the machine stopped a mempool for longer than one may be
        silent.
        """
        wanted, until_s = num_blocks or len(names), time.monotonic() + 60
        got = await self.pull(names, handoff=handoff)
        while got.num_blocks != wanted:
            assert got.num_blocks < wanted
            assert time.monotonic() < until_s, f"{got.num_blocks} of {wanted} blocks"
            if got.num_blocks:
                self.b.client.release(got.lease_id)
            await asyncio.sleep(0.2)
            got = await self.pull(names)
        return got

    def hand_off(self, names: list[str], handoff: str) -> None:
        self.a.engine.do("save", *names)
        self.a.engine.do("ready", handoff, *names)

    async def until_at_rest(self, timeout_s: float = 30.0) -> None:
        """No lease, no handoff, no page on its way or in doubt, at either end."""
        until_s = time.monotonic() + timeout_s
        while True:
            found = [await host.status() for host in (self.a, self.b)]
            moving = [f.pages_by_state["quarantined"] + f.pages_by_state["writing"] for f in found]
            if not any(moving) and not any(f.num_leases + f.num_handoffs for f in found):
                return
            assert time.monotonic() < until_s, found
            await asyncio.sleep(0.05)


async def make_pair(
    folder: Path,
    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
    prefixes: tuple[tuple[str, ...], ...] = ((), ()),
    **settings: object,
) -> Pair:
    """Both attached and connected to. `settings`: of both, and `quota` of their engines."""
    hosts: list[Host] = []
    try:
        for name, address, prefix in zip("ab", addresses, prefixes, strict=True):
            at = f"tcp://{address}:{free_port()}"
            hosts.append(Host(folder / name, name, at, prefix=prefix, **settings))
        for host in hosts:
            await host.connect()
    except BaseException:
        for host in hosts:
            host.kill()
        raise
    return Pair(*hosts)
