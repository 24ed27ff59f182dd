"""The pool's slabs of one GPU mapped side by side behind a private null page; see page_window.py.

Descriptors are closed as soon as they are imported: only mempool and keeper hold them for longer. Slabs whose memory
goes back to the system are unmapped while kernels run: no step knows their blocks any more.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from shared.engine.far_window import free_addresses
from shared.engine.far_window_cuda import MAX_HOST_BYTES, CudaFar, room_for_slabs
from shared.errors import ClusterError
from shared.mempool.rank_memory import RankMemory
from shared.transport.unix_socket import close_fds
from shared.vital_thread import end_process
from shared.vmm.book import runs
from shared.vmm.cuda_driver import CudaVmmDriver, VmmDriver
from shared.vmm.cuda_pages import DeviceSpan
from shared.vmm.errors import MapperTimeout, VmmError
from shared.vmm.interface import OP_CUDA_UNMAP, OP_PAUSE, Op
from shared.vmm.mapper import Mapper, open_mapper

UNMAP_US = 110  # that a slab takes besides the pause asked for: the call, and how late a sleeper wakes

logger = logging.getLogger(__name__)


class CudaWindow:
    """One reservation: the null page ends where the first slab begins. A slab without memory is a hole.

    Raises: VmmError when the driver refuses.
    Cost: about 80 us a slab to import and map, one call for access to each run of them.
    """

    def __init__(self, memory: RankMemory, driver: VmmDriver, far_places: int = 0) -> None:
        header = memory.header
        self._driver = driver
        self._slab_bytes = memory.pages_per_slab * header.page_bytes
        granularity = driver.granularity_bytes
        null_bytes = -(-header.page_bytes // granularity) * granularity
        own_bytes = memory.num_slabs * self._slab_bytes
        far_bytes = room_for_slabs(far_places, header.page_bytes, self._slab_bytes)
        size_bytes = null_bytes + own_bytes + far_bytes
        base = _reserve(driver, size_bytes) if far_places else driver.reserve(size_bytes)
        self._at = base + null_bytes
        self._mapped: set[int] = set()
        self._mapper: Mapper | None = open_mapper(self)  # calls that take no interpreter lock
        self._num_ops = 0  # submitted to it
        null = driver.create(null_bytes)
        driver.map(base, null_bytes, null)
        driver.release(null)  # the mapping keeps it
        driver.set_access(base, null_bytes, driver.access_address(True))
        for first, fds in memory.slab_fds():
            try:
                self._import(range(first, first + len(fds)), fds)
            finally:
                close_fds(fds)
        self._allow(sorted(self._mapped))
        self.address = self._at - header.page_bytes
        self.size_bytes = (header.num_pages + 1 + far_places) * header.page_bytes
        self.far: CudaFar | None = None
        if far_places:
            self.far = CudaFar(
                driver, self.address, header.page_bytes, header.num_pages + 1, far_places,
                room_bytes=self._slab_bytes,
            )  # fmt: skip
            self.size_bytes = self.far.end - self.address
        driver.zero(self.address, header.page_bytes)

    def _import(self, slabs: Sequence[int], fds: Sequence[int]) -> None:
        for slab, fd in zip(slabs, fds, strict=True):
            handle = self._driver.import_fd(fd)
            try:
                self._driver.map(self._at + slab * self._slab_bytes, self._slab_bytes, handle)
                self._mapped.add(slab)
            finally:
                self._driver.release(handle)  # the mapping keeps the memory

    def _allow(self, slabs: Sequence[int]) -> None:
        access = self._driver.access_address(True)
        for _, first, count in runs(slabs):
            self._driver.set_access(self._at + first * self._slab_bytes, count * self._slab_bytes, access)

    def unmap(self, slabs: Sequence[int], bytes_per_s: int = 0) -> None:
        """See SlabUser. Does not wait for kernels. Behind an error nothing is unmapped later than this returns.

        Cost: one call for every slab, 30 to 60 us while kernels run.
        """
        mapped = [slab for slab in slabs if slab in self._mapped]
        ops = [Op(OP_CUDA_UNMAP, self._at + slab * self._slab_bytes, self._slab_bytes) for slab in mapped]
        if bytes_per_s and self._mapper is not None:
            pause_us = max(1, int(self._slab_bytes / bytes_per_s * 1e6) - UNMAP_US)
            paused = [each for op in ops for each in (op, Op(OP_PAUSE, pause_us, 0))]
            try:
                self._mapper.wait(self._mapper.submit(paused))
                self._mapped.difference_update(mapped)
                return
            except VmmError:  # it stopped at what was refused, or is late
                done = self._stop(self._mapper)
                self._mapped.difference_update(mapped[: (max(0, done - self._num_ops) + 1) // 2])
                raise
            finally:
                self._num_ops += len(paused)
        self._driver.make_current()
        for slab, op in zip(mapped, ops, strict=True):
            self.apply([op])
            self._mapped.discard(slab)

    def _stop(self, mapper: Mapper) -> int:
        """How many of its ops are done, now that no more will be. Ends the process where that stays unknown: a late
        unmap would take a slab that was mapped again.
        """
        self._mapper = None
        try:
            mapper.close()
        except MapperTimeout as error:
            logger.critical("which slabs are mapped is in doubt, and this process ends: %s", error.message)
            end_process()
            raise
        return mapper.done

    def apply(self, ops: Sequence[Op]) -> None:
        """One after the other; all unmap."""
        for op in ops:
            self._driver.unmap(op.address, op.size_bytes)

    def entry_points(self) -> dict[int, int]:
        """See PageWindow."""
        return self._driver.entry_points()

    def prepare_thread(self) -> None:
        """See PageWindow."""
        self._driver.make_current()

    def map(self, slabs: Sequence[int], fds: Sequence[int]) -> None:
        """See SlabUser. All or nothing: a slab left mapped without access would be taken for one that may be read."""
        self._driver.make_current()
        absent = {slab: fd for slab, fd in zip(slabs, fds, strict=True) if slab not in self._mapped}
        try:
            self._import(list(absent), list(absent.values()))
            self._allow(list(absent))
        except ClusterError:
            for slab in self._mapped.intersection(absent):
                self._mapped.discard(slab)
                with contextlib.suppress(ClusterError):  # then mapping it again is refused, and said
                    self._driver.unmap(self._at + slab * self._slab_bytes, self._slab_bytes)
            raise

    def span(self) -> Any:
        """What torch takes over without copying: the null page and all slabs."""
        return DeviceSpan(self.address, self.size_bytes, self)


def _reserve(driver: VmmDriver, size_bytes: int) -> int:
    """With room for host memory above it, if the driver takes a wish."""
    wish = free_addresses(size_bytes + MAX_HOST_BYTES, driver.granularity_bytes)
    try:
        return driver.reserve(size_bytes, wish)
    except VmmError:
        return driver.reserve(size_bytes)


def open_cuda_window(
    memory: RankMemory, device: torch.device, far_places: int = 0
) -> tuple[torch.Tensor, CudaWindow]:
    """(int8 tensor over the window, its owner). Call with the device's context current."""
    torch.cuda.current_stream(device)  # the context exists and is current from here on
    window = CudaWindow(memory, CudaVmmDriver(device.index or 0), far_places)
    return torch.as_tensor(window.span(), device=device), window
