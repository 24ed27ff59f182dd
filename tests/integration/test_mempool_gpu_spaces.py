"""A mempool that owns pages on two GPUs, as processes, over a libcuda without hardware: attach, copy, takeover."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_pages import PromptPages
from shared.free_ports import free_port
from shared.ids import InstanceId
from shared.kv.words import u32_bytes, u32_list, u64_bytes
from shared.mempool.client import MempoolClient
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.mempool.rank_memory import RankMemory
from shared.transport.unix_socket import close_fds
from shared.wire.mempool import HeldLease, Holding
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import DESCRIPTION, ROOT, SEED, MempoolProcess, chain, until
from tests.support.build_libcuda import environment_with

GPUS = [f"cuda:{bytes([0xA0 + number] * 16).hex()}" for number in range(2)]
PAGE = 2 << 20
NUM_PAGES = 16
DESCRIBED = msgspec.structs.replace(DESCRIPTION, block_bytes=PAGE, dtype="bfloat16")
ABC = chain("a", "b", "c")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return environment_with("fake_libcuda_two_gpus.c", tmp_path_factory.mktemp("libcuda"))


class Worker:
    """A rank and the engine that works in its pages; bytes are written through the slabs' descriptors."""

    def __init__(self, socket: Path, name: str, device: str) -> None:
        self.memory = RankMemory(
            socket, InstanceId(name), DESCRIBED, 0, device=device, capacity_bytes=NUM_PAGES * PAGE
        )
        self.slabs = [fd for _, fds in self.memory.slab_fds() for fd in fds]
        self.memory.stay_attached()
        self.quota = PageQuota(socket, InstanceId(name), DESCRIBED, NUM_PAGES // 2)
        self.quota.attach()
        self.stock: list = []
        self.sealed: list[SealedPage] = []

    def write(self, names: str, hashes: list[bytes]) -> None:
        until(
            lambda: self.stock.extend(self.quota.take_granted()) or len(self.stock) >= len(names),
            "pages come",
        )
        parent = SEED
        for name, block_hash in zip(names, hashes, strict=True):
            page, epoch = self.stock.pop()
            os.pwrite(self.slabs[page], name.encode() * PAGE, 0)
            self.quota.writing([(page, epoch)])
            self.sealed.append(SealedPage(page, epoch, block_hash, parent, DESCRIBED.block_tokens))
            parent = block_hash
        self.quota.seal(self.sealed)

    def read(self, page: int) -> str:
        return os.pread(self.slabs[page], PAGE, 0).decode()

    def holding(self, leases: list[HeldLease]) -> Holding:
        self.stock.extend(self.quota.take_granted())
        return Holding(
            pages=u32_bytes(p for p, _ in self.stock),
            epochs=u64_bytes(e for _, e in self.stock),
            sealed_pages=u32_bytes(s.page for s in self.sealed),
            sealed_epochs=u64_bytes(s.epoch for s in self.sealed),
            sealed_hashes=b"".join(s.block_hash for s in self.sealed),
            sealed_parents=b"".join(s.parent for s in self.sealed),
            sealed_valid_tokens=u32_bytes(s.valid_tokens for s in self.sealed),
            leases=leases,
        )

    def close(self) -> None:
        self.quota.close()
        self.memory.close()
        close_fds(self.slabs)


@pytest.fixture
def pool(tmp_path, environment):
    keeper = KeeperProcess(tmp_path)
    mempool = MempoolProcess(tmp_path, env=environment, **{"keeper-socket": keeper.socket})
    workers = [Worker(mempool.socket, f"worker-{n}", GPUS[n]) for n in range(2)]
    yield mempool, keeper, workers
    for worker in workers:
        worker.close()
    mempool.stop()
    keeper.stop()


async def read_all(mempool, worker: Worker, hashes: list[bytes], **options) -> tuple[str, object]:
    client = MempoolClient(mempool.socket, InstanceId("worker-1"))
    client.start()
    try:
        assert await client.wait_connected(30_000)
        got = await client.acquire(hashes, **options)
        return "".join(worker.read(page)[0] for page in u32_list(got.pages)), got
    finally:
        await client.close()


async def test_blocks_on_one_gpu_are_copied_to_a_reader_on_the_other(pool):
    mempool, _, (first, second) = pool
    first.write("abc", ABC)
    text, _ = await read_all(mempool, second, ABC, timeout_ms=30_000)
    assert text == "abc"
    assert mempool.status()["counters"]["blocks_pulled"] == 3
    assert set(mempool.status()["copies"]["paths"]) == {"imported"}


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
@pytest.mark.parametrize("dram_bytes", [0, 8 * PAGE])
async def test_a_report_says_whether_blocks_on_a_gpu_pass_between_hosts(tmp_path, environment, dram_bytes):
    flags = {"dram-bytes": dram_bytes, "peer-listen": f"tcp://127.0.0.1:{free_port()}"}
    mempool = MempoolProcess(tmp_path, env=environment, **flags)
    client = MempoolClient(mempool.socket, InstanceId("worker-0"))
    client.start()
    try:
        assert await client.wait_connected(30_000)  # before its engine
        worker = Worker(mempool.socket, "worker-0", GPUS[0])
        try:
            await client.status(timeout_ms=30_000)  # what was said before it has come
            place = PromptPages(client, DESCRIBED, WorkerSettings()).place
            assert place is not None
            assert (bool(place.address), place.crosses_hosts) == (True, dram_bytes > 0)
        finally:
            worker.close()
    finally:
        await client.close()
        mempool.stop()


async def test_a_successor_adopts_the_pages_of_both_gpus_and_copies_between_them(pool):
    mempool, keeper, (first, second) = pool
    first.write("abc", ABC)
    text, got = await read_all(mempool, second, ABC[:1], until_release=True, timeout_ms=30_000)
    assert text == "a"
    mempool.process.kill()
    mempool.process.wait()
    until(lambda: first.quota.lost and second.quota.lost, "the engines notice")
    mempool.start()
    lease = HeldLease(lease_id=got.lease_id, pages=got.pages, epochs=got.epochs)
    assert first.quota.reattach(first.holding([]))
    assert second.quota.reattach(second.holding([lease]))
    status = mempool.status()
    assert [space["devices"] for space in status["spaces"]] == [[GPUS[0]], [GPUS[1]]]
    assert status["counters"]["pages_inherited"] == 4
    assert first.read(first.sealed[0].page) == "a" * PAGE
    text, again = await read_all(mempool, second, ABC, timeout_ms=30_000)
    assert text == "abc"
    assert u32_list(again.pages)[0] == u32_list(got.pages)[0]
    assert mempool.status()["counters"]["blocks_pulled"] == 2
    assert keeper.num_open() > 2 * NUM_PAGES


def states(mempool) -> list[str]:
    return list(mempool.status()["copies"].get("spaces", {}).values())


async def test_a_page_on_a_gpu_that_somebody_wrote_over_is_copied_to_nobody(tmp_path, environment):
    mempool = MempoolProcess(tmp_path, env=environment, checksum_rate=1)
    first, second = (Worker(mempool.socket, f"worker-{n}", GPUS[n]) for n in range(2))
    try:
        until(lambda: states(mempool) == ["mapped", "mapped"], "both GPUs are mapped")
        first.write("abc", ABC)
        until(lambda: mempool.status()["counters"]["checks_pages_summed"] == 3, "sums of three pages")
        os.pwrite(first.slabs[first.sealed[1].page], b"x", PAGE - 1)
        text, _ = await read_all(mempool, second, ABC, timeout_ms=30_000)
        assert text == ""
        text, _ = await read_all(mempool, second, ABC, timeout_ms=30_000)
        assert text == "a"
        counters = mempool.status()["counters"]
        assert counters["checks_copies_wrong"] == counters["checks_pages_corrupt"] == 1
        assert counters["checks_pages_checked"] >= 4
    finally:
        first.close()
        second.close()
        mempool.stop()


def test_the_sum_of_a_page_on_a_gpu_is_that_of_its_bytes_through_the_c_interface(environment):
    command = [sys.executable, "-m", "tests.gpu.page_sums_on_gpu", "--small"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("GB/s") == 3
