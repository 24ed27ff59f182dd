"""How the processes of one engine find each other, begin, end, and what they leave behind.

vLLM has them meet at a TCP store that torch opens on every interface of the machine. All ranks of an engine are on one
host here: they meet in a file of the engine's own folder. When one dies, the others wait for it in a collective,
deaf to signals, and vLLM waits nine seconds for them: here they are killed at once. The engine core of a worker that
was killed waits for requests for ever, with all its memory: here the kernel ends it, and its ranks with it. Signals to
all processes of a terminal or service are the worker's to answer.
"""

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm.v1.engine.core as core_module
import vllm.v1.engine.utils as cores_module
import vllm.v1.executor.multiproc_executor as multiproc_module
import vllm.v1.executor.uniproc_executor as uniproc_module
from vllm.v1.engine.core import EngineCoreProc

from shared.engine.crashes import die_when_crashed
from shared.engine.nucleus import keep_whole_nuclei
from shared.engine.vllm_setup import die_with_parent
from shared.own_folder import OwnFolder

SHARED_MEMORY = Path("/dev/shm")
REAPED_S = 0.5
FOLDER = "quire-engine-"
MAX_SOCKET_PATH_BYTES = 107  # the kernel's
SOCKET_NAME_BYTES = 37  # a slash and vLLM's UUID
END = signal.SIGUSR1  # to what vLLM sends SIGTERM

_stock_ending = multiproc_module.MultiprocExecutor._ensure_worker_termination
_stock_ending_cores = cores_module.shutdown
_stock_core = EngineCoreProc.run_engine_core
_stock_rank = multiproc_module.WorkerProc.worker_main


class EngineFolder(OwnFolder):
    """Of one engine."""

    def __init__(self) -> None:
        super().__init__(FOLDER)


def host_ranks(folder: str) -> None:
    """For engines that are made in this process, or forked from it, from now on: their ranks meet in this folder,
    where their sockets are too, and end together, with this process at the latest.
    """
    # vLLM names shared memory after what follows the last colon: unique, and without a slash
    method = f"file://{folder}/ranks:{Path(folder).name}"

    def in_file(_ip: str, _port: int) -> str:
        return method

    # vLLM never removes its sockets. Behind a long TMPDIR they lie in that itself, rather than nowhere
    if len(os.fsencode(folder)) + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES:
        os.environ["VLLM_RPC_BASE_PATH"] = folder  # noqa: TID251  vLLM's setting, not ours
    uniproc_module.get_distributed_init_method = in_file
    multiproc_module.get_distributed_init_method = in_file
    multiproc_module.MultiprocExecutor._ensure_worker_termination = staticmethod(end_ranks)
    cores_module.shutdown = end_cores
    EngineCoreProc.run_engine_core = staticmethod(_run_core)
    multiproc_module.WorkerProc.worker_main = staticmethod(_run_rank)


def _run_core(*args: Any, **kwargs: Any) -> None:
    """vLLM's engine core, in a process of its own. It has a name here: also what is not forked finds it by that."""
    _begin()
    _stock_core(*args, **kwargs)


def _run_rank(*args: Any, **kwargs: Any) -> None:
    """vLLM's rank, in a process of its own."""
    _begin()
    _stock_rank(*args, **kwargs)


def _begin() -> None:
    """Of each process that computes, also where its worker is vLLM's own: a rank's, or the core's, for one rank."""
    starter = multiprocessing.parent_process()
    die_with_parent(None if starter is None else starter.pid)
    die_when_crashed()
    keep_whole_nuclei()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # SIG_IGN goes on to whom it executes
    core_module.signal = multiproc_module.signal = SimpleNamespace(**{**vars(signal), "signal": _hear})


def _hear(number: int, handler: Any) -> None:
    """For vLLM's signal.signal()."""
    if number == signal.SIGTERM:
        signal.signal(END, handler)


def end_cores(cores: list[Any], timeout: float | None = None) -> None:
    """vLLM's end of engine cores."""
    _terminated_by_end(cores)
    _stock_ending_cores(cores, timeout)


def _terminated_by_end(processes: list[Any]) -> None:
    for process in processes:
        process.terminate = lambda process=process: process._popen._send_signal(END)


def end_ranks(ranks: list[BaseProcess]) -> None:
    """vLLM's end of an engine's ranks, without patience where one of them has died."""
    until_s = time.monotonic() + REAPED_S
    while not any(rank.exitcode for rank in ranks):
        if time.monotonic() > until_s or all(rank.exitcode == 0 for rank in ranks):
            break
        time.sleep(0.01)  # a rank's pipe closes, by which vLLM knows, before its exit status can be had
    if any(rank.exitcode for rank in ranks):
        for rank in ranks:
            rank.kill()
    _terminated_by_end(ranks)
    _stock_ending(ranks)


def unlink_shared_memory(rank: int) -> None:
    """All ranks have mapped what they add up in: its name can go, so that no crash leaves it in memory.

    vLLM's CPU build never removes it (4 MiB a rank and start). Call after init_device.
    """
    identity = os.environ.get("VLLM_DIST_IDENT")  # noqa: TID251  vLLM's own, set a moment ago
    if identity:
        for path in SHARED_MEMORY.glob(f"{identity}-*-cpushm_{rank}"):
            path.unlink(missing_ok=True)
