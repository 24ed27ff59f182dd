"""The slow parts of paths to other hosts, one after the other on a thread of their own: agents made and destroyed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.mempool.mover_regions import HostRegion
from services.mempool.peer_paths import Mappings, PathEnd
from shared.observe.log import get_logger
from shared.transfer.served_link import MaySend

log = get_logger("mempool.peers")


class Background:
    """Owns its thread and the mappings until close(). Callbacks run on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="mempool-peers")
        self._mappings = Mappings()

    def make(
        self,
        name: str,
        spaces: Mapping[int, Sequence[HostRegion]],
        then: Callable[[PathEnd | None, str], None],
        *,
        may_send: MaySend = lambda region, pages: True,
    ) -> None:
        """An end with all pages of these spaces; `then` gets it, or why there is none."""

        def work() -> PathEnd:
            return PathEnd(name, self._mappings.regions(spaces), may_send=may_send)

        def done(end: Any, error: Exception | None) -> None:
            then(end, str(error or ""))

        self.run(work, done)

    def run(self, work: Callable[[], object], then: Callable[[Any, Exception | None], None]) -> None:
        """`then` gets what it returned, or what it raised."""

        def body() -> None:
            result, failure = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  a path fails, the mempool does not
                log.warning("path_work_failed", error=repr(error))
                failure = error
            try:
                self._loop.call_soon_threadsafe(then, result, failure)
            except RuntimeError:
                log.debug("loop_ended")

        try:
            self._executor.submit(body)
        except RuntimeError as error:  # closed
            self._loop.call_soon(then, None, error)

    def close(self) -> None:
        """Finish what is queued, the closing of every path; then unmap."""
        self._executor.shutdown(wait=True)
        self._mappings.close()
