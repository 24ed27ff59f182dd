"""The GPU of a caller that copies by itself (direct.py): windows over spaces on GPUs, and its copy engines.

Only a GPU on which this process computes already: none gets a context, half a gigabyte, for the sake of copies. That
GPU alone has access to the windows, to those that are only read no right to write (the driver refuses it).
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from shared.kernels.copy_pages.copies import U64
from shared.kernels.copy_pages.driver import CudaDriver
from shared.mempool.flights import Submit
from shared.transfer.cuda_window import load_driver
from shared.transfer.errors import PathUnavailable
from shared.transfer.native_stream import NativeStream
from shared.transfer.page_stream import PageStream, PageTicket
from shared.vmm.book import runs
from shared.vmm.cuda_driver import CudaVmmDriver, VmmDriver

LANES = 4  # without machine code
MIN_LANE_BYTES = 8 << 20  # 20 us on NVLink; another lane costs 5 us of this process's time then

logger = logging.getLogger(__name__)


class GpuWindow:
    """See caller_memory.Window: a reserved range with a slab at each multiple of `slab_bytes`, or a hole."""

    def __init__(self, vmm: VmmDriver, num_slabs: int, slab_bytes: int, *, writes: bool) -> None:
        """Raises: VmmError."""
        self._vmm, self._slab_bytes, self._writes = vmm, slab_bytes, writes
        self._size = num_slabs * slab_bytes
        self._mapped: set[int] = set()
        self._lock = threading.Lock()
        vmm.make_current()
        self.address = vmm.reserve(self._size)

    def map(self, slabs: Sequence[int], fds: Sequence[int]) -> None:
        """See caller_memory.Window."""
        with self._lock:
            self._vmm.make_current()
            for slab, fd in zip(slabs, fds, strict=True):
                if slab in self._mapped:
                    continue
                handle = self._vmm.import_fd(fd)
                try:
                    at = self.address + slab * self._slab_bytes
                    self._vmm.map(at, self._slab_bytes, handle)
                    self._mapped.add(slab)
                finally:
                    self._vmm.release(handle)  # the mapping keeps the memory
            for _, first, count in runs(sorted(slabs)):
                at, length = self.address + first * self._slab_bytes, count * self._slab_bytes
                self._vmm.set_access(at, length, self._vmm.access_address(self._writes))

    def unmap(self, slabs: Sequence[int]) -> None:
        """See caller_memory.Window."""
        with self._lock:
            self._unmap([slab for slab in slabs if slab in self._mapped])

    def _unmap(self, slabs: Sequence[int]) -> None:
        self._vmm.make_current()
        for _, first, count in runs(sorted(slabs)):
            self._vmm.unmap(self.address + first * self._slab_bytes, count * self._slab_bytes)
            self._mapped.difference_update(range(first, first + count))

    def close(self) -> None:
        """See caller_memory.Window."""
        with self._lock:
            if self.address:
                self._unmap(sorted(self._mapped))
                self._vmm.free_reservation(self.address, self._size)
                self.address = 0


class GpuTicket:
    """A set of pages in flight."""

    def __init__(self, gpu: "CallerGpu", ticket: PageTicket) -> None:
        self._gpu, self._ticket = gpu, ticket

    def done(self) -> bool:
        """Whether every byte is at its target. Raises: CopyFailed, with nothing running any more."""
        was = self._gpu.enter()
        try:
            return self._ticket.done()
        finally:
            self._gpu.leave(was)


class CallerGpu:
    """One GPU with a context of this process's, until close(). Threads keep the context that they had."""

    def __init__(self, driver: Any, ordinal: int, device: str) -> None:
        """Raises: ClusterError."""
        self._cuda, self.device = driver, device
        self._vmm = CudaVmmDriver(ordinal)
        self._copy = CudaDriver(ordinal)
        self._context = int(self._current())
        self._pages = self._made_stream()

    def _made_stream(self) -> PageStream:
        try:
            return NativeStream(self._copy)
        except Exception as error:  # noqa: BLE001  whatever a compiler may raise, Python can submit them too
            logger.warning("own copies are submitted by Python: %r", error)
            return PageStream(self._copy, lanes=LANES, min_lane_bytes=MIN_LANE_BYTES)

    def _current(self) -> Any:
        return self._cuda.cuCtxGetCurrent()[1]

    def enter(self) -> Any:
        """The calling thread's context, which leave() puts back."""
        return self._current()

    def leave(self, was: Any) -> None:
        """See enter()."""
        if int(was) != self._context:
            self._cuda.cuCtxSetCurrent(was)

    def window(self, num_slabs: int, slab_bytes: int, *, writes: bool) -> GpuWindow:
        """Without anything mapped. Raises: VmmError."""
        return GpuWindow(self._vmm, num_slabs, slab_bytes, writes=writes)

    def submitter(self, *, pulls: bool) -> Submit:
        """What starts to copy whole pages; see PageStream.submit(). `pulls`: the sources are on another GPU."""
        if isinstance(self._pages, NativeStream):
            return self._pages.pull if pulls else self._pages.submit
        return self._submit

    def _submit(self, sources: U64, targets: U64, page_bytes: int) -> GpuTicket:
        was = self.enter()
        try:
            return GpuTicket(self, self._pages.submit(sources, targets, page_bytes))
        finally:
            self.leave(was)

    def close(self) -> None:
        """When nothing is in flight and its windows are closed."""
        was = self.enter()
        try:
            self._pages.close()
            self._copy.close()
            self._vmm.close()
        finally:
            if int(was) != self._context:
                self.leave(was)


def gpu_in_use() -> CallerGpu:
    """The first GPU that has a primary context in this process. Raises: PathUnavailable when none has; ClusterError."""
    driver = load_driver()
    status, count = driver.cuDeviceGetCount()
    for ordinal in range(count if int(status) == 0 else 0):
        _, found = driver.cuDeviceGet(ordinal)
        status, _, active = driver.cuDevicePrimaryCtxGetState(found)
        if int(status) != 0 or not active:
            continue
        status, uuid = driver.cuDeviceGetUuid(found)
        if int(status) == 0:
            was = driver.cuCtxGetCurrent()[1]
            try:
                return CallerGpu(driver, ordinal, f"cuda:{bytes(uuid.bytes).hex()}")
            finally:
                driver.cuCtxSetCurrent(was)
    raise PathUnavailable("this process uses no GPU")
