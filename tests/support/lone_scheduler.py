"""A scheduler in this process that knows one instance, which says nothing: for tests of its connections."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.scheduler import config
from services.scheduler.shell import Scheduler
from shared.transport.clock import MonotonicClock
from tests.support.control_plane import hello


@asynccontextmanager
async def scheduler_of_one(folder: Path) -> AsyncIterator[Scheduler]:
    """It listens in `folder`; colocated instance c0 counts as alive for 100 s."""
    flags = ["--listen", f"ipc://{folder}/place", "--report-listen", f"ipc://{folder}/report"]
    made = Scheduler(config.load([*flags, "--dead-after-ms", "100000"]), MonotonicClock(), "boot")
    await made.start()
    made.instances.hello(hello("c0", role="colocated"), now_ms=MonotonicClock().now_ms())
    yield made
    await made.stop()
