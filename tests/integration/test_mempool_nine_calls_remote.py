"""The nine calls about instances of another mempool: two processes that reach each other, every byte read back."""

import asyncio
import importlib.util
import signal

import pytest

from shared.errors import ClusterError, CopyFailed, InstanceUnknown, OutOfPages, PeerGone, StaleEpoch
from shared.free_ports import free_port
from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import InsertFlags, Medium, TransferFlags
from tests.integration.mempool_rig import MempoolProcess, content, until
from tests.integration.pages_rig import PagesEngine

P, D = InstanceId("prefill-0"), InstanceId("decode-0")
SEED = chain_seed("f", "tenant")
TOKENS = list(range(100, 118))  # four full blocks of 4, and a tail of two
LENGTH = 6000
PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed"),
    pytest.mark.timeout(300),
]


class Host:
    """A mempool, and an engine with a space of its own and host memory behind it."""

    def __init__(self, folder, name: str, addresses: list[str], mine: int, instance: InstanceId) -> None:
        folder.mkdir()
        self.api_socket = folder / "api.sock"
        settings = {
            "instance": name, "peer-listen": addresses[mine], "api-peers": ",".join(addresses),
            "api-socket": self.api_socket, "dram-bytes": 64 * 8192, "dram-for-host": "true", "ucx-tls": "tcp",
            "copy-timeout-ms": 10_000, "peer-silent-ms": 60_000,  # the machine may stop either of them
        }  # fmt: skip
        self.mempool = MempoolProcess(folder, **settings)
        self.engine = PagesEngine(self.mempool.socket, instance, "cpu:0", quota=20)
        self.instance = instance

    async def api(self, **options) -> MemPoolApi:
        api = MemPoolApi(self.api_socket, self.instance, seed=SEED, block_tokens=4, **options)
        await api.connect()
        return api

    def close(self) -> None:
        self.engine.close()
        self.mempool.stop()


@pytest.fixture
def hosts(tmp_path):
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    made = [Host(tmp_path / "a", "a", addresses, 0, P), Host(tmp_path / "b", "b", addresses, 1, D)]
    yield made
    for host in made:
        host.close()


def blocks(count: int, salt: int = 0) -> list[bytes]:
    return [content(bytes([salt + i]) * 32) for i in range(count)]


async def known(api: MemPoolApi, instance: InstanceId) -> None:
    """Until the caller's mempool has heard of the other one's instance, and the other of this one's."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await api.free_mem(await api.alloc_mem(1, "dram", instance))
                return
            except (InstanceUnknown, PeerGone):
                await asyncio.sleep(0.1)


async def moved(api: MemPoolApi, pages, **more):
    """transfer(), which fails until the target's mempool knows who the source is."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await api.transfer(D, pages, timeout_ms=50_000, **more)
            except CopyFailed:
                await asyncio.sleep(0.1)


def write(engine: PagesEngine, pages, data: list[bytes]) -> None:
    for address, each in zip(pages, data, strict=True):
        engine.write(address.page, each)


