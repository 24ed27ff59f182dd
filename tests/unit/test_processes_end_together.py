"""No process of a worker outlives it, no refused start takes others with it, and neither leaves anything behind."""

import asyncio
import errno
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.engine.vllm_setup import die_with_parent, prepare_environment

prepare_environment("cpu", 1, in_pages=True)

from vllm.utils.network_utils import get_open_zmq_ipc_path  # noqa: E402
from vllm.v1.engine.core import EngineCoreProc  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc  # noqa: E402

from deploy.local.zygote_client import CANNOT_SPAWN, ZygoteClient  # noqa: E402
from shared.engine import rank_processes, worker_main  # noqa: E402
from shared.engine.interface import EngineLoad  # noqa: E402
from shared.engine.rank_processes import EngineFolder  # noqa: E402
from shared.engine.vllm_engine import VllmEngine  # noqa: E402
from shared.engine.worker_config import WorkerSettings  # noqa: E402
from shared.engine.worker_membership import MembershipKeeper  # noqa: E402
from shared.engine.zygote import Zygote  # noqa: E402
from shared.errors import SettingsError  # noqa: E402
from shared.ids import Epoch, InstanceId  # noqa: E402
from shared.testing.mock_engine import MockEngine  # noqa: E402
from shared.transport import membership_client  # noqa: E402
from shared.wire.membership import HeartbeatReply, Registered  # noqa: E402

DEMO = Path(__file__).parents[2] / "deploy" / "models" / "quire-demo"
LIMIT_S = 60
FORK = multiprocessing.get_context("fork")  # as engines are started


def ended(pidfd: int, within_s: float = LIMIT_S) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


# -- the engine core and its ranks ----------------------------------------------------------------------


@pytest.fixture
def stock_hooks(monkeypatch):
    """What host_ranks() replaces in this process is vLLM's again afterwards."""
    for owner, name in (
        (EngineCoreProc, "run_engine_core"),
        (WorkerProc, "worker_main"),
        (MultiprocExecutor, "_ensure_worker_termination"),
    ):
        monkeypatch.setattr(owner, name, staticmethod(getattr(owner, name)))
    for module in (rank_processes.uniproc_module, rank_processes.multiproc_module):
        name = "get_distributed_init_method"
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(rank_processes.cores_module, "shutdown", rank_processes.cores_module.shutdown)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", tempfile.gettempdir())


def worker(said, folder):
    """Starts an engine core, which starts a rank, as vLLM does; all three wait for ever."""

    def core():
        FORK.Process(target=WorkerProc.worker_main, daemon=True).start()
        wait()

    def wait():
        said.put(os.getpid())
        time.sleep(10 * LIMIT_S)

    rank_processes._stock_core, rank_processes._stock_rank = core, wait
    rank_processes.host_ranks(folder)
    FORK.Process(target=EngineCoreProc.run_engine_core).start()
    time.sleep(10 * LIMIT_S)


def test_the_engine_core_and_its_ranks_end_with_a_worker_that_is_killed(tmp_path, stock_hooks):
    said = FORK.Queue()
    front = FORK.Process(target=worker, args=(said, str(tmp_path)))
    front.start()
    others = []
    try:
        others.extend(os.pidfd_open(said.get(timeout=LIMIT_S)) for _ in range(2))
        assert not any(ended(other, 0) for other in others)
    finally:
        front.kill()
        front.join()
    left = [other for other in others if not ended(other)]
    for other in left:
        signal.pidfd_send_signal(other, signal.SIGKILL)
    for other in others:
        os.close(other)
    assert not left


def test_signals_to_a_whole_group_leave_the_core_to_its_worker(tmp_path, stock_hooks, monkeypatch):
    said = FORK.Queue()

    def core():
        rank_processes.core_module.signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        said.put(True)
        time.sleep(10 * LIMIT_S)

    monkeypatch.setattr(rank_processes, "_stock_core", core)
    rank_processes.host_ranks(str(tmp_path))
    process = FORK.Process(target=EngineCoreProc.run_engine_core)
    process.start()
    said.get(timeout=LIMIT_S)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    process.join(0.2)
    assert process.is_alive()
    rank_processes.cores_module.shutdown([process])
    assert process.exitcode == 7


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_process_whose_parent_died_before_the_kernel_was_asked_ends(is_alive):
    parent = os.getpid() if is_alive else 1 << 30
    child = FORK.Process(target=die_with_parent, args=(parent,))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == (0 if is_alive else 1)


