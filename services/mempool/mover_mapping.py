"""Spaces on their way to a mapping, as often as it takes: a full GPU or too few descriptors are so for a moment.

    begin() -> trying -(mapped, and known to the paths)-> mapped
               trying -(refused)-> failed -(RETRY_MIN_S, then twice as long each time, up to RETRY_MAX_S)-> trying

Copies of a space that failed are misses, at once, until it is mapped. Methods run on the event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.mempool.mover_copies import Space
from services.mempool.mover_paths import Paths
from services.mempool.mover_spaces import MappedSpace, Mapper
from services.mempool.mover_thread import PullThread
from shared.errors import ClusterError
from shared.observe.log import get_logger
from shared.transfer.errors import TransferFailed

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0

log = get_logger("mempool.mover")


class Mapping:
    """Args:
    thread: the mover's, which alone changes `paths`.
    background: the one on which `mapper` works.
    on_mapped: after each that went well, in the background.
    on_tried: after each attempt.
    """

    def __init__(
        self,
        mapper: Mapper,
        paths: Paths,
        thread: PullThread,
        background: ThreadPoolExecutor,
        *,
        on_mapped: Callable[[], None],
        on_tried: Callable[[Space], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._mapper, self._paths, self._thread, self._background = mapper, paths, thread, background
        self._on_mapped, self._on_tried = on_mapped, on_tried
        self._timers: dict[int, asyncio.TimerHandle] = {}  # by number of the space, until it is tried again
        self._closed = False

    def begin(self, space: Space) -> None:
        """Try now, in the background."""
        self._timers.pop(space.number, None)
        space.is_tried = True
        with contextlib.suppress(RuntimeError):  # close() came
            self._background.submit(self._map, space)

    def give_up(self, number: int) -> None:
        """Not again. An attempt under way goes on."""
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()

    def undo(self, mapped: MappedSpace, on_undone: Callable[[], None]) -> None:
        """Unmap what is in no transfer any more, in the background, then tell `on_undone`: also where a driver did not
        let go, whose memory is this process's until it ends."""
        self._thread.post(lambda: self._unregister(mapped, on_undone))

    def close(self) -> None:
        """No space is tried again."""
        self._closed = True
        for number in list(self._timers):
            self.give_up(number)

    def _map(self, space: Space) -> None:
        """In the background."""
        try:
            mapped = self._mapper.map(space.number, space.regions, space.end)
        except Exception as error:  # noqa: BLE001  the space is unusable, the mempool is not
            self._tell(self._tried, space, None, _failure("mapping", error))
            return
        self._thread.post(lambda: self._register(space, mapped))
        self._on_mapped()

    def _register(self, space: Space, mapped: MappedSpace) -> None:
        """On the mover's thread."""
        try:
            self._paths.add(mapped)
        except Exception as error:  # noqa: BLE001  as in _map
            # the next attempt maps it again, also where a driver did not let this one go
            self._unmap_soon(mapped, self._tried, space, None, _failure("paths", error))
            return
        self._tell(self._tried, space, mapped, None)

    def _unregister(self, mapped: MappedSpace, on_undone: Callable[[], None]) -> None:
        """On the mover's thread."""
        self._paths.remove(mapped.number)
        self._unmap_soon(mapped, on_undone)

    def _unmap_soon(self, mapped: MappedSpace, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # close() came, and unmaps everything
            self._background.submit(self._unmap, mapped, function, *arguments)

    def _unmap(self, mapped: MappedSpace, function: Callable[..., None], *arguments: Any) -> None:
        """In the background."""
        try:
            self._mapper.unmap(mapped)
        except Exception as error:  # noqa: BLE001  as in _map
            log.error("not_unmapped", space=mapped.number, reason=repr(error))
        self._tell(function, *arguments)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _tried(self, space: Space, mapped: MappedSpace | None, failure: ClusterError | None) -> None:
        space.is_tried, space.mapped, space.failure = False, mapped, failure
        if failure is None:
            log.info("space_mapped", space=space.number, failures=space.num_failures)
        elif space.on_removed is None and not self._closed:
            again_s = min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(space.num_failures, 16))
            space.num_failures += 1
            log.error(
                "space_unmapped",
                space=space.number,
                code=failure.code,
                reason=failure.message,
                again_s=again_s,
            )
            self._timers[space.number] = self._loop.call_later(again_s, self.begin, space)
        self._on_tried(space)


def _failure(where: str, error: Exception) -> ClusterError:
    return error if isinstance(error, ClusterError) else TransferFailed(f"{where}: {error!r}")
