"""Pages of GPU memory, one cuMemCreate handle each, and windows over them. See interface.py; no torch.

Who makes pages (`CudaPages`) can export them; who got descriptors of them (`ImportedCudaPages`) can only map them.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from shared.errors import ClusterError
from shared.vmm.book import HOLE, PRIVATE, WindowBook, page_keys
from shared.vmm.cuda_driver import VmmDriver
from shared.vmm.errors import BadMapping, VmmError
from shared.vmm.interface import OP_CUDA_ACCESS, OP_CUDA_MAP, OP_CUDA_UNMAP, Op


class _Handles:
    """What both kinds of source share: a handle per page, 0 for an absent one."""

    def __init__(self, driver: VmmDriver, num_pages: int, page_bytes: int) -> None:
        granularity = driver.granularity_bytes
        if num_pages <= 0 or page_bytes <= 0 or page_bytes % granularity:
            raise BadMapping(f"{num_pages} pages of {page_bytes} B; multiples of {granularity} B are needed")
        self.driver = driver
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._handles = [0] * num_pages

    def is_present(self, page: int) -> bool:
        """See PageSource."""
        return 0 <= page < self.num_pages and self._handles[page] != 0

    def handle(self, page: int) -> int:
        """The driver's handle, still this source's. Raises: BadMapping when absent."""
        if not self.is_present(page):
            raise BadMapping(f"page {page} has no memory")
        return self._handles[page]

    def release(self, page: int, count: int = 1) -> None:
        """See PageSource. Cost: about 10 us a page of 2 MiB; 197 GiB/s for pages of 8 MiB, unmapping included."""
        self._check(page, count)
        for i in range(page, page + count):
            handle, self._handles[i] = self._handles[i], 0
            if handle:
                self.driver.release(handle)

    def resident_bytes(self) -> int:
        """See PageSource."""
        return sum(1 for handle in self._handles if handle) * self.page_bytes

    def window(self, num_indices: int) -> "CudaWindow":
        """See PageSource."""
        return CudaWindow(self, num_indices)

    def close(self) -> None:
        """See PageSource."""
        self.release(0, self.num_pages)

    def _check(self, page: int, count: int) -> None:
        if page < 0 or count <= 0 or page + count > self.num_pages:
            raise BadMapping(f"{count} from page {page} of {self.num_pages}")


class CudaPages(_Handles):
    """Makes all pages at once and owns them until close().

    Raises: BadMapping; OutOfPages when the GPU has not enough memory (nothing is kept then).
    Cost: 10 us a page; 32 GiB as 8 MiB pages in 0.05 s.
    """

    def __init__(self, driver: VmmDriver, num_pages: int, page_bytes: int) -> None:
        super().__init__(driver, num_pages, page_bytes)
        try:
            self.acquire(0, num_pages)
        except ClusterError:
            self.close()
            raise

    def acquire(self, page: int, count: int = 1) -> None:
        """See PageSource."""
        self._check(page, count)
        for i in range(page, page + count):
            if not self._handles[i]:
                self._handles[i] = self.driver.create(self.page_bytes)

    def export_fd(self, page: int) -> int:
        """See PageSource. Cost: about 0.1 ms; every descriptor counts against the process's limit."""
        return self.driver.export_fd(self.handle(page))


class ImportedCudaPages(_Handles):
    """Another process's pages: absent until add() gets their descriptors."""

    def add(self, page: int, fds: Sequence[int]) -> None:
        """Import descriptors of the pages from `page` on. All of them are closed, also when one is refused.

        Raises: BadMapping when a page is present already; VmmError. Pages before the failing one stay.
        Cost: about 80 us a page.
        """
        try:
            self._check(page, len(fds))
            for i, fd in enumerate(fds, page):
                if self._handles[i]:
                    raise BadMapping(f"page {i} is imported already")
                self._handles[i] = self.driver.import_fd(fd)
        finally:
            for fd in fds:
                os.close(fd)

    def make(self, page: int) -> None:
        """Memory of this process's own in an absent page's place, e.g. for a null page. Raises: as add()."""
        self._check(page, 1)
        if self._handles[page]:
            raise BadMapping(f"page {page} is imported already")
        self._handles[page] = self.driver.create(self.page_bytes)

    def acquire(self, page: int, count: int = 1) -> None:
        """See PageSource. Raises: BadMapping for absent pages: only their owner can send them (add())."""
        self._check(page, count)
        for i in range(page, page + count):
            self.handle(i)

    def export_fd(self, page: int) -> int:
        """Raises: VmmError always: the driver does not export imported handles; forward descriptors instead."""
        raise VmmError(f"page {page} is imported and cannot be exported again; forward its descriptor")