# -- the zygote -----------------------------------------------------------------------------------------


def test_a_fork_that_the_kernel_refuses_is_told_and_the_zygote_goes_on(tmp_path, monkeypatch):
    ours, theirs = socket.socketpair()
    zygote, log = Zygote(theirs), tmp_path / "w.log"

    def refused():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    spawn = {"op": "spawn", "name": "w", "module": "m", "argv": [], "log": str(log)}
    ours.sendall(json.dumps(spawn).encode() + b'\n{"op":"ping","number":3}\n')
    assert zygote._read()
    failed, pong = (json.loads(line) for line in ours.recv(4096).splitlines())
    assert (failed["event"], failed["name"]) == ("spawn_failed", "w")
    assert "temporarily unavailable" in failed["error"]
    assert "temporarily unavailable" in log.read_text()
    assert pong == {"event": "pong", "number": 3}
    ours.close()
    theirs.close()


def test_the_group_of_a_worker_ends_with_it_and_its_number_is_its_own_until_the_supervisor_has_heard():
    ours, theirs = socket.socketpair()
    zygote = Zygote(theirs)
    command = ["sh", "-c", "sleep 600 & echo $!; exit 3"]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with worker.stdout as out:
        started = os.pidfd_open(int(out.readline()))
    zygote.children[worker.pid] = "w"
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        zygote._tell_ends()
    assert ended(started)
    said = {"event": "exited", "name": "w", "pid": worker.pid, "status": 3}
    assert json.loads(ours.recv(4096)) == said, "once"
    os.kill(worker.pid, 0)  # a zombie
    ours.sendall(b'{"op":"reap","pid":%d}\n' % worker.pid)
    assert zygote._read()
    assert not zygote.children
    with pytest.raises(ChildProcessError):
        os.waitpid(worker.pid, 0)
    worker.wait()
    ours.close()
    theirs.close()
    os.close(started)


