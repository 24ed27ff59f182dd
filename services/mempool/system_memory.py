"""Gives memory of spaces back to the system, and takes it again: the calls, on a thread of their own.

The same thread makes the mover's mappings (mover_spaces.py), so that a window never maps what is just leaving. Nothing
here decides: core/releases.py has seen that no other process maps what goes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from services.mempool.memory import PoolMemory
from services.mempool.slabs import DeviceSlabs, KeptSlabs
from shared.errors import ClusterError
from shared.observe.log import get_logger

if TYPE_CHECKING:
    from services.mempool.mover_gpu import SlabWindow

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0  # of what could not be mapped; twice as long each time

T = TypeVar("T")

log = get_logger("mempool.memory")


class CopyOptions(NamedTuple):
    """See Mover, whose these are."""

    pin_host: bool = False
    threads: int = 2
    floor_gb_per_s: float = 0.0
    huge_pages: bool = False


class Windows(Protocol):
    """The mover's mappings of a space; on the thread."""

    def __call__(self, number: int) -> "list[SlabWindow]": ...


class SystemMemory:
    """One thread until close(). Answers come on the loop.

    Args: windows: over the slabs of a space in this process.
    """

    def __init__(self, windows: Windows) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mempool-memory")
        self._windows = windows

    def punch(
        self, memory: PoolMemory, number: int, pages: Sequence[int], on_done: Callable[[bool], None]
    ) -> None:
        """Pages of host memory; `on_done` says whether it failed, and nothing is lost then."""
        self._run(lambda: not punched(memory, number, pages), on_done)

    def release(
        self,
        slabs: Sequence[DeviceSlabs | KeptSlabs],
        number: int,
        which: Sequence[int],
        on_done: Callable[[bool], None],
    ) -> None:
        """Allocations of each rank (sorted). `on_done` is told False: what a driver refuses is lost, and said."""

        def work() -> bool:
            begin_s = time.perf_counter()
            try:
                for window in self._windows(number):
                    window.unmap(which)
                for rank in slabs:
                    for slab in which:
                        rank.release(slab)
            except ClusterError as error:
                log.error("slabs_not_released", space=number, code=error.code, reason=error.message)
            took_ms = round((time.perf_counter() - begin_s) * 1e3, 3)
            log.info("slabs_released", space=number, num_slabs=len(which), took_ms=took_ms)
            return False

        self._run(work, on_done)

    def restore(
        self,
        slabs: Sequence[DeviceSlabs | KeptSlabs],
        number: int,
        which: Sequence[int],
        on_done: Callable[[int], None],
    ) -> None:
        """Memory for allocations of each rank (sorted); `on_done` says for how many, from the first on.

        What the mover's windows do not show then (no descriptors, a full GPU) is tried again; until then copies of
        these pages fail, and are misses.
        """
        loop = asyncio.get_running_loop()

        def work() -> int:
            made = 0
            try:
                for slab in which:
                    for rank in slabs:
                        rank.restore(slab)
                    made += 1
            except ClusterError as error:
                log.warning("slabs_not_restored", space=number, code=error.code, reason=error.message)
                for rank in slabs:
                    rank.release(which[made])
            self._remap(loop, slabs, number, which[:made], RETRY_MIN_S)
            return made

        self._run(work, on_done)

    def behind(self, then: Callable[[], None]) -> None:
        """`then` is called on the loop, behind what the thread was told before; never after close()."""
        self._run(lambda: None, lambda _: then())

    def _remap(
        self,
        loop: asyncio.AbstractEventLoop,
        slabs: Sequence[DeviceSlabs | KeptSlabs],
        number: int,
        which: Sequence[int],
        wait_s: float,
    ) -> None:
        """On the thread: what of these has memory is in the windows; if that fails, again after `wait_s`."""
        present = [slab for slab in which if all(rank.is_present(slab) for rank in slabs)]
        try:
            for window in self._windows(number):
                window.remap(present)
        except (ClusterError, OSError) as error:
            log.error("slabs_not_mapped", space=number, reason=str(error), again_s=wait_s)
            again = partial(self._remap, loop, slabs, number, present, min(RETRY_MAX_S, 2 * wait_s))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(loop.call_later, wait_s, self._submit, again)

    def _submit(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # close() came
            self.thread.submit(work)

    def _run(self, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        loop = asyncio.get_running_loop()

        def job() -> None:
            found = work()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(on_done, found)

        self._submit(job)

    def close(self) -> None:
        """End the thread, behind what it does now."""
        self.thread.shutdown(wait=True, cancel_futures=True)


def punched(memory: PoolMemory, number: int, pages: Sequence[int]) -> bool:
    """Whether memory of these pages went to the system; else nothing is lost."""
    try:
        memory.punch(pages)
    except OSError as error:  # some sandboxes cannot: the memory stays
        log.warning("punch_failed", space=number, num_pages=len(pages), error=str(error))
        return False
    return True
