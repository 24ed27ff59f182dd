"""The spaces between which a caller copies by itself, mapped in the background: no transfer waits for a mapping."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import ClusterError, CopyFailed, PeerGone
from shared.ids import InstanceId, SpaceId
from shared.kernels.copy_pages.host_memory import move
from shared.mempool.caller_memory import CallerMemory, Window
from shared.mempool.direct_checks import CHECKS, LOOK_ROWS, Checks, native_checks
from shared.mempool.flights import Submit, wait_quiet
from shared.mempool.held_pages import Columns, Stretch, stretch_of
from shared.wire.mempool_api import PageAddress, instance_key

INLINE_BYTES = 256 << 10  # host memory: so much is copied at once, 40 us
COPY_THREADS = 2  # beyond it
PART_BYTES = 1 << 20  # less is not worth another thread
FIRST_BYTES, FIRST_PAGES = 16 << 20, 8  # of a set between GPUs: 43 us on NVLink
PARTS_PAGE_BYTES = 1 << 20  # smaller pages go at once
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0  # after a mapping failed; twice as long each time

NO_MAPPING = "no mapping"  # for now, until _again

logger = logging.getLogger(__name__)
U64 = NDArray[np.uint64]
WayKey = tuple[int, SpaceId, int, SpaceId]  # source's instance key and space, target's


class Gpu(Protocol):
    """The GPU on which this process computes; direct_cuda.CallerGpu."""

    device: str

    def window(self, num_slabs: int, slab_bytes: int, *, writes: bool) -> Window: ...

    def submitter(self, *, pulls: bool) -> Submit: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """Both ends of a kind of transfer, mapped. `bases`: addresses of page 0, of source and target. `first_pages`: of a
    set so many are best given first; 0: all at once."""

    source: CallerMemory
    target: CallerMemory
    bases: tuple[np.uint64, np.uint64]
    size: np.uint64
    submit: Submit
    first_pages: int = 0


class Copied:
    """A copy by the CPU: behind this thread (`futures`, of its parts), or done."""

    def __init__(self, futures: "Sequence[Future[None]]" = ()) -> None:
        self.futures = futures

    def done(self) -> bool:
        """See flights.Ticket."""
        if not all(future.done() for future in self.futures):
            return False
        for future in self.futures:
            if (error := future.exception()) is not None:
                raise CopyFailed(repr(error))
        return True


def first_part(page_bytes: int) -> int:
    """Pages that a GPU should begin with: their copy takes as long as twice as many others' checks. 0 for small pages,
    which are copied sooner than checked."""
    return max(FIRST_PAGES, FIRST_BYTES // page_bytes) if page_bytes >= PARTS_PAGE_BYTES else 0


def way_key(source: Stretch, target: Stretch) -> WayKey:
    """Of transfers like this one."""
    return source.key, source.space, target.key, target.space


class Ways:
    """Of one connection to the nine calls, until close().

    Args:
        socket: the mempool's for engines and clients.
        instance: of the connection.
        on_lost: a mapping lost its mempool; any thread.
    """

    def __init__(self, socket: Path, instance: InstanceId, on_lost: Callable[[], None]) -> None:
        self.closed = False
        self.checks = CHECKS  # until those in machine code are there
        self.leaver: threading.Thread | None = None
        self._socket, self._instance, self._on_lost = socket, instance, on_lost
        self._names = {instance_key(instance): instance}
        self._found: dict[WayKey, Way | str] = {}  # or why there is none
        self._again: dict[WayKey, tuple[float, float]] = {}  # mapping failed: not before, and the wait
        self._lock = threading.Lock()
        self._map_lock = threading.Lock()  # held while something is mapped
        self._maps: dict[tuple[int, SpaceId, bool], CallerMemory] = {}
        self._gpu: Gpu | None = None
        self._native: Checks | None = None  # None: not sought yet
        self._threads: ThreadPoolExecutor | None = None

    def knows(self, instance: InstanceId) -> None:
        """A name that addresses of answers may stand for."""
        self._names[instance_key(instance)] = instance

    def name_of(self, key: int) -> InstanceId | None:
        """Of the instance of an address."""
        return self._names.get(key)

    def between(self, source: Stretch, target: Stretch) -> Way | str:
        """How pages go there, or why not for now; the first call begins to map both spaces, and one that comes some
        time after that failed. Cost: 0.3 us."""
        key = way_key(source, target)
        found = self._found.get(key)
        if found is None or (
            found == NO_MAPPING and time.monotonic() >= self._again[key][0] and not self.closed
        ):
            found = self._found[key] = "not mapped yet"
            threading.Thread(target=self._make, args=(key,), name="quire-caller-map", daemon=True).start()
        return found

    def first_pages(self, source: PageAddress, target: PageAddress) -> int:
        """See Way, of transfers between these spaces; 0 where there is none."""
        way = self._found.get((source.instance_key, source.space, target.instance_key, target.space))
        return way.first_pages if isinstance(way, Way) else 0

    def has(self, sources: Sequence[PageAddress], targets: Sequence[PageAddress]) -> bool:
        """Whether both spaces are mapped."""
        source, target = stretch_of(sources), stretch_of(targets)
        return (
            source is not None
            and target is not None
            and isinstance(self._found.get(way_key(source, target)), Way)
        )

    def copy_by(self, submit: Callable[[Way], Submit]) -> None:
        """For tests and measurements: every way that there is copies so from now on."""
        for key, way in self._found.items():
            if isinstance(way, Way):
                self._found[key] = replace(way, submit=submit(way))

    # -- mapping ------------------------------------------------------------------------------------

    def _make(self, key: WayKey) -> None:
        try:
            with self._map_lock:
                source = self._map(key[0], key[1], writes=False)
                target = self._map(key[2], key[3], writes=True)
                way = self._way_between(source, target)
                if isinstance(way, Way):
                    if self.checks is CHECKS:  # which serve while others are compiled
                        self._found[key] = way
                    self.checks = self._compiled(way)
                self._found[key] = way
        except (ClusterError, OSError, ValueError) as error:
            _, wait_s = self._again.get(key, (0.0, RETRY_MIN_S / 2))
            wait_s = min(RETRY_MAX_S, 2 * wait_s)
            source, target = key[1], key[3]
            logger.info(
                "transfers from space %s to %s go by the mempool for %s s: %s", source, target, wait_s, error
            )
            self._again[key] = time.monotonic() + wait_s, wait_s
            self._found[key] = NO_MAPPING

    def _compiled(self, way: Way) -> Checks:
        """In machine code where that can be had, for the kinds of arrays of this way: no transfer waits for it."""
        try:
            if self._native is None:
                self._native = native_checks() or CHECKS
            self._try(way, self._native)
        except Exception as error:  # noqa: BLE001  whatever a compiler may raise, numpy's checks say the same
            logger.warning("direct copies are checked by numpy: %r", error)
            self._native = CHECKS
        return self._native

    def _try(self, way: Way, checks: Checks) -> None:
        """With no pages."""
        pages, epochs = np.zeros(0, np.int64), np.zeros(0, np.uint64)
        columns = Columns(shared=False)
        side = pages, epochs, columns.epochs, columns.counts
        how = checks.hold(*side, *side)
        found = np.zeros((LOOK_ROWS, 0), np.uint64)
        tables = (way.source.words, pages, epochs), (way.target.words, pages, epochs)
        checks.look(*tables[0], *tables[1], how, *way.bases, way.size, found)
        checks.leave(pages, columns.counts, pages, columns.counts)

    def _way_between(self, source: CallerMemory, target: CallerMemory) -> Way | str:
        if source.content_key != target.content_key or source.page_bytes != target.page_bytes:
            return "unlike pages"
        on_gpus = [memory.window is not None for memory in (source, target)]
        submit: Submit = self._copy_in_host_memory
        first_pages = 0
        if any(on_gpus):
            if (
                not all(on_gpus)
                or self._gpu is None
                or self._gpu.device not in (source.device, target.device)
            ):
                return "between these memories"
            submit = self._gpu.submitter(pulls=self._gpu.device == target.device != source.device)
            first_pages = first_part(source.page_bytes)
        bases = np.uint64(source.address), np.uint64(target.address)
        return Way(source, target, bases, np.uint64(source.page_bytes), submit, first_pages)

    def _map(self, key: int, space: SpaceId, *, writes: bool) -> CallerMemory:
        """Raises: ClusterError, OSError, ValueError."""
        found = self._maps.get((key, space, writes))
        if found is not None:
            return found
        if key not in self._names:
            raise PeerGone("an instance without a name")

        def make_window(_device: str, num_slabs: int, slab_bytes: int) -> Window:
            if self._gpu is None:
                from shared.mempool.direct_cuda import gpu_in_use

                self._gpu = gpu_in_use()
            return self._gpu.window(num_slabs, slab_bytes, writes=writes)

        made = CallerMemory(
            self._socket, self._instance, self._names[key], space, writes=writes, make_window=make_window,
            quiet=wait_quiet, on_down=self._on_lost,
        )  # fmt: skip
        with self._lock:
            if not self.closed:
                self._maps[key, space, writes] = made
                return made
        made.leave()
        raise PeerGone("closed")

    def _copy_in_host_memory(self, sources: U64, targets: U64, page_bytes: int) -> Copied:
        sizes = np.full(sources.size, page_bytes, np.uint64)
        if sources.size * page_bytes <= INLINE_BYTES:
            move(targets, sources, sizes)
            return Copied()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="quire-direct")
        num_parts = max(1, min(COPY_THREADS, sources.size, sources.size * page_bytes // PART_BYTES))
        edges = [sources.size * part // num_parts for part in range(num_parts + 1)]
        parts = [slice(*each) for each in pairwise(edges)]
        return Copied([self._threads.submit(move, targets[p], sources[p], sizes[p]) for p in parts])

    # -- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """`closed` from now on. Mappings end, in the background, when the last copy has. Any thread."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            maps, self._maps = list(self._maps.values()), {}
        self.leaver = threading.Thread(
            target=self._leave, args=(maps,), name="quire-caller-leave", daemon=True
        )
        self.leaver.start()

    def _leave(self, maps: list[CallerMemory]) -> None:
        wait_quiet()  # a copy that began before `closed` was set is known by now, or will see it
        leaving = [threading.Thread(target=each.leave, daemon=True) for each in maps]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        with self._map_lock:
            if self._threads is not None:
                self._threads.shutdown()
            if self._gpu is not None:
                self._gpu.close()
