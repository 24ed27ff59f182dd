"""Copies of whole pages that cost their caller 2 us to start and 2 us to see done: page_stream.py in machine code.

A batch call tells a copy in a microsecond, and only when it has told all, the first one begins; those of one batch then
follow each other without a gap. So a set of many pages goes in batches, each told while the one before it runs. H200,
64 MiB in pages of 2 MiB: 188 us, in one batch 194 to 210, over four streams 191; the bytes alone need 173.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shared.kernels.copy_pages.copier import MAX_PENDING
from shared.kernels.copy_pages.copies import NO_ADDRESSES, U64, CopyFailed, CopyQueueFull, Order
from shared.kernels.copy_pages.driver import BATCH_ABI, CudaDriver
from shared.transfer.page_stream import PageStream, PageTicket

_ABIS = {  # in the order of native_copies.GET_CONTEXT and the rest
    "cuCtxGetCurrent": 4000, "cuCtxSetCurrent": 4000, "cuMemcpyBatchAsync": BATCH_ABI, "cuEventRecord": 2000,
    "cuEventQuery": 2000,
}  # fmt: skip
BATCH_PAGES, BATCH_BYTES = (
    4,
    8 << 20,
)  # of a set's first batch: one takes 2 us of the GPU's time between others
_WARM_UP_S = 1.0


class NativeStream(PageStream):
    """See PageStream. Any thread; each keeps the context that it had."""

    def __init__(self, driver: CudaDriver) -> None:
        """Cost: 0.5 s, and 2 s more where this was never compiled.

        Raises: VmmUnavailable without numba; CopyFailed, also where the driver has no batches.
        """
        from shared.transfer import native_copies

        super().__init__(driver, lanes=2)
        self._native: Any = native_copies
        self._cuda = driver
        found = [driver.entry(name, abi) for name, abi in _ABIS.items()]
        if not all(found):
            self.close()
            raise CopyFailed("cuGetProcAddress", f"one of {', '.join(_ABIS)} is missing")
        clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
        self._calls = np.array([*found, clock], np.int64)
        self._get_context = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(found[0])
        self._set_context = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(found[1])
        self._words = driver.batch_words(Order.STREAM)
        self._context = driver.context
        self._size, self._sizes = 0, NO_ADDRESSES
        self._turn = 0
        self.submit(NO_ADDRESSES, NO_ADDRESSES, 0).spin(_WARM_UP_S)

    def submit(self, sources: U64, targets: U64, size: int) -> "NativeTicket":
        """See PageStream.submit(): behind what was submitted before, on one stream. Cost: 3 us, 1 us a page."""
        return self._on(
            self._streams[0], sources, targets, size, max(BATCH_PAGES, BATCH_BYTES // max(1, size))
        )

    def pull(self, sources: U64, targets: U64, size: int) -> "NativeTicket":
        """As submit(), of sources that are a peer's. Between two batches of such copies are 7 us, so each set is one
        batch, and sets take turns on two streams."""
        self._turn ^= 1
        return self._on(self._streams[self._turn], sources, targets, size, max(1, sources.size))

    def _on(self, stream: int, sources: U64, targets: U64, size: int, batch: int) -> "NativeTicket":
        count = sources.size
        with self._lock:
            if self._num_pending >= MAX_PENDING:
                raise CopyQueueFull(f"{MAX_PENDING} sets of pages are in flight")
            if size != self._size or self._sizes.size < count:
                self._size, self._sizes = size, np.full(max(count, 1024), size, np.uint64)
            event = self._events.pop() if self._events else self._new_event()
            status = self._native.start(
                self._calls, self._context, stream, event, *self._words, sources, targets, self._sizes, batch
            )
            if status:
                raise self._refused(status, event)
            self._num_pending += 1
        return NativeTicket(self, [event])

    def _new_event(self) -> int:
        with self._own_context():
            return self._driver.create_event()

    def _refused(self, status: int, event: int) -> CopyFailed:
        """The error of a set of which nothing runs any more, unless it says so. Holds the lock."""
        with self._own_context():
            error = self._error("cuMemcpyBatchAsync", status)
            error.running = not self._idle([event])
            return error

    def _error(self, name: str, status: int) -> CopyFailed:
        try:
            self._cuda.check(name, status)
        except CopyFailed as error:
            return error
        raise AssertionError(status)  # not reached

    @contextmanager
    def _own_context(self) -> Iterator[None]:
        was = ctypes.c_void_p()
        self._get_context(ctypes.addressof(was))
        try:
            self._driver.make_current()
            yield
        finally:
            self._set_context(was)

    def passed(self, ticket: PageTicket, spin_s: float = 0.0) -> bool:
        """See PageStream.passed(); behind a wait of so long at most, without the lock. If another thread sees the end
        first, the event may be a later set's by then: that set is waited for, as long, and this one is over."""
        events, status = ticket.events, self._native.NOT_READY
        for event in events[:1] if spin_s else ():
            status = self._native.wait(self._calls, self._context, event, int(spin_s * 1e9))
        with self._lock:
            if not events:
                return True
            if status == self._native.NOT_READY:
                status = self._native.wait(self._calls, self._context, events[0], 0)
            if status == self._native.NOT_READY:
                return False
            if status:
                ticket.failure = self._error("cuEventQuery", status)
            self._events += events
            events.clear()
            self._num_pending -= 1
        if ticket.failure is not None:
            raise ticket.failure
        return True


class NativeTicket(PageTicket):
    """One set in flight."""

    _stream: NativeStream

    def spin(self, seconds: float) -> bool:
        """As done(), after a wait of so long at most, without the interpreter's lock."""
        passed = self._stream.passed(self, seconds)
        if self.failure is not None:
            raise self.failure
        return passed
