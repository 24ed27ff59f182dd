"""Whole pages between GPUs with the least work before the first byte: no sort, no plan, one batch call a lane.

The general copier (shared/kernels/copy_pages) checks and plans any set of copies, 50 us for 64 pages; 128 MiB take
370 us on NVLink. Pages that Link.pull has checked need neither: they are aligned, of one size, and each is written
once. Lanes are streams of this object alone, so they need no fork and no join; a set is done when all events are.
"""

import threading
import time
from contextlib import suppress

import numpy as np

from shared.kernels.copy_pages.copier import DEFAULT_TIMEOUT_S, MAX_PENDING
from shared.kernels.copy_pages.copies import U64, CopyFailed, CopyQueueFull, Order
from shared.kernels.copy_pages.driver import CopyDriver

MAX_DESCRIPTORS = 4096  # of one call
MIN_LANE_PAGES = 8  # fewer are not worth another call
ASKED_S = 0.00005  # the driver's last answer counts for so long for sets behind the one that it was about


class PageStream:
    """Copies of pages on one GPU's copy engines, any thread. The driver stays the caller's."""

    def __init__(
        self, driver: CopyDriver, *, lanes: int = 4, min_lane_bytes: int = 0, keeps_context: bool = False
    ) -> None:
        """Args:
            min_lane_bytes: a lane is worth it from so many on; 0: from MIN_LANE_PAGES pages on.
            keeps_context: threads that ask never give the context back that they are given here: it is given once.
        Raises: CopyFailed.
        """
        self._driver = driver
        self._min_lane_bytes = min_lane_bytes
        self._lock = threading.Lock()
        driver.make_current()
        self._streams = [driver.create_stream() for _ in range(lanes)]
        self._events: list[int] = []
        self._num_pending = 0
        self._last: PageTicket | None = None  # of those submitted
        self._asked_s = 0.0  # when the driver was asked last
        self._keeps_context = keeps_context
        self._bound = threading.local()  # has `yes` on threads that were given a context

    def submit(self, sources: U64, targets: U64, size: int) -> "PageTicket":
        """Start to copy `size` bytes from each source to its target; addresses uint64 [num_pages], C-contiguous.

        Raises: CopyQueueFull; CopyFailed, and what had been started is over unless it says `running`.
        """
        worth = sources.size // MIN_LANE_PAGES
        if self._min_lane_bytes:
            worth = min(sources.size, sources.size * size // self._min_lane_bytes)
        lanes = max(1, min(len(self._streams), worth))
        sizes = np.full(sources.size, size, np.uint64)
        edges = [sources.size * lane // lanes for lane in range(lanes + 1)]
        with self._lock:
            if self._num_pending >= MAX_PENDING:
                raise CopyQueueFull(f"{MAX_PENDING} sets of pages are in flight")
            self._driver.make_current()
            events: list[int] = []
            try:
                for lane in range(lanes):
                    self._copy(sources, targets, sizes, edges[lane], edges[lane + 1], self._streams[lane])
                    events.append(self._events.pop() if self._events else self._driver.create_event())
                    self._driver.record(events[-1], self._streams[lane])
            except CopyFailed as error:
                error.running = not self._idle(events)
                raise
            self._num_pending += 1
            before = self._last if self._last is not None and self._last.events else None
            ticket = self._last = PageTicket(self, events, before)
        return ticket

    def _copy(self, sources: U64, targets: U64, sizes: U64, first: int, last: int, stream: int) -> None:
        if not self._driver.has_batch:
            for source, target in zip(
                sources[first:last].tolist(), targets[first:last].tolist(), strict=True
            ):
                self._driver.copy(target, source, int(sizes[0]), stream)
            return
        for begin in range(first, last, MAX_DESCRIPTORS):
            part = slice(begin, min(last, begin + MAX_DESCRIPTORS))
            self._driver.copy_batch(targets[part], sources[part], sizes[part], Order.STREAM, stream)

    def passed(self, ticket: "PageTicket") -> bool:
        """Whether all of its events have; then, and after a failure, they are the stream's again and it has none.

        A set counts as over when the one submitted before it, with which it shares lanes, is over: as long as that one
        runs, the driver is not asked about this one. Each such call gives the GIL away, and beside a loop that computes
        it takes the thread that has the next copies to tell 0.1 ms to get it back. A lane that stands still holds up
        those behind it on other lanes, too.

        Raises: CopyFailed, once at most, and the ticket has it then, also if a later set's owner asked; the GPU's
        context is lost, and nothing of the set runs.
        """
        with self._lock:
            if not ticket.events:
                return True
            if (before := ticket.before) is not None and before.events:
                if time.monotonic() < self._asked_s + ASKED_S:
                    return False
                first = before  # whose owner may not ask any more
                while first.before is not None and first.before.events:
                    first = first.before
                with suppress(CopyFailed):
                    self._ask(first)
                if before.events:
                    return False
            return self._ask(ticket)

    def _ask(self, ticket: "PageTicket") -> bool:
        """The driver; the set before is over. Holds the lock. Raises: CopyFailed."""
        ticket.before = None
        events, self._asked_s = ticket.events, time.monotonic()
        try:
            # an event can be asked for from any context, but from none it cannot
            if not (self._keeps_context and hasattr(self._bound, "yes")):
                self._driver.make_current()
                self._bound.yes = True
            while events and self._driver.passed(events[-1]):
                self._events.append(events.pop())
        except CopyFailed as error:
            ticket.failure = error  # under the lock: no other thread takes it for done
            self._events += events
            events.clear()
            raise
        finally:
            self._num_pending -= not events
        return not events

    def _idle(self, events: list[int]) -> bool:
        """After a failed call: wait until no lane runs. False when that cannot be known. Holds the lock."""
        deadline_s = time.monotonic() + DEFAULT_TIMEOUT_S
        try:
            event = events[0] if events else self._driver.create_event()
            for stream in self._streams:
                self._driver.record(event, stream)
                while not self._driver.passed(event):
                    if time.monotonic() >= deadline_s:
                        return False
                    time.sleep(0.0001)
        except CopyFailed:
            return False
        self._events.extend(events or [event])
        return True

    def close(self) -> None:
        """When nothing is in flight."""
        with self._lock:
            self._driver.make_current()
            for event in self._events:
                self._driver.destroy_event(event)
            for stream in self._streams:
                self._driver.destroy_stream(stream)
            self._events, self._streams = [], []


class PageTicket:
    """One set in flight; see link.Attempt and served_link.Sending. The public fields are its stream's."""

    def __init__(self, stream: PageStream, events: list[int], before: "PageTicket | None" = None) -> None:
        """`before`: the set submitted before this one, while it is in flight."""
        self._stream = stream
        self.events = events
        self.before = before
        self.failure: CopyFailed | None = None

    def done(self) -> bool:
        """Whether every byte is at its target. Raises: CopyFailed, from then on at every call."""
        passed = self._stream.passed(self)
        if self.failure is not None:
            raise self.failure
        return passed
