"""KV memory of this worker's engine, for reports and the status page: what of it is used, and how much it may have.

Bytes are of one of the engine's GPUs. What others lend it (far places) is none of it, and what it lends is.
"""

import asyncio

from shared.background_task import begin_task
from shared.engine.interface import Engine, EngineLoad
from shared.engine.worker_pages import PromptPages

LOOK_S = 1.0  # between two looks at who else is in the space


class KvMemory:
    """From open() to close(). Used only from the loop."""

    def __init__(self, engine: Engine, pages: PromptPages) -> None:
        self._engine, self._pages = engine, pages
        self._num_engines = 1  # in the same pages, this one among them
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to look, if the engine works in pages that others may work in too. Needs the running loop."""
        if self._engine.keeps_leases:
            self._task = begin_task(self._follow(), "kv-memory")

    async def _follow(self) -> None:
        while True:
            if (space := await self._pages.space()) is not None:
                self._num_engines = max(1, len(space.engines))
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Harmless when it was never opened."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    @property
    def _num_pages(self) -> int:
        """Of this engine: engines of one space have even parts of it."""
        return self._engine.num_pages // self._num_engines

    def used_share(self, load: EngineLoad) -> float:
        """Of its pages, by requests, also by prompts that leases pin, which an engine does not count as its own."""
        if load.num_pages_in_use is None or not self._num_pages:
            return load.kv_used_share
        return min(1.0, load.num_pages_in_use / self._num_pages)

    def status(self, load: EngineLoad) -> dict[str, int]:
        """`kv_used_bytes`: of requests, also prompts that leases pin, of `kv_pool_bytes`."""
        block_bytes = self._engine.description.block_bytes
        pool_bytes = self._num_pages * block_bytes
        used = load.num_pages_in_use
        used_bytes = round(load.kv_used_share * pool_bytes) if used is None else used * block_bytes
        return {"kv_used_bytes": used_bytes, "kv_pool_bytes": pool_bytes}
