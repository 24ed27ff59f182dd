"""Checksums of pages on GPUs: a page comes to page-locked memory by a copy engine, and is summed there.

Imported where there are such pages. Everything on the thread of page_sums.py, but for can_read().
"""

import ctypes
import time
from collections.abc import Sequence

import xxhash

from services.mempool.mover_gpu import Gpu, SlabWindow
from services.mempool.page_sums import short
from shared.errors import ResourceError

STAGING_BYTES = 8 << 20
LIMIT_S = 5.0  # of one copy: an engine that stands still is given up
_POLL_S = 20e-6


class Staging:
    """Page-locked memory, a stream and an event of one GPU, until close()."""

    def __init__(self, gpu: Gpu) -> None:
        """Raises: CopyFailed."""
        self._driver = gpu.copy
        self._driver.make_current()
        self._address = self._driver.allocate_host(STAGING_BYTES)
        self._stream = self._driver.create_stream()
        self._event = self._driver.create_event()
        self._bytes = memoryview((ctypes.c_char * STAGING_BYTES).from_address(self._address)).cast("B")

    def fetch(self, address: int, num_bytes: int) -> memoryview:
        """At most STAGING_BYTES of the GPU's memory, as they are now. Raises: CopyFailed, ResourceError."""
        driver = self._driver
        driver.make_current()
        driver.copy(self._address, address, num_bytes, self._stream)
        driver.record(self._event, self._stream)
        until_s = time.monotonic() + LIMIT_S
        while not driver.passed(self._event):
            if time.monotonic() > until_s:
                raise ResourceError(f"a copy of {num_bytes} bytes from a GPU takes more than {LIMIT_S} s")
            time.sleep(_POLL_S)
        return self._bytes[:num_bytes]

    def close(self) -> None:
        """Nothing may be copying any more."""
        self._bytes.release()
        self._driver.make_current()
        self._driver.destroy_event(self._event)
        self._driver.destroy_stream(self._stream)
        self._driver.free_host(self._address)


class GpuPages:
    """Pages of a space on GPUs; see page_sums.Pages. `windows`: of its ranks, which stay mapped until close()."""

    def __init__(self, windows: Sequence[SlabWindow], page_bytes: int) -> None:
        self._windows, self._page_bytes = windows, page_bytes
        self._staging: dict[str, Staging] = {}  # by device; None yet: made on the thread that uses it

    def sum(self, page: int, num_bytes: int) -> int:
        """Cost: 40 us a MiB at PCIe's rate, and that of HostPages. Raises: CopyFailed, ResourceError."""
        digest = xxhash.xxh3_64()
        for window in self._windows:
            staging = self._staging.get(window.gpu.device)
            if staging is None:
                staging = self._staging[window.gpu.device] = Staging(window.gpu)
            at, end = page * self._page_bytes, page * self._page_bytes + num_bytes
            while at < end:
                # no copy crosses the end of an allocation
                slab_end = (at // window.slab_bytes + 1) * window.slab_bytes
                count = min(end, slab_end, at + STAGING_BYTES) - at
                digest.update(staging.fetch(window.address + at, count))
                at += count
        return short(digest.intdigest())

    def close(self) -> None:
        """Nothing may be summing any more."""
        for staging in self._staging.values():
            staging.close()
        self._staging = {}
