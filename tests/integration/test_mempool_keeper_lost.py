"""A mempool whose keeper dies: noticed whoever notices first, and everything handed over to the next keeper.

And what the keeper holds that is of no use any more: of processes that are dead, and what nobody could take over.
"""

import asyncio
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys

import msgspec
import pytest

from services.mempool import kept as kept_module
from services.mempool import shell as shell_module
from services.mempool import takeover
from services.mempool.core.actions import PoolLimits
from services.mempool.kept import Kept, name_of
from services.mempool.memory import PoolMemory
from services.mempool.shell import MempoolShell
from services.mempool.slabs import KeptSlabs
from services.mempool.takeover import ProcessMeta
from shared.ids import Epoch
from shared.kv.page import PageState, pack_word
from shared.transport.clock import MonotonicClock
from shared.transport.unix_socket import OutOfDescriptors, close_fds
from tests.integration.keeper_rig import META, NUM_PAGES, PAGE_BYTES, KeeperProcess

GENERATION = Epoch(1_000)


@pytest.fixture
def keeper(tmp_path):
    process = KeeperProcess(tmp_path)
    yield process
    process.stop()


@pytest.fixture
async def kept(keeper):
    made = Kept(str(keeper.socket), GENERATION)
    made.take_over()
    made.watch()
    yield made
    made.close()


def keep_me(kept: Kept) -> None:
    pidfd = os.pidfd_open(os.getpid())
    kept.process(os.getppid(), pidfd, "engine", "prefill-0")
    os.close(pidfd)


def kept_now(kept: Kept) -> dict[str, dict[str, int]]:
    return {run.space: run.num_fds for run in kept.client.list_spaces()}


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  the condition is another object's state
            await asyncio.sleep(0.01)


ON_GPU = msgspec.structs.replace(META, pages_per_slab=1)