class DeviceSpan:
    """GPU memory as torch.as_tensor() takes it without copying; `owner` lives as long as this."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }


class CudaWindow:
    """See PageWindow. Unmapping does not wait for kernels: the caller has waited for theirs.

    Raises: BadMapping; VmmError when the address space is refused.
    Cost: 24 us to reserve; 17 to 25 us a page to map or unmap, without waiting for the GPU.
    """

    def __init__(self, source: _Handles, num_indices: int) -> None:
        if num_indices <= 0:
            raise BadMapping(f"a window of {num_indices}")
        self.source = source
        self.num_indices = num_indices
        self.page_bytes = source.page_bytes
        self._driver = source.driver
        self._book = WindowBook(num_indices)
        self._private: dict[int, int] = {}  # index: handle
        self.address = self._driver.reserve(self.size_bytes)
        self._finalizer = weakref.finalize(
            self,
            _give_back,
            self._driver,
            self.address,
            self.page_bytes,
            num_indices,
            self._book,
            self._private,
        )
        self._finalizer.atexit = False  # the driver is gone before us, and the memory with it

    @property
    def size_bytes(self) -> int:
        """See PageWindow."""
        return self.num_indices * self.page_bytes

    def page_at(self, index: int) -> int | None:
        """See PageWindow."""
        return self._book.page_at(index)

    def map(self, index: int, page: int, count: int = 1, *, writable: bool = True) -> None:
        """See PageWindow."""
        self.map_pages(index, range(page, page + count), writable=writable)

    def map_pages(self, index: int, pages: Sequence[int], *, writable: bool = True) -> None:
        """See PageWindow. Cost: one cuMemMap a page, one cuMemSetAccess for all, whatever their order."""
        ops = self.plan_map(index, pages, writable=writable)
        self._apply_or_undo(ops, index, len(pages))

    def map_private(self, index: int, count: int = 1) -> None:
        """See PageWindow."""
        self._book.check_free(index, count)
        handles: list[int] = []
        try:
            handles.extend(self._driver.create(self.page_bytes) for _ in range(count))
            self._book.set(index, np.full(count, PRIVATE, np.int64))
            self._apply_or_undo(self._map_ops(index, handles, writable=True), index, count)
        except ClusterError:
            for handle in handles:
                self._driver.release(handle)
            raise
        self._private.update(enumerate(handles, index))
        try:
            self._driver.zero(self._at(index), count * self.page_bytes)
        except ClusterError:
            with contextlib.suppress(ClusterError):  # then it stays, in the books too
                self.unmap(index, count)
            raise

    def unmap(self, index: int, count: int = 1) -> None:
        """See PageWindow. Cost: one cuMemUnmap."""
        self._book.check_mapped(index, count)
        private = self._book.private_at(index, count)
        self.apply([Op(OP_CUDA_UNMAP, self._at(index), count * self.page_bytes)])
        self._book.set(index, np.full(count, HOLE, np.int64))
        for i in private:
            self._driver.release(self._private.pop(i))

    def plan_map(self, index: int, pages: Sequence[int], *, writable: bool = True) -> list[Op]:
        """See PageWindow."""
        self._book.check_free(index, len(pages))
        handles = [self.source.handle(page) for page in pages]
        self._book.set(index, page_keys(pages, writable=writable))
        return self._map_ops(index, handles, writable=writable)

    def plan_unmap(self, index: int, count: int = 1) -> list[Op]:
        """See PageWindow."""
        self._book.check_pages(index, count)
        self._book.set(index, np.full(count, HOLE, np.int64))
        return [Op(OP_CUDA_UNMAP, self._at(index), count * self.page_bytes)]

    def apply(self, ops: Sequence[Op]) -> None:
        """See PageWindow."""
        driver = self._driver
        for op in ops:
            if op.code == OP_CUDA_MAP:
                driver.map(op.address, op.size_bytes, op.a)
            elif op.code == OP_CUDA_ACCESS:
                driver.set_access(op.address, op.size_bytes, op.a)
            else:
                assert op.code == OP_CUDA_UNMAP, op
                driver.unmap(op.address, op.size_bytes)

    def entry_points(self) -> dict[int, int]:
        """See PageWindow."""
        return self._driver.entry_points()

    def prepare_thread(self) -> None:
        """See PageWindow."""
        self._driver.make_current()

    def span(self, offset_bytes: int = 0, size_bytes: int | None = None, owner: object = None) -> DeviceSpan:
        """See PageWindow."""
        size = self.size_bytes - offset_bytes if size_bytes is None else size_bytes
        if offset_bytes < 0 or size <= 0 or offset_bytes + size > self.size_bytes:
            raise BadMapping(f"{size} B at {offset_bytes} of {self.size_bytes}")
        return DeviceSpan(self.address + offset_bytes, size, (self, owner))

    def close(self) -> None:
        """See PageWindow."""
        self._finalizer()

    def _at(self, index: int) -> int:
        return self.address + index * self.page_bytes

    def _map_ops(self, index: int, handles: Sequence[int], *, writable: bool) -> list[Op]:
        size, at = self.page_bytes, self._at(index)
        ops = [Op(OP_CUDA_MAP, at + i * size, size, handle) for i, handle in enumerate(handles)]
        access = self._driver.access_address(writable)
        ops.append(Op(OP_CUDA_ACCESS, at, len(handles) * size, access))
        return ops

    def _apply_or_undo(self, ops: list[Op], index: int, count: int) -> None:
        done = 0
        try:
            for op in ops:
                self.apply([op])
                done += op.code == OP_CUDA_MAP
        except ClusterError:
            self._book.set(index, np.full(count, HOLE, np.int64))
            if done:
                self._driver.unmap(self._at(index), done * self.page_bytes)
            raise


def _give_back(
    driver: VmmDriver,
    address: int,
    page_bytes: int,
    num_indices: int,
    book: WindowBook,
    private: dict[int, int],
) -> None:
    """All that the driver lets go of. Raises: its first refusal, at the end."""
    refused: list[ClusterError] = []

    def attempt(call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except ClusterError as error:
            refused.append(error)

    for index, count in book.mapped_runs():
        attempt(driver.unmap, address + index * page_bytes, count * page_bytes)
    stays_mapped = bool(refused)
    for handle in private.values():
        attempt(driver.release, handle)
    if not stays_mapped:  # addresses behind which something lies are not given back
        attempt(driver.free_reservation, address, num_indices * page_bytes)
    if refused:
        raise refused[0]
