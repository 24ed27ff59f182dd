"""What fair slices did in the engine core, as its front last heard."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from shared.background_task import begin_task
from shared.engine.worker_config import WorkerSettings

INTERVAL_S = 1.0


class FairView:
    """Asks the engine core once a second and tells it what others do; nothing where the order is that of arrival."""

    def __init__(self, settings: WorkerSettings, engine_core: Any) -> None:
        self._core = engine_core if settings.local_policy == "cfs" else None
        self._counts: dict[str, int] = {}
        self._served: dict[str, int] = {}
        self._elsewhere: Mapping[str, Mapping[str, int]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Needs the event loop."""
        if self._core is not None:
            self._task = begin_task(self._follow(), "fair-view")

    async def _follow(self) -> None:
        with contextlib.suppress(EngineDeadError, EngineGenerateError):  # then others say so
            while True:
                await asyncio.sleep(INTERVAL_S)
                said = await self._core.call_utility_async("quire_fair_exchange", self._elsewhere)
                self._counts, self._served = said["counts"], said["served"]

    def hear(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """What other instances said last; the engine core hears it with the next question."""
        self._elsewhere = served

    def of_load(self) -> dict[str, Any]:
        """Fields of EngineLoad."""
        return {
            "num_kept_tokens": self._counts.get("kept_tokens", 0),
            "num_recomputed_tokens": self._counts.get("recomputed_tokens", 0),
            "swapped_out_bytes": self._counts.get("swapped_out_bytes", 0),
            "swapped_in_bytes": self._counts.get("swapped_in_bytes", 0),
            "swap_lost_blocks": self._counts.get("swap_blocks_lost", 0),
            "served_tokens": self._served,
            "fair_counts": self._counts,
        }

    def close(self) -> None:
        """Harmless when it was never started."""
        if self._task is not None:
            self._task.cancel()
