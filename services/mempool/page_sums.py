"""Checksums of what lies in pages, computed by a thread of their own: 32 bits of XXH3, never 0.

One thread, first in first out: what is asked for later is computed later, and answered later.
"""

import asyncio
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import xxhash

from services.mempool.memory import PoolMemory
from shared.errors import ClusterError
from shared.observe.log import get_logger

UNKNOWN = 0  # in place of a sum

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


class PageSums:
    """Of the spaces that this process can read. sums() and its answers on one loop; close() once."""

    def __init__(self, pages_of: Callable[[int], Pages | None]) -> None:
        """Args: pages_of: a space's; None: they cannot be read, or not yet. Closed here."""
        self._pages_of = pages_of
        self._pages: dict[int, Pages] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-sums")
        self._is_closed = False
        self.num_waiting = 0  # pages asked for and not answered

    def can_read(self, space: int) -> bool:
        """Whether pages of this space can be summed here."""
        return self._get(space) is not None

    def _get(self, space: int) -> Pages | None:
        if space not in self._pages and (pages := self._pages_of(space)) is not None:
            self._pages[space] = pages
        return self._pages.get(space)

    def sums(self, pieces: Sequence[Piece], then: Callable[[list[int]], None]) -> None:
        """Of each, UNKNOWN where it cannot be read; by `then`, always later, but never after close()."""
        found = [self._get(piece.space) for piece in pieces]
        loop = asyncio.get_running_loop()
        self.num_waiting += len(pieces)

        def compute() -> list[int]:
            return [_sum(pages, piece) for pages, piece in zip(found, pieces, strict=True)]

        def done(future: Future[list[int]]) -> None:
            if not (self._is_closed or future.cancelled()):
                loop.call_soon_threadsafe(self._answer, future, then)

        self._thread.submit(compute).add_done_callback(done)

    def _answer(self, future: Future[list[int]], then: Callable[[list[int]], None]) -> None:
        if not self._is_closed:
            values = future.result()
            self.num_waiting -= len(values)
            then(values)

    def close(self) -> None:
        """Waits for what is being summed."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)
        for pages in self._pages.values():
            pages.close()
        self._pages = {}


def _sum(pages: Pages | None, piece: Piece) -> int:
    if pages is None:
        return UNKNOWN
    try:
        return pages.sum(piece.page, piece.num_bytes)
    except (ClusterError, ValueError) as error:  # nothing is known of it; its reader goes on
        log.warning("page_not_summed", space=piece.space, page=piece.page, reason=str(error))
        return UNKNOWN
