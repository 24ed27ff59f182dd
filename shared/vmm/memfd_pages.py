"""Pages of host memory in one memfd, and windows over them by mmap: the CPU's form of CUDA virtual memory."""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.errors import OutOfPages
from shared.vmm.book import HOLE, PRIVATE, WindowBook, page_keys, runs
from shared.vmm.errors import BadMapping, VmmError
from shared.vmm.host_calls import FAILED, MAP_FIXED, MAP_NORESERVE, libc
from shared.vmm.interface import OP_MMAP, Op
from shared.vmm.map_budget import MapBudget, process_budget

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_RW = mmap.PROT_READ | mmap.PROT_WRITE
_HOLE_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED


class MemfdPages:
    """Owns a descriptor of the memfd until close(). A new one is sealed: it can neither shrink nor grow.

    Args:
        page_bytes: a multiple of the system's page size.
        fd: adopt this memfd instead of making one; it is closed at close(), and on errors too.
        offset_bytes: where page 0 lies in an adopted memfd.
        reserve: have the kernel set the memory aside on acquire(), so that a machine without memory refuses
            there instead of killing whoever touches the page; costs zeroing all of it.
    Raises: BadMapping when the sizes do not fit; OutOfPages; VmmError.
    """

    def __init__(
        self, num_pages: int, page_bytes: int, *, fd: int = -1, offset_bytes: int = 0, reserve: bool = False
    ) -> None:
        if num_pages <= 0 or page_bytes <= 0 or page_bytes % mmap.PAGESIZE or offset_bytes % mmap.PAGESIZE:
            _close(fd)
            raise BadMapping(
                f"{num_pages} pages of {page_bytes} B at {offset_bytes}; whole system pages are needed"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.offset_bytes = offset_bytes
        self.fd = fd
        self._reserve = reserve
        self._present = bytearray(b"\1" * num_pages)
        try:
            if fd < 0:
                assert offset_bytes == 0
                self.fd = _sealed_memfd(num_pages * page_bytes)
            self._check_file()
            if reserve:
                self._allocate(0, num_pages)
        except (VmmError, OutOfPages):
            self.close()
            raise

    def _check_file(self) -> None:
        size = os.fstat(self.fd).st_size
        if size < self.offset_bytes + self.num_pages * self.page_bytes:
            raise BadMapping(
                f"the memfd has {size} B: too small for {self.num_pages} pages at {self.offset_bytes}"
            )
        try:
            seals = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise BadMapping(f"the descriptor is no memfd: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK:  # whoever else holds it could make every access here a SIGBUS
            raise BadMapping("the memfd is not sealed against shrinking")

    def is_present(self, page: int) -> bool:
        """See PageSource."""
        return 0 <= page < self.num_pages and bool(self._present[page])

    def acquire(self, page: int, count: int = 1) -> None:
        """See PageSource. Without `reserve` the memory comes at the first touch."""
        self._check(page, count)
        if self._reserve:
            self._allocate(page, count)
        self._present[page : page + count] = b"\1" * count

    def release(self, page: int, count: int = 1) -> None:
        """See PageSource. Cost: one call for all; about 0.05 ms a MiB."""
        self._check(page, count)
        self._fallocate(_PUNCH_HOLE_KEEP_SIZE, page, count)
        self._present[page : page + count] = bytes(count)

    def _allocate(self, page: int, count: int) -> None:
        self._fallocate(0, page, count)

    def _fallocate(self, mode: int, page: int, count: int) -> None:
        at, size = self.offset_bytes + page * self.page_bytes, count * self.page_bytes
        while libc.fallocate(self.fd, mode, at, size) != 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            kind = OutOfPages if number in (errno.ENOSPC, errno.ENOMEM) else VmmError
            raise kind(f"fallocate of {size} B at {at}: {os.strerror(number)}")

    def resident_bytes(self) -> int:
        """See PageSource. Cost: one call; a walk over the file's extents when it holds more than these pages."""
        status = os.fstat(self.fd)
        end = self.offset_bytes + self.num_pages * self.page_bytes
        if self.offset_bytes == 0 and status.st_size == end:
            return status.st_blocks * 512
        total, at = 0, self.offset_bytes
        while at < end:
            try:
                data = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only holes from here on
                    break
                raise VmmError(f"lseek: {error}") from error
            at = os.lseek(self.fd, data, os.SEEK_HOLE)
            total += max(0, min(at, end) - data)
        return total

    def export_fd(self, page: int) -> int:
        """See PageSource."""
        if not self.is_present(page):
            raise BadMapping(f"page {page} has no memory")
        return os.dup(self.fd)

    def window(self, num_indices: int) -> "MemfdWindow":
        """See PageSource."""
        return MemfdWindow(self, num_indices)

    def close(self) -> None:
        """See PageSource."""
        _close(self.fd)
        self.fd = -1

    def _check(self, page: int, count: int) -> None:
        if page < 0 or count <= 0 or page + count > self.num_pages:
            raise BadMapping(f"{count} from page {page} of {self.num_pages}")


class MemfdWindow:
    """See PageWindow. Reserves address space without memory; every mapping counts against `budget`.

    Raises: BadMapping; VmmError when the address space is refused.
    """

    def __init__(self, source: MemfdPages, num_indices: int, budget: MapBudget | None = None) -> None:
        if num_indices <= 0:
            raise BadMapping(f"a window of {num_indices}")
        self.source = source
        self.num_indices = num_indices
        self.page_bytes = source.page_bytes
        self._book = WindowBook(num_indices)
        self._budget = process_budget() if budget is None else budget
        self._budget.change(1)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        base = libc.mmap(None, self.size_bytes, 0, flags, -1, 0)
        if base in (None, FAILED):
            self._budget.change(-1)
            raise VmmError(f"reserving {self.size_bytes} B: {os.strerror(ctypes.get_errno())}")
        self.address = int(base)
        self._mappings = [1]
        self._finalizer = weakref.finalize(
            self, _give_back, self.address, self.size_bytes, self._budget, self._mappings
        )
        self._finalizer.atexit = False  # threads may still run then

    @property
    def size_bytes(self) -> int:
        """See PageWindow."""
        return self.num_indices * self.page_bytes

    @property
    def num_mappings(self) -> int:
        """What this window costs of vm.max_map_count: at least what the kernel needs for it."""
        return self._mappings[0]

    def page_at(self, index: int) -> int | None:
        """See PageWindow."""
        return self._book.page_at(index)

    def map(self, index: int, page: int, count: int = 1, *, writable: bool = True) -> None:
        """See PageWindow."""
        self.map_pages(index, range(page, page + count), writable=writable)

    def map_pages(self, index: int, pages: Sequence[int], *, writable: bool = True) -> None:
        """See PageWindow. Cost: one mmap a run of consecutive pages."""
        ops = self.plan_map(index, pages, writable=writable)
        self._apply_or_undo(ops, index, len(pages))

    def map_private(self, index: int, count: int = 1) -> None:
        """See PageWindow."""
        self._book.check_free(index, count)
        self._enter(index, np.full(count, PRIVATE, np.int64))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        self._apply_or_undo([self._op(index, count, _RW, flags, -1, 0)], index, count)

    def unmap(self, index: int, count: int = 1) -> None:
        """See PageWindow. Cost: one mmap."""
        self._book.check_mapped(index, count)
        self._enter(index, np.full(count, HOLE, np.int64), unmapping=True)
        self.apply([self._op(index, count, 0, _HOLE_FLAGS, -1, 0)])

    def plan_map(self, index: int, pages: Sequence[int], *, writable: bool = True) -> list[Op]:
        """See PageWindow."""
        self._book.check_free(index, len(pages))
        absent = next((page for page in pages if not self.source.is_present(page)), None)
        if absent is not None:
            raise BadMapping(f"page {absent} has no memory")
        self._enter(index, page_keys(pages, writable=writable))
        protection = _RW if writable else mmap.PROT_READ
        flags = mmap.MAP_SHARED | MAP_FIXED
        fd, start, size = self.source.fd, self.source.offset_bytes, self.page_bytes
        return [
            self._op(index + at, count, protection, flags, fd, start + page * size)
            for at, page, count in runs(pages)
        ]

    def plan_unmap(self, index: int, count: int = 1) -> list[Op]:
        """See PageWindow. A hole is address space without any access: a stray touch is a SIGSEGV."""
        self._book.check_pages(index, count)
        self._enter(index, np.full(count, HOLE, np.int64), unmapping=True)
        return [self._op(index, count, 0, _HOLE_FLAGS, -1, 0)]

    def apply(self, ops: Sequence[Op]) -> None:
        """See PageWindow."""
        for op in ops:
            at = libc.mmap(op.address, op.size_bytes, op.a, op.b, op.c, op.d)
            if at == FAILED:
                raise VmmError(f"mmap of {op.size_bytes} B: {os.strerror(ctypes.get_errno())}")

    def entry_points(self) -> dict[int, int]:
        """See PageWindow."""
        return {OP_MMAP: ctypes.cast(libc.mmap, ctypes.c_void_p).value or 0}

    def prepare_thread(self) -> None:
        """See PageWindow. Nothing to do."""

    def as_memoryview(
        self, offset_bytes: int = 0, size_bytes: int | None = None, owner: object = None
    ) -> memoryview:
        """The window's memory, writable, valid until close(); touching a hole kills the process."""
        size = self.size_bytes - offset_bytes if size_bytes is None else size_bytes
        if offset_bytes < 0 or size <= 0 or offset_bytes + size > self.size_bytes:
            raise BadMapping(f"{size} B at {offset_bytes} of {self.size_bytes}")
        kind: Any = type("WindowBytes", (ctypes.c_uint8 * size,), {})
        memory = kind.from_address(self.address + offset_bytes)
        memory.owners = self, owner  # they outlive their views
        return memoryview(memory).cast("B")

    span = as_memoryview

    def close(self) -> None:
        """See PageWindow."""
        self._finalizer()

    def _op(self, index: int, count: int, protection: int, flags: int, fd: int, offset: int) -> Op:
        size = self.page_bytes
        return Op(OP_MMAP, self.address + index * size, count * size, protection, flags, fd, offset)

    def _enter(self, index: int, keys: np.ndarray, *, unmapping: bool = False) -> None:
        delta = self._book.more_mappings(index, keys)
        self._budget.change(delta, unmapping=unmapping)
        self._mappings[0] += delta
        self._book.set(index, keys)

    def _apply_or_undo(self, ops: list[Op], index: int, count: int) -> None:
        try:
            self.apply(ops)
        except VmmError:
            self._enter(index, np.full(count, HOLE, np.int64), unmapping=True)
            self.apply([self._op(index, count, 0, _HOLE_FLAGS, -1, 0)])
            raise


def _sealed_memfd(size_bytes: int) -> int:
    fd = -1
    try:
        fd = os.memfd_create("quire-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        _close(fd)
        raise VmmError(f"a memfd of {size_bytes} B: {error}") from error
    return fd


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _give_back(address: int, size_bytes: int, budget: MapBudget, mappings: list[int]) -> None:
    libc.munmap(address, size_bytes)
    budget.change(-mappings[0])
