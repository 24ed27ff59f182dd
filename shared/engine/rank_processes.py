"""How the processes of one engine's tensor-parallel ranks find each other, end, and what they leave behind.

vLLM has them meet at a TCP store that torch opens on every interface of the machine. All ranks of an engine are on one
host here: they meet in a file of the engine's own folder. When one dies, the others wait for it in a collective,
deaf to signals, and vLLM waits nine seconds for them: here they are killed at once.
"""

import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import vllm.v1.executor.multiproc_executor as multiproc_module
import vllm.v1.executor.uniproc_executor as uniproc_module

SHARED_MEMORY = Path("/dev/shm")
REAPED_S = 0.5


_stock_ending = multiproc_module.MultiprocExecutor._ensure_worker_termination


def host_ranks(folder: str) -> None:
    """For engines that are made in this process, or forked from it, from now on: their ranks meet in this folder,
    and end together.
    """
    # vLLM names shared memory after what follows the last colon: unique, and without a slash
    method = f"file://{folder}/ranks:{Path(folder).name}"

    def in_file(_ip: str, _port: int) -> str:
        return method

    uniproc_module.get_distributed_init_method = in_file
    multiproc_module.get_distributed_init_method = in_file
    multiproc_module.MultiprocExecutor._ensure_worker_termination = staticmethod(end_ranks)


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
    _stock_ending(ranks)


def unlink_shared_memory(rank: int) -> None:
    """All ranks have mapped what they add up in: its name can go, so that no crash leaves it in memory.

    vLLM's CPU build never removes it (4 MiB a rank and start). Call after init_device.
    """
    identity = os.environ.get("VLLM_DIST_IDENT")  # noqa: TID251  vLLM's own, set a moment ago
    if identity:
        for path in SHARED_MEMORY.glob(f"{identity}-*-cpushm_{rank}"):
            path.unlink(missing_ok=True)
