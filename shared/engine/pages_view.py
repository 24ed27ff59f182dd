"""How many pages the engine core's requests use, as its front last heard.

vLLM tells its usage with a step's output, and so before the leases end of the requests that ended in it: an engine that
has nothing to do would need their pages for ever.
"""

import asyncio
import contextlib
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from shared.background_task import begin_task

INTERVAL_S = 0.25  # as often as decode looks for room (worker_room.py)


class PagesView:
    """Asks the engine core four times a second. Args: engine_core: None: the engine does not work in pages."""

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core
        self._task: asyncio.Task[None] | None = None
        self.num_in_use: int | None = None

    def start(self) -> None:
        """Needs the event loop."""
        if self._core is not None:
            self._task = begin_task(self._follow(), "pages-view")

    async def _follow(self) -> None:
        with contextlib.suppress(EngineDeadError, EngineGenerateError):  # then others say so
            while True:
                self.num_in_use = await self._core.call_utility_async("quire_pages_in_use")
                await asyncio.sleep(INTERVAL_S)

    def close(self) -> None:
        """Harmless when it was never started."""
        if self._task is not None:
            self._task.cancel()