def test_what_a_worker_forks_lives_while_the_disk_of_its_log_is_full(monkeypatch):
    def main(argv):
        core = FORK.Process(target=print, args=("an engine core",))
        core.start()
        core.join()
        print("a worker", flush=True)
        return 7 if core.exitcode == 0 else 1

    def supervised():
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
        ours, theirs = socket.socketpair()
        zygote = Zygote(theirs)
        zygote._spawn({"name": "w", "module": "w", "argv": [], "log": "/dev/full"})
        [pid] = zygote.children
        said.put(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        ours.close()

    monkeypatch.setitem(sys.modules, "w.__main__", SimpleNamespace(main=main))
    said = FORK.Queue()
    process = FORK.Process(target=supervised)
    process.start()
    assert said.get(timeout=LIMIT_S) == 7
    process.join()


def test_a_worker_leaves_with_its_status_while_the_disk_of_its_log_is_full():
    def leave():
        sys.stdout = sys.stderr = open("/dev/full", "w")  # noqa: SIM115  it is the process's
        print("waits in the buffer")
        worker_main.leave(7)

    process = FORK.Process(target=leave)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 7


class Told:
    """A zygote's end of the connection that only listens."""

    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(json.loads(line))

    def close(self):
        pass


async def test_a_spawn_that_failed_counts_as_an_exit_of_whoever_still_waits_for_it(tmp_path):
    heard = []
    client = ZygoteClient(
        tmp_path / "none.sock", on_spawned=lambda name, _: heard.append(name), on_exited=lambda *e: heard.append(e)
    )  # fmt: skip
    client._writer, client.ready = Told(), True
    for name in ("w", "v"):
        client.spawn(name, module="m", argv=[], log=tmp_path / "log", env={})
    client._hear({"event": "spawn_failed", "name": "w", "error": "no"})
    assert heard == [("w", CANNOT_SPAWN)]
    client.disown("v")
    client.spawn("v", module="m", argv=[], log=tmp_path / "log", env={})
    client._hear({"event": "spawn_failed", "name": "v", "error": "no"})
    assert len(heard) == 1, "of the spawn that nobody waits for"
    client._hear({"event": "spawned", "name": "v", "pid": os.getpid()})
    assert heard[1:] == ["v"], "the next answer is of the next spawn"
    client._children["v"].close()
    del client._children["v"]


# -- folders, and engines that nobody closed ------------------------------------------------------------


def test_vllms_sockets_lie_in_the_engines_folder_where_their_paths_fit(stock_hooks):
    fits = "/" + "f" * (107 - len("/") - len("/") - 36)
    rank_processes.host_ranks(fits)
    path = get_open_zmq_ipc_path().removeprefix("ipc://")
    assert (Path(path).parent, len(path)) == (Path(fits), 107)
    rank_processes.host_ranks(fits + "f")
    assert len(get_open_zmq_ipc_path().removeprefix("ipc://")) <= 107


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folders(temporary):
    """Of engines; libraries make theirs there, too."""
    return sorted(temporary.glob("*quire-engine-*"))


def engine_settings(**changes):
    return WorkerSettings(
        model_dir=str(DEMO), model_name="m", dtype="float32", device="cpu", max_model_len=256, max_num_seqs=2,
        max_num_batched_tokens=256, gpu_memory_utilization=0.1, **changes,
    )  # fmt: skip


def test_an_engine_that_is_refused_leaves_no_folder(temporary):
    with pytest.raises(SettingsError):
        VllmEngine(engine_settings(tensor_parallel_size=7))
    assert not folders(temporary)


def test_an_engine_that_cannot_begin_leaves_no_folder(temporary, monkeypatch):
    seen = []

    def begin(engine, *_):
        seen.extend(folders(temporary))
        raise RuntimeError("the engine core died")

    monkeypatch.setattr(VllmEngine, "_begin", begin)
    with pytest.raises(RuntimeError):
        VllmEngine(engine_settings())
    assert len(seen) == 1
    assert not folders(temporary)


def hold(said):
    said.put(EngineFolder().path)
    time.sleep(10 * LIMIT_S)


def test_the_folder_of_a_killed_worker_goes_with_the_next_engine_and_that_of_a_living_one_stays(temporary):
    said, holders, held = FORK.Queue(), [], []
    for _ in range(2):
        holders.append(FORK.Process(target=hold, args=(said,), daemon=True))
        holders[-1].start()
        held.append(Path(said.get(timeout=LIMIT_S)))
        (held[-1] / "ranks").touch()
    holders[0].kill()
    holders[0].join()
    mine = EngineFolder()
    assert [folder.exists() for folder in held] == [False, True]
    holders[1].kill()
    holders[1].join()
    mine.remove()
    mine.remove()
    assert folders(temporary) == [held[1]]


async def test_the_engine_of_a_worker_whose_address_is_taken_is_closed(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "eos_token_id": 2}))
        settings = WorkerSettings(
            role="decode", engine="mock", model_dir=str(tmp_path), model_name="m", redis_url="", calibrate="off",
            listen=f"tcp://127.0.0.1:{taken.getsockname()[1]}", admin_listen="127.0.0.1:0",
        )  # fmt: skip
        engine = MockEngine(settings)
        with pytest.raises(SettingsError):
            await worker_main._serve(settings, engine)
    assert not engine.alive


# -- membership -----------------------------------------------------------------------------------------


class Coordinator:
    """Grants epoch 7. `calls`: of every instance of it, as each client has one."""

    calls: list[tuple[str, str]]

    def __init__(self, *_):
        pass

    async def ask(self, method, path, reply, body=None):
        self.calls.append((method, path))
        if reply is Registered:
            return Registered(epoch=Epoch(7), heartbeat_interval_ms=60_000, ttl_ms=60_000)
        return HeartbeatReply(ttl_ms=60_000)

    async def send(self, method, path, body=None):
        self.calls.append((method, path))

    async def close(self):
        pass


async def test_a_worker_that_ends_while_it_is_about_to_register_again_leaves(monkeypatch):
    calls = []
    monkeypatch.setattr(Coordinator, "calls", calls, raising=False)
    monkeypatch.setattr(membership_client, "CoordinatorApi", Coordinator)
    granted = asyncio.Event()
    load = EngineLoad(
        num_running=0, num_waiting=0, unfinished_prefill_tokens=0, running_context_tokens=0, kv_used_share=0.0,
        step_ms=0.0,
    )  # fmt: skip
    instance = type("Register", (), {"instance": InstanceId("i")})
    keeper = MembershipKeeper(
        WorkerSettings(), register=lambda _: instance, load=lambda: load, on_epoch=lambda _: granted.set()
    )
    keeper.start("tcp://w")
    await asyncio.wait_for(granted.wait(), LIMIT_S)
    keeper.register_again()
    await asyncio.sleep(0.05)  # of the pause, in which nothing is said
    await keeper.leave()
    assert calls[0] == ("POST", "/v1/instances")
    assert calls[-1] == ("DELETE", "/v1/instances/i?epoch=7")
    assert [method for method, _ in calls].count("DELETE") == 1