@pytest.fixture
def slabs():
    made = KeptSlabs([os.memfd_create(f"slab{n}") for n in range(NUM_PAGES)], "cuda:0", PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture
async def on_gpu(kept, slabs):
    """A space of one rank, and the engine that works there."""
    memory = PoolMemory(NUM_PAGES, PAGE_BYTES, GENERATION, table_only=True)
    kept.space(memory, ON_GPU)
    kept.slabs(ON_GPU.number, 0, "cuda:0", slabs, NUM_PAGES)
    keep_me(kept)
    yield memory
    memory.close()


async def restored(kept: Kept, times: int) -> None:
    async with asyncio.timeout(30):
        while kept.client.num_reconnects < times or not kept.client.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("call_meets_it_first", [False, True])
async def test_the_next_keeper_gets_everything(keeper, kept, call_meets_it_first):
    keep_me(kept)
    for number in (1, 2):  # the second time too
        keeper.process.kill()
        keeper.process.wait()
        if call_meets_it_first:
            keep_me(kept)  # in vain, and on a connection that nobody watches after it
        else:
            await asyncio.sleep(0.05)
        keeper.start()
        await restored(kept, number)
        kinds = {run.space: run.num_fds for run in kept.client.list_spaces()}
        assert kinds == {"processes": {"process": 2}}


async def test_a_call_that_reaches_the_next_keeper_hands_over_and_is_watched_again(keeper, kept):
    keeper.process.kill()
    keeper.process.wait()
    keeper.start()
    keep_me(kept)
    assert kept.client.num_reconnects == 1
    assert [run.num_fds for run in kept.client.list_spaces()] == [{"process": 2}]
    keeper.process.kill()
    keeper.process.wait()
    await asyncio.sleep(0.05)
    keeper.start()
    await restored(kept, 2)


async def test_a_keeper_that_hangs_is_tried_more_and_more_seldom(keeper, kept, monkeypatch):
    """Each try holds the mempool's loop up until its deadline."""
    monkeypatch.setattr(kept_module, "RESTORE_INTERVAL_S", 0.1)
    monkeypatch.setattr(kept_module, "MAX_RESTORE_INTERVAL_S", 0.4)
    kept._restore_pause_s = 0.1
    kept.client._timeout_ms = 150
    pauses, later = [], asyncio.get_running_loop().call_later

    def recorded(delay, call, *args):
        if call == kept._restore:
            pauses.append(delay)
        return later(delay, call, *args)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", recorded)
    keeper.process.send_signal(signal.SIGSTOP)
    keep_me(kept)
    async with asyncio.timeout(30):
        while len(pauses) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert pauses[:5] == [0.1, 0.2, 0.4, 0.4, 0.4]
    kept.client._timeout_ms = 30_000
    keeper.process.send_signal(signal.SIGCONT)
    await restored(kept, 1)
    assert kept._restore_pause_s == 0.1


async def test_a_successor_hears_whether_newcomers_are_owed_what_a_space_lacks(keeper, kept):
    memory = PoolMemory(NUM_PAGES, PAGE_BYTES, GENERATION)
    memory.write_words((p, pack_word(GENERATION, PageState.RELEASED)) for p in range(NUM_PAGES))
    kept.space(memory, META)
    heard = []
    for is_owed in (True, False):
        kept.owes(META.number, is_owed)
        found = takeover.adopt(kept.client, name_of(META.number))
        heard.append(found.meta.is_owed)
        close_fds([found.page_fd])
    assert heard == [True, False]
    memory.close()


@pytest.mark.parametrize("call_meets_it_first", [False, True])
async def test_a_keeper_without_room_for_all_slabs_still_knows_every_process(
    keeper, kept, on_gpu, call_meets_it_first
):
    """It had the space whole where that is small, and no process: a successor would free pages under an engine."""
    keeper.process.kill()
    keeper.process.wait()
    if not call_meets_it_first:
        await asyncio.sleep(0.05)
    keeper.start("--max-fds", str(NUM_PAGES))
    if call_meets_it_first:
        keep_me(kept)
    await restored(kept, 1)
    assert kept_now(kept) == {"processes": {"process": 2}, "pages": {"table": 1}}
    pidfd = os.pidfd_open(os.getpid())
    kept.process(1, pidfd, "rank", "prefill-0")
    os.close(pidfd)
    assert kept_now(kept)["processes"] == {"process": 3}, "over the same connection"
    assert kept.client.num_reconnects == 1


@pytest.mark.parametrize("call_meets_it_first", [False, True])
async def test_what_could_not_be_handed_over_follows_by_itself(
    keeper, kept, on_gpu, slabs, call_meets_it_first, monkeypatch
):
    monkeypatch.setattr(kept_module, "RESTORE_INTERVAL_S", 0.02)
    kept._restore_pause_s = 0.02
    export, lacks = slabs.export, [2]

    def exported(slab: int) -> int:
        if lacks[0]:
            lacks[0] -= 1
            raise OutOfDescriptors("none are left for a moment")
        return export(slab)

    monkeypatch.setattr(slabs, "export", exported)
    keeper.process.kill()
    keeper.process.wait()
    if not call_meets_it_first:
        await asyncio.sleep(0.05)
    keeper.start()
    if call_meets_it_first:
        keep_me(kept)
        assert lacks == [1]
    await until(lambda: not lacks[0] and not kept._lacks)
    whole = {"processes": {"process": 2}, "pages": {"table": 1, "cuda-page": NUM_PAGES}}
    assert kept_now(kept) == whole
    assert kept.client.num_reconnects == 1


def leave(keeper, *, num_slabs: int = 0) -> None:
    """What an earlier mempool kept: a space, and a living and a dead process."""
    client = keeper.client(GENERATION)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # its pid stays its own
        for pid, kind in ((os.getppid(), "rank"), (dead.pid, "engine")):
            pidfd = os.pidfd_open(pid)
            takeover.keep_process(client, pid, pidfd, ProcessMeta(kind=kind, instance="prefill-0"))
            os.close(pidfd)
    if num_slabs:
        memory = PoolMemory(NUM_PAGES, PAGE_BYTES, GENERATION, table_only=True)
        takeover.keep_space(client, name_of(0), memory, ON_GPU)
        fds = [os.memfd_create(f"slab{n}") for n in range(num_slabs)]
        takeover.keep_slabs(client, name_of(0), 0, fds)
        close_fds(fds)
        memory.close()


async def test_processes_that_died_while_no_mempool_ran_are_forgotten_when_their_ranks_have_reported(
    keeper, tmp_path, monkeypatch
):
    """Each such pidfd stayed for good, and said at every later takeover that the instance had lost its engine."""
    monkeypatch.setattr(shell_module, "REPORT_DEADLINE_S", 0.2)
    leave(keeper)
    kept = Kept(str(keeper.socket), Epoch(GENERATION + 1))
    found = kept.take_over()
    shell = MempoolShell(
        tmp_path / "m",
        PoolLimits(capacity_bytes=1 << 20),
        found.boot_generation,
        MonotonicClock(),
        None,
        kept,
    )
    shell.adopt(found)
    assert kept_now(kept) == {"processes": {"process": 3}}, "the next one has to know of it, too"
    await until(lambda: kept_now(kept) == {"processes": {"process": 2}})
    shell.close()


async def test_what_a_mempool_may_not_open_is_forgotten(keeper):
    """The keeper held every allocation of a GPU for good, beside those of the engines' next start."""
    leave(keeper, num_slabs=NUM_PAGES)
    kept = Kept(str(keeper.socket), Epoch(GENERATION + 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(fd) for fd in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, NUM_PAGES // 2, None)), hard))
    try:
        found = kept.take_over()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.adopted == []
    assert kept_now(kept) == {"processes": {"process": 1}}, "its own"
    kept.close()


async def test_what_a_keeper_that_hung_could_not_hand_over_is_forgotten_when_it_answers(keeper, monkeypatch):
    leave(keeper, num_slabs=NUM_PAGES)
    monkeypatch.setattr(takeover, "take_over", functools.partial(takeover.take_over, patience_ms=0))
    kept = Kept(str(keeper.socket), Epoch(GENERATION + 1))
    kept.client._timeout_ms = 100
    keeper.process.send_signal(signal.SIGSTOP)
    found = kept.take_over()
    keeper.process.send_signal(signal.SIGCONT)
    assert found.adopted == []
    kept.client._timeout_ms = 30_000
    memory = PoolMemory(NUM_PAGES // 2, PAGE_BYTES, found.boot_generation)
    kept.watch()
    kept.space(memory, msgspec.structs.replace(META, num_pages=NUM_PAGES // 2))
    await restored(kept, 1)
    assert kept_now(kept) == {"processes": {"process": 1}, "pages": {"table": 1, "pages": 1}}
    memory.close()
    kept.close()


async def test_a_space_that_has_ended_is_forgotten_when_the_keeper_hears_and_names_no_process(
    kept, monkeypatch
):
    memories = [PoolMemory(NUM_PAGES, PAGE_BYTES, GENERATION) for _ in range(2)]
    for number, memory in enumerate(memories):
        kept.space(memory, msgspec.structs.replace(META, number=number))
    pidfd = os.pidfd_open(os.getpid())
    kept.process(os.getppid(), pidfd, "engine", "prefill-0", [0, 1])
    os.close(pidfd)

    def refuse(_name: str) -> None:
        raise OutOfDescriptors("not now")

    with monkeypatch.context() as patched:
        patched.setattr(kept.client, "forget_space", refuse)
        kept.end(1)
    assert name_of(1) in kept_now(kept)
    assert kept._processes[os.getppid()][1].spaces == [0]
    kept._hand_over_all(kept.client)
    assert set(kept_now(kept)) == {name_of(0), takeover.PROCESSES}
    kept.end(0)
    assert set(kept_now(kept)) == {takeover.PROCESSES}
    assert kept._processes[os.getppid()][1].spaces == [0], "of none would mean of all"
    for memory in memories:
        memory.close()
