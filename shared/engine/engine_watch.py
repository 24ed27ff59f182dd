"""Whether the engine core still takes its turns: a step that hangs in a kernel, the driver or a page fault is no death
that anybody hears of, and its worker's front lives on.
"""

import asyncio
from collections.abc import Awaitable, Callable

from shared.background_task import begin_task
from shared.errors import ClusterError

TICK_S = 0.5
PAUSE_TICKS = 4  # between an answer and the next question
SUSPECT_PART = 4  # after such a part of the limit the instance says that it is not ready


class EngineWatch:
    """Asks again and again for an answer between two steps.

    Time is counted in ticks of this process: what was frozen with its engine, or had no core, suspects nobody.
    Args: ping: Engine.ping; limit_s: without an answer, then `on_silent` is called, once.
    """

    def __init__(
        self, ping: Callable[[], Awaitable[None]], limit_s: float, on_silent: Callable[[str], None]
    ) -> None:
        self._ping, self._limit_s, self._on_silent = ping, limit_s, on_silent
        self.silent_s = 0.0  # without the answer that is awaited

    @property
    def is_suspect(self) -> bool:
        """No answer for a part of the limit."""
        return self.silent_s * SUSPECT_PART >= self._limit_s

    async def run(self) -> None:
        """Until cancelled, or the engine was silent for too long."""
        while True:
            asked = begin_task(self._ask(), "engine-ping")
            try:
                while not asked.done():
                    await asyncio.sleep(TICK_S)
                    self.silent_s += TICK_S
                    if self.silent_s >= self._limit_s and not asked.done():
                        self._on_silent(f"the engine has not answered for {self.silent_s:.0f} s")
                        return
            finally:
                asked.cancel()
            self.silent_s = 0.0
            await asyncio.sleep(TICK_S * PAUSE_TICKS)

    async def _ask(self) -> None:
        try:
            await self._ping()
        except ClusterError:  # it died, and that is noticed elsewhere
            return
