"""Memory of a real mempool goes back to the system under pressure and comes again, while engines go on."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shared.ids import InstanceId
from tests.integration import test_mempool_gpu_spaces as gpu
from tests.integration.keeper_rig import KeeperProcess
from tests.integration.mempool_rig import (
    BLOCK_BYTES,
    DESCRIPTION,
    PATIENCE_MS,
    MempoolProcess,
    PatientClient,
    chain,
    content,
    until,
)
from tests.integration.pages_rig import PagesEngine
from tests.support.open_files import open_files

BIG = msgspec.structs.replace(DESCRIPTION, block_bytes=1 << 20)
NUM_PAGES = 128
environment = gpu.environment


def shmem_of(pid: int) -> int:
    """Shared memory that is resident in the mappings of a process, in bytes: what its engine's pages take."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss_Shmem:"))) << 10


async def press(socket, num_bytes: int, instance: str = "e", *, regain: bool = False):
    client = PatientClient(socket, InstanceId(instance))
    client.start()
    try:
        assert await client.wait_connected(30_000)
        return await (client.regain_memory if regain else client.release_memory)(
            num_bytes, wait_ms=PATIENCE_MS
        )
    finally:
        await client.close()


def test_host_memory_falls_and_grows_back_and_the_engine_goes_on(tmp_path):
    mempool = MempoolProcess(tmp_path, **{"capacity-bytes": NUM_PAGES << 20})
    try:
        engine = PagesEngine(mempool.socket, "e", description=BIG, quota=NUM_PAGES)
        names = chain(*map(str, range(100)))
        engine.save(names, [bytes([i]) * (1 << 20) for i in range(100)])
        engine.in_use = engine.cached[-20:]
        until(lambda: mempool.counts().get("sealed") == 100, "all is sealed")
        before = mempool.status()["resident_bytes"]
        mine = shmem_of(os.getpid())
        assert before >= 100 << 20
        answer = asyncio.run(press(mempool.socket, 90 << 20))
        assert answer.num_bytes == answer.released_bytes == 90 << 20
        after = mempool.status()["resident_bytes"]
        assert before - after >= 60 << 20  # the free pages had none
        assert mine - shmem_of(os.getpid()) >= 60 << 20  # as this engine's process sees it
        counts = mempool.counts()
        assert counts["released"] == 90
        assert sum(counts.values()) == NUM_PAGES
        for page, _ in engine.in_use:  # it reads on
            assert engine.read(page, 4) != b"\0\0\0\0"
        more = chain("more", "x")
        engine.unpin(engine.cached[:4])
        engine.save(more, [content(more[0]), content(more[1])])
        assert len(engine.acquire(more)) == 2
        again = asyncio.run(press(mempool.socket, 0, regain=True))
        assert (again.num_bytes, again.released_bytes) == (90 << 20, 0)
        until(lambda: len(engine.granted) >= 80, "the engine gets its share again")
        many = chain("again", *map(str, range(79)))
        pages = engine.save(many, [bytes([7]) * (1 << 20)] * 80)
        assert all(engine.read(page, 2) == b"\7\7" for page, _ in pages)
        assert BLOCK_BYTES < 1 << 20
        engine.close()
    finally:
        mempool.stop()


ATTACH = """
import sys
from shared.aqua.own_space import OwnSpace
own = OwnSpace(sys.argv[1], "tensors", "cpu:tensors", 1 << 20, 16 << 20)
print("attached", flush=True)
sys.stdin.read()
"""


def attach(mempool: MempoolProcess) -> subprocess.Popen:
    """A process with 16 pages of its own, until its standard input ends."""
    command = [sys.executable, "-c", ATTACH, str(mempool.socket)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"attached\n"
    return process


def test_memory_of_processes_that_are_gone_goes_with_the_host_memory_behind_it_and_comes_with_the_next_one(
    tmp_path,
):
    keeper = KeeperProcess(tmp_path)
    mempool = MempoolProcess(
        tmp_path,
        **{
            "capacity-bytes": 16 << 20, "dram-bytes": 32 << 20, "dram-for-host": "true", "space-idle-ms": 500,
            "keeper-socket": keeper.socket,
        },
    )  # fmt: skip
    try:
        for restarts in (False, True):
            attach(mempool).communicate()
            until(lambda: mempool.counts().get("released") == 16 + 32, "its pages and those behind are gone")
            if restarts:
                mempool.kill()
                mempool.start()
                until(lambda: mempool.counts().get("released") == 16 + 32, "the tables are taken over")
            following = attach(mempool)
            until(lambda: mempool.counts().get("released", 0) == 0, "all of it is back")
            following.communicate()
    finally:
        mempool.stop()
        keeper.stop()


@pytest.fixture
def gpu_mempool(tmp_path, environment):
    keeper = KeeperProcess(tmp_path)
    mempool = MempoolProcess(
        tmp_path, env=environment, **{"keeper-socket": keeper.socket, "dram-bytes": 16 * gpu.PAGE}
    )
    yield mempool, keeper
    mempool.stop()
    keeper.stop()


def memfds(pid: int) -> int:
    """Allocations of the imitated GPU that a process has a descriptor of."""
    return sum("memfd:gpu" in name or "memfd:fake" in name for name in open_files(pid).values())


def test_a_gpus_allocations_go_and_come_with_a_rank_attached(gpu_mempool, environment):
    pytest.importorskip("torch")
    from shared.engine.page_window_cuda import CudaWindow
    from shared.mempool.page_quota import PageQuota
    from shared.mempool.rank_memory import RankMemory
    from tests.support.fake_vmm_driver import FakeVmmDriver

    mempool, keeper = gpu_mempool
    memory = RankMemory(
        mempool.socket, InstanceId("e"), gpu.DESCRIBED, 0, device=gpu.GPUS[0],
        capacity_bytes=gpu.NUM_PAGES * gpu.PAGE,
    )  # fmt: skip
    driver = FakeVmmDriver()
    window = CudaWindow(memory, driver)
    memory.stay_attached(window)
    assert len(driver.mapped) == gpu.NUM_PAGES + 1
    quota = PageQuota(mempool.socket, InstanceId("e"), gpu.DESCRIBED, 4)
    quota.attach()
    until(lambda: mempool.counts().get("granted") == 4, "the engine has its pages")
    kept = keeper_fds(keeper)
    answer = asyncio.run(press(mempool.socket, 12 * gpu.PAGE))
    assert answer.num_bytes == 12 * gpu.PAGE
    assert len(driver.mapped) == 5
    until(lambda: keeper_fds(keeper) == kept - 12, "the keeper has let go")
    assert mempool.counts()["released"] == 12
    # a successor knows what is gone, and takes it again
    mempool.kill()
    mempool.start()
    until(lambda: mempool.status()["attachments"] or True, "it is there")
    until(lambda: mempool.counts().get("released") == 12, "the table is taken over")
    quota.close()
    until(lambda: memory._link.up, "the rank is back")
    again = []

    def regained() -> bool:
        found = asyncio.run(press(mempool.socket, 0, regain=True))
        if found is not None:
            again.append(found)
        return bool(again)

    until(regained, "its rank is ready")
    assert again[0].num_bytes == 12 * gpu.PAGE
    until(lambda: len(driver.mapped) == gpu.NUM_PAGES + 1, "the rank has mapped them")
    until(lambda: keeper_fds(keeper) == kept, "the keeper has them")
    memory.close()


def keeper_fds(keeper: KeeperProcess) -> int:
    return len(os.listdir(f"/proc/{keeper.process.pid}/fd"))