async def test_memory_of_another_host_is_allocated_written_named_and_freed(hosts):
    a, b = hosts
    got: list[wire.Delivered] = []
    api, other = await a.api(), await b.api(on_delivered=got.append)
    await known(api, D)
    own = await api.alloc_mem(5)
    write(a.engine, own, blocks(5))

    far = await api.alloc_mem(5, "hbm", D)  # a list of targets
    sent = await moved(api, own, targets=far)
    assert sent == far
    assert [b.engine.read(address.page, LENGTH) for address in far] == blocks(5)
    assert await api.free_mem(far) == 5

    sent = await api.transfer(D, own, flags=TransferFlags.HBM, private=b"request 7")  # none
    assert [b.engine.read(address.page, LENGTH) for address in sent] == blocks(5)
    assert [each.private for each in got] == [b"request 7"]
    assert await other.free_mem(sent) == 5

    placed = await api.insert(TOKENS, own, InsertFlags.PIN)
    named = await api.transfer_with_insert(D, TOKENS, placed)
    assert [b.engine.read(address.page, LENGTH) for address in named] == blocks(5)
    assert await other.match(TOKENS) == named
    again = await api.transfer_with_insert(D, TOKENS, placed)
    assert again == named, "what is there does not move again"

    media = await api.alloc_mem(2, "dram", D) + await api.alloc_mem(2, "mixed", D)
    assert [address.medium for address in media] == [Medium.DRAM] * 2 + [Medium.HBM] * 2
    cold = await api.transfer(D, placed[:2], media[:2])
    warm = await other.match(TOKENS)
    assert {address.medium for address in cold} == {Medium.DRAM}
    assert [b.engine.read(address.page, LENGTH) for address in warm] == blocks(5)
    assert await api.free_mem(media) == 4
    with pytest.raises(OutOfPages):
        await api.alloc_mem(1_000, "dram", D)
    api.close()
    other.close()
    for host in hosts:
        until(lambda host=host: not at_work(host), "no page is on its way, held or in doubt")


def at_work(host: Host) -> int:
    counts = host.mempool.counts()
    return counts.get("writing", 0) + counts.get("quarantined", 0) + counts.get("leased", 0)


async def test_pages_that_were_given_up_and_reused_are_an_error_and_never_other_bytes(hosts):
    a, b = hosts
    api = await a.api()
    await known(api, D)
    own = await api.alloc_mem(2)
    write(a.engine, own, blocks(2, 9))
    far = await api.alloc_mem(2, "hbm", D)
    assert await moved(api, own, targets=far) == far
    assert await api.free_mem(own) == 2
    with pytest.raises(StaleEpoch):
        await api.transfer(D, own, far)
    assert [b.engine.read(address.page, LENGTH) for address in far] == blocks(2, 9)
    api.close()


async def test_a_killed_peer_ends_calls_about_its_instances_and_its_successor_is_found(hosts):
    a, b = hosts
    api = await a.api()
    await known(api, D)
    assert len(await api.alloc_mem(3, "hbm", D)) == 3
    b.mempool.kill()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await api.alloc_mem(1, "hbm", D)
            except InstanceUnknown:
                break
            except ClusterError:
                await asyncio.sleep(0.1)
    own = await api.alloc_mem(1)
    with pytest.raises(InstanceUnknown):
        await api.transfer(D, own)
    assert await api.free_mem(own) == 1, "nothing holds the page any more"
    b.mempool.start()
    b.engine.close()
    b.engine = PagesEngine(b.mempool.socket, D, "cpu:0", quota=8)
    await known(api, D)
    api.close()


async def test_a_peer_that_stands_still_is_kept_for_as_long_as_the_setting_says(hosts):
    a, b = hosts
    api = await a.api()
    await known(api, D)
    own, far = await api.alloc_mem(2), await api.alloc_mem(2, "hbm", D)
    write(a.engine, own, blocks(2, 5))
    b.mempool.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)  # more than a peer has without being told
    b.mempool.process.send_signal(signal.SIGCONT)
    assert await moved(api, own, targets=far) == far, "it still holds them"
    assert [b.engine.read(address.page, LENGTH) for address in far] == blocks(2, 5)
    api.close()


async def test_what_a_caller_that_leaves_had_elsewhere_is_free_there(hosts):
    a, b = hosts
    api = await a.api()
    await known(api, D)
    await api.alloc_mem(4, "dram", D)
    until(lambda: held_in_dram(b) == 4, "it holds them")
    api.close()
    until(lambda: held_in_dram(b) == 0, "they are free")


def held_in_dram(host: Host) -> int:
    spaces = host.mempool.status()["spaces"]
    return next(each for each in spaces if each["devices"] == ["cpu:dram"])["pages_by_state"]["granted"]
