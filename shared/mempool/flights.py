"""Copies that this process makes by itself between pages of the mempool, while they may still touch a page.

One registry a process: to a mempool's successor a process speaks for all of its connections at once.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from shared.errors import ClusterError, CopyFailed
from shared.kernels.copy_pages.copies import U64
from shared.mempool.direct_checks import Checks
from shared.mempool.held_pages import Columns, Stretch

POLL_S = 0.001


class Ticket(Protocol):
    """A set of copies that has begun. Any thread."""

    def done(self) -> bool:
        """Whether every byte is at its target. Raises: ClusterError; with `running`, some of it may still run."""
        ...


Submit = Callable[[U64, U64, int], Ticket]  # of addresses of pages and their size; raises ClusterError


class Flight:
    """One copy, from before its first byte until nothing of it runs. Its pages are marked in the columns meanwhile:
    by hold() of `checks`, before it is made."""

    def __init__(
        self, checks: Checks, source: Stretch, here: Columns, target: Stretch, there: Columns
    ) -> None:
        self.source, self.target = source, target
        self._checks, self._here, self._there = checks, here, there
        self._ticket: Ticket | None = None
        self.is_over = False  # nothing of it runs, nor will
        self._is_marked = True
        with _LOCK:
            _FLYING.add(self)

    def started(self, ticket: Ticket) -> None:
        """It runs from now on."""
        self._ticket = ticket

    @property
    def futures(self) -> "Sequence[Future[None]]":
        """Of a copy on threads: done when it has ended."""
        return getattr(self._ticket, "futures", ())

    def end(self) -> None:
        """Nothing of it runs, or has begun. Any thread; the marks stay until land()."""
        self.is_over = True
        with _LOCK:
            _FLYING.discard(self)

    def ended(self, spin_s: float = 0.0) -> bool:
        """Whether nothing of it runs any more; where the ticket can, behind a wait of `spin_s` at most. Any thread.

        Raises: CopyFailed when not every byte has arrived; `is_over` says whether something still runs.
        """
        if self.is_over:
            return True
        if self._ticket is None:
            return False
        spin = getattr(self._ticket, "spin", None) if spin_s else None
        try:
            if not (self._ticket.done() if spin is None else spin(spin_s)):
                return False
        except ClusterError as error:
            if not getattr(error, "running", False):
                self.end()
            raise CopyFailed(error.message) from error
        self.end()
        return True

    def land(self) -> bool:
        """Take the marks off if nothing of it runs; whether it is so. On the thread of the columns."""
        try:
            over = self.ended()
        except CopyFailed:
            over = self.is_over
        if over and self._is_marked:
            self._is_marked = False
            # the columns may have grown: their arrays of now
            self._checks.leave(self.source.pages, self._here.counts, self.target.pages, self._there.counts)
        return over


_LOCK = threading.Lock()
_FLYING: set[Flight] = set()


def wait_quiet(mine: "list[Flight] | None" = None) -> None:
    """Return when these have ended, or without any given: all of this process that have begun by now."""
    with _LOCK:
        waiting = list(_FLYING) if mine is None else list(mine)
    while waiting:
        waiting = [flight for flight in waiting if not _is_over(flight)]
        if waiting:
            time.sleep(POLL_S)


def _is_over(flight: Flight) -> bool:
    try:
        return flight.ended()
    except CopyFailed:
        return flight.is_over
