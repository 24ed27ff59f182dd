"""The slow parts of paths to other hosts, one after the other on a thread of their own: agents made and destroyed.

Whoever has much to do there does not keep others waiting for it: owners take turns.
"""

import asyncio
import threading
from collections import deque
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
        self._lock = threading.Lock()
        self._untold: set[PathEnd] = set()  # made, and nobody has heard of them yet
        self._closing = False
        self._waiting: dict[int, deque[Callable[[], None]]] = {}  # by owner, whose turn is next first

    def make(
        self,
        name: str,
        spaces: Mapping[int, Sequence[HostRegion]],
        then: Callable[[PathEnd | None, str], None],
        *,
        may_send: MaySend = lambda region, pages: True,
        is_wanted: Callable[[], bool] = lambda: True,
        owner: int = 0,
    ) -> None:
        """An end with all pages of these spaces; `then` gets it, the caller's to close, or why there is none.

        Args:
            is_wanted: asked on the thread, at its turn; where not, none is made.
            owner: see run().
        """

        def work() -> PathEnd | None:
            if self._closing or not is_wanted():
                return None
            end = PathEnd(name, self._mappings.regions(spaces), may_send=may_send)
            self._untold.add(end)
            return end

        def done(end: Any, error: Exception | None) -> None:
            is_open = end in self._untold  # else close() came first
            self._untold.discard(end)
            then(end if is_open else None, str(error or ("closed" if self._closing else "")))

        self.run(work, done, owner)

    def run(
        self, work: Callable[[], object], then: Callable[[Any, Exception | None], None], owner: int = 0
    ) -> None:
        """`then` gets what it returned, or what it raised. In order for one owner; owners take turns."""

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

        with self._lock:
            try:
                self._executor.submit(self._next)
            except RuntimeError as error:  # closed
                self._loop.call_soon(then, None, error)
                return
            self._waiting.setdefault(owner, deque()).append(body)

    def _next(self) -> None:
        """The first of whose turn it is, who is behind all others then."""
        with self._lock:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            body = queue.popleft()
            if queue:
                self._waiting[owner] = queue
        body()

    def close(self) -> None:
        """Finish what is queued, the closing of every path, and close what nobody will hear of; then unmap."""
        self._closing = True
        self.run(self._close_untold, lambda _, error: None)
        self._executor.shutdown(wait=True)
        self._mappings.close()

    def _close_untold(self) -> None:
        while self._untold:
            self._untold.pop().close()
