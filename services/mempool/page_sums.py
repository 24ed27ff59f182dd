"""Checksums of what lies in pages, computed by a thread of their own: 32 bits of XXH3, never 0."""

import asyncio
import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import xxhash

from services.mempool.memory import PoolMemory
from shared.errors import ClusterError
from shared.observe.log import get_logger

UNKNOWN = 0  # in place of a sum
AGAIN_S = 5.0  # a space that could not be mapped is tried again

log = get_logger("mempool.checks")


class Piece(NamedTuple):
    """The first `num_bytes` of a page, on every rank in turn."""

    space: int
    page: int
    num_bytes: int


def short(digest: int) -> int:
    """32 bits of it, never UNKNOWN."""
    return digest & 0xFFFFFFFF or 1


class Pages(Protocol):
    """Pages of one space, every rank's."""

    def sum(self, page: int, num_bytes: int) -> int:
        """Of the first bytes of the page, rank by rank. Raises: ClusterError when they cannot be read."""
        ...

    def close(self) -> None: ...


class HostPages:
    """Pages of a space in host memory, mapped for reading until close()."""

    def __init__(self, memory: PoolMemory) -> None:
        """Raises: OSError, ValueError when the memory cannot be mapped."""
        self._page_bytes, self._num_pages, self._num_ranks = (
            memory.page_bytes, memory.num_pages, memory.num_ranks,
        )  # fmt: skip
        self._mapping = mmap.mmap(memory.page_fd, 0, prot=mmap.PROT_READ)
        self._view = memoryview(self._mapping)

    def sum(self, page: int, num_bytes: int) -> int:
        """Cost: 25 us a MiB; other threads run meanwhile."""
        digest = xxhash.xxh3_64()
        for rank in range(self._num_ranks):
            first = (rank * self._num_pages + page) * self._page_bytes
            digest.update(self._view[first : first + num_bytes])
        return short(digest.intdigest())

    def close(self) -> None:
        """Nothing may be summing any more."""
        self._view.release()
        self._mapping.close()


@dataclass(slots=True, eq=False)
class _Job:
    """`found`: how each piece's space is read; None: it is not."""

    pieces: Sequence[Piece]
    found: Sequence[Pages | None]
    answer: Callable[["_Job"], None]
    fail: Callable[[Exception], None]
    values: list[int] = field(default_factory=list)

    def step(self) -> None:
        """The next piece."""
        at = len(self.values)
        self.values.append(_sum(self.found[at], self.pieces[at]))

    @property
    def is_done(self) -> bool:
        """Whether it has a value for every piece."""
        return len(self.values) == len(self.pieces)


class _Close(_Job):
    """The last of a space."""

    def __init__(self, pages: Pages) -> None:
        super().__init__((), (), lambda _: pages.close(), _raise)

    def step(self) -> None:
        """Nothing is left to be summed."""


class _Thread(threading.Thread):
    """Does what is urgent before the next piece of what is not. put() and close() from any other thread."""

    def __init__(self) -> None:
        super().__init__(name="page-sums", daemon=True)
        self._urgent: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._is_closing = False

    def put(self, job: _Job, *, urgent: bool) -> None:
        """Starts the thread with the first."""
        with self._wake:
            (self._urgent if urgent else self._others).append(job)
            self._wake.notify()
        if self.ident is None:
            self.start()

    def run(self) -> None:
        """Until close()."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._urgent or self._others or self._is_closing)
                if self._is_closing:
                    return
                jobs = self._urgent or self._others
                job = jobs.popleft()
            try:
                job.step()
            except Exception as error:  # noqa: BLE001  a bug, raised again where it ends the process
                job.fail(error)
                return
            if job.is_done:
                job.answer(job)
                continue
            with self._wake:
                jobs.appendleft(job)

    def close(self) -> None:
        """Waits for the piece that is being summed."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self.ident is not None:
            self.join()


class PageSums:
    """Of the spaces that this process can read. sums() and its answers on one loop; close() once."""

    def __init__(
        self, pages_of: Callable[[int], Pages | None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: pages_of: a space's; None: not to be read, or not yet. May raise OSError, ValueError. Closed here."""
        self._pages_of, self._now_s = pages_of, now_s
        self._pages: dict[int, Pages] = {}
        self._failed_s: dict[int, float] = {}  # when a space could not be mapped, the last time
        self._thread = _Thread()
        self._is_closed = False
        self.num_waiting = 0  # pages asked for and not answered

    def can_read(self, space: int) -> bool:
        """Whether pages of this space can be summed here."""
        return self._get(space) is not None

    @property
    def failing(self) -> list[int]:
        """Spaces whose pages have no sums: mapping them failed, which may pass."""
        return sorted(self._failed_s)

    def _get(self, space: int) -> Pages | None:
        found = self._pages.get(space)
        if found is not None:
            return found
        failed_s = self._failed_s.get(space)
        if failed_s is not None and self._now_s() - failed_s < AGAIN_S:
            return None
        try:
            pages = self._pages_of(space)
        except (OSError, ValueError) as error:
            if failed_s is None:
                log.error("space_not_summed", space=space, reason=str(error))
            self._failed_s[space] = self._now_s()
            return None
        if pages is None:  # perhaps later
            return None
        if failed_s is not None:
            del self._failed_s[space]
            log.info("space_summed_again", space=space)
        self._pages[space] = pages
        return pages

    def sums(
        self, pieces: Sequence[Piece], then: Callable[[list[int]], None], *, urgent: bool = True
    ) -> None:
        """Of each, UNKNOWN where it cannot be read; by `then`, always later, but never after close(). Nobody waits for
        what is not urgent. What else summing raises is raised into the loop, and nothing is summed any more."""
        loop = asyncio.get_running_loop()
        self.num_waiting += len(pieces)

        def answer(job: _Job) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._answer, job, then)

        def fail(error: Exception) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_raise, error)

        found = [self._get(piece.space) for piece in pieces]
        self._thread.put(_Job(pieces, found, answer, fail), urgent=urgent)

    def _answer(self, job: _Job, then: Callable[[list[int]], None]) -> None:
        if not self._is_closed:
            self.num_waiting -= len(job.pieces)
            then(job.values)

    def ended(self, space: int) -> None:
        """The space is over: it is read no more, behind what is asked for already."""
        self._failed_s.pop(space, None)
        if (pages := self._pages.pop(space, None)) is not None:
            self._thread.put(_Close(pages), urgent=False)

    def close(self) -> None:
        """Waits for the page that is being summed."""
        self._is_closed = True
        self._thread.close()
        for pages in self._pages.values():
            pages.close()
        self._pages = {}


def _raise(error: Exception) -> None:
    raise error


def _sum(pages: Pages | None, piece: Piece) -> int:
    if pages is None:
        return UNKNOWN
    try:
        return pages.sum(piece.page, piece.num_bytes)
    except (ClusterError, ValueError) as error:  # nothing is known of it; its reader goes on
        log.warning("page_not_summed", space=piece.space, page=piece.page, reason=str(error))
        return UNKNOWN
