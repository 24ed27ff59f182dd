"""A task that nobody awaits while it runs: what ends it unasked is a bug, and must not be silent."""

import asyncio
from collections.abc import Coroutine

LOST_TASK = "lost_task"  # key of the loop's context: the name of a task that ended by a bug


def begin_task(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Run it on the running loop; the task is the caller's to cancel. What it raises is told to the loop's handler,
    which logs it and, in our services, ends the process: end_on_bug(), end_on_lost_task() (shared/observe/service.py).
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_tell)
    return task


def _tell(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        name = task.get_name()
        context = {"message": f"the background task {name} ended by a bug", LOST_TASK: name}
        task.get_loop().call_exception_handler({**context, "exception": error})
