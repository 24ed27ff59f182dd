"""Blocks of another host's mempool that are cut over other ranks arrive as the reader's ranks need them."""

import asyncio
import importlib.util

import numpy as np
import pytest

from shared.errors import CopyFailed, InstanceUnknown, PeerGone
from shared.free_ports import free_port
from shared.ids import HandoffId, InstanceId
from shared.kv.block_hash import chain_seed
from shared.kv.words import u32_list
from shared.mempool.api import MemPoolApi
from tests.integration.mempool_rig import MempoolProcess, PatientClient
from tests.integration.test_mempool_reslice import ABC, TOKENS, Instance, block
from tests.support.quickest import ever

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def hosts(tmp_path):
    """Mempools of two hosts: where blocks are made, and where they are read."""
    found = []
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    for name, address in zip("ab", addresses, strict=True):
        (tmp_path / name).mkdir()
        flags = {
            "peer-listen": address, "api-peers": ",".join(addresses), "api-socket": tmp_path / name / "api.sock",
            "ucx-tls": "tcp", "copy-timeout-ms": 10_000,
        }  # fmt: skip
        found.append(MempoolProcess(tmp_path / name, instance=name, **flags))
    yield found
    for process in found:
        process.stop()


def address_of(process: MempoolProcess) -> str:
    return process.status()["hosts"]["address"]


# (tensor ranks, pipeline ranks); two ranks that fill one page, one page for two, 2 <-> 4, and pipeline ranks
ENDS = [
    ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 1)), ((1, 2), (1, 1)), ((2, 1), (1, 2)),
    ((2, 1), (2, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), ENDS)
async def test_blocks_of_another_host_arrive_cut_over_the_readers_ranks(hosts, source, target):
    there, here = hosts
    prefill, decode = Instance(there.socket, "p", *source), Instance(here.socket, "d", *target)
    client = PatientClient(here.socket, InstanceId("d"))
    client.start()
    try:
        prefill.save(ABC)
        assert await client.wait_connected(30_000)
        got = None

        async def came() -> bool:
            nonlocal got
            got = await client.acquire(
                ABC, handoff_id=HandoffId("h"), wait_ms=5_000, source_mempool=address_of(there)
            )
            return got.num_blocks == 3

        assert await ever(came), here.status()
        for number, page in enumerate(u32_list(got.pages)):
            np.testing.assert_array_equal(decode.read(page), block(number))
        counters = here.status()["counters"]
        assert counters["remote_blocks"] == 3
        assert counters.get("remote_blocks_recut", 0) == (0 if source == target else 3)
        assert not there.status()["counters"].get("peer_misses_other_cut")
    finally:
        await client.close()
        prefill.close()
        decode.close()


@pytest.mark.parametrize(("source", "target"), [((2, 1), (1, 1)), ((1, 1), (2, 1))])
async def test_transfer_of_the_nine_calls_cuts_pages_anew_between_hosts(hosts, source, target, tmp_path):
    there, here = hosts
    prefill, decode = Instance(there.socket, "p", *source), Instance(here.socket, "d", *target)
    api = MemPoolApi(
        tmp_path / "a" / "api.sock", InstanceId("p"), seed=chain_seed("f", "tenant"), block_tokens=TOKENS
    )
    try:
        await api.connect()
        own = await api.alloc_mem(3)
        for number, address in enumerate(own):
            prefill.write(address.page, block(number))
        far, sent = [], []
        async with asyncio.timeout(60):
            while not sent:
                try:
                    far = far or await api.alloc_mem(3, "hbm", InstanceId("d"))
                    sent = await api.transfer(InstanceId("d"), own, far, timeout_ms=20_000)
                except (InstanceUnknown, PeerGone, CopyFailed):  # the mempools have not heard of each other
                    await asyncio.sleep(0.1)
        assert sent == far
        for number, address in enumerate(sent):
            np.testing.assert_array_equal(decode.read(address.page), block(number))
    finally:
        api.close()
        prefill.close()
        decode.close()
