"""Ranks of one module's tests: processes forked from one that has imported it, vLLM and all, once."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes


def run_ranks(function: Callable[..., None], *args: Any, count: int = 2) -> None:
    """`function(rank, *args)` in so many processes, until all have ended. Raises: what one of them raised.

    Spawned ones would import vLLM each: eight CPU-seconds. Where the server runs already, with another module, they do.
    """
    multiprocessing.set_forkserver_preload([function.__module__])
    start_processes(function, args=args, nprocs=count, start_method="forkserver")
