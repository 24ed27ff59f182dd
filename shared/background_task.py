"""A task that nobody awaits while it runs: what ends it unasked is a bug, and must not be silent."""

import asyncio
from collections.abc import Coroutine


def begin_task(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Run it on the running loop; the task is the caller's to cancel. What it raises is raised into the loop, whose
    handler logs it and, in coordinator, scheduler and mempool, ends the process (end_on_bug(),
    shared/observe/service.py); gateways and workers go on without it.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_raise)
    return task


def _raise(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()
