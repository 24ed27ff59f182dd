"""What host memory and GPU memory have in common: pages (`PageSource`) and address space over them (`PageWindow`).

A page is the unit of physical memory that is mapped, lent and given back: `page_bytes`, a multiple of the medium's
granularity. It holds one block, or several where one would waste it (geometry.py); the mempool calls such a page a
slab. Implementations: memfd_pages.py and cuda_pages.py; tests/conformance/test_vmm_windows.py holds both to this.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Op(NamedTuple):
    """One call to the kernel or the driver, as plain integers: what plan_*() returns and apply() executes."""

    code: int
    address: int
    size_bytes: int
    a: int = 0  # OP_MMAP: protection; OP_CUDA_MAP: handle; OP_CUDA_ACCESS: address of the access descriptor
    b: int = 0  # OP_MMAP: flags
    c: int = 0  # OP_MMAP: descriptor
    d: int = 0  # OP_MMAP: offset in bytes


OP_MMAP = 1
OP_CUDA_MAP = 2
OP_CUDA_ACCESS = 3
OP_CUDA_UNMAP = 4
OP_PAUSE = (
    5  # address: microseconds; of mappers only (mapper.py), so that whoever launches kernels goes first
)


class PageSource(Protocol):
    """Pages 0 .. num_pages - 1. Each is present (has memory) or absent. Not for concurrent use."""

    num_pages: int
    page_bytes: int

    def is_present(self, page: int) -> bool:
        """Whether the page may be mapped."""
        ...

    def acquire(self, page: int, count: int = 1) -> None:
        """Make absent pages present again, with undefined contents; present ones stay as they are.

        Raises: OutOfPages when there is no memory (pages before the failing one stay acquired); VmmError.
        """
        ...

    def release(self, page: int, count: int = 1) -> None:
        """Give the memory of these pages back to the system. Their bytes are lost, absent ones stay absent.

        The caller has unmapped them everywhere: on a GPU, memory that is still mapped somewhere comes back only
        with the last mapping; host memory goes at once, and whoever maps it reads zeros.
        Raises: VmmError.
        """
        ...

    def resident_bytes(self) -> int:
        """Physical memory that the pages take now."""
        ...

    def export_fd(self, page: int) -> int:
        """A descriptor that keeps the page alive and that another process can import, the caller's to close.

        Host memory: of the file that holds all pages, page p at offset_bytes + p * page_bytes.
        Raises: BadMapping when absent; VmmError.
        """
        ...

    def window(self, num_indices: int) -> "PageWindow":
        """Address space for `num_indices` pages of this source; it keeps the source alive, not the reverse."""
        ...

    def close(self) -> None:
        """Let go of all pages. Windows keep what they map."""
        ...


class PageWindow(Protocol):
    """`num_indices` consecutive places of page_bytes at a fixed address, each a hole or mapped. Holes fault.

    map(), map_pages(), map_private() and unmap() do everything at once; plan_*() changes only the books and returns
    the calls, for the background mapper. All calls come from one thread; executing ops may be another's, in order.
    """

    num_indices: int
    page_bytes: int
    address: int

    @property
    def size_bytes(self) -> int:
        """num_indices * page_bytes, most of it perhaps holes."""
        ...

    def page_at(self, index: int) -> int | None:
        """The page mapped there; None for a hole or private memory."""
        ...

    def map(self, index: int, page: int, count: int = 1, *, writable: bool = True) -> None:
        """Pages page .. page + count - 1 at index .. index + count - 1. One page may be mapped at many indices.

        Raises: BadMapping, TooManyMappings, VmmError; nothing is changed then.
        Cost: host: one mmap for all. GPU: one map call a page and one for access to all, about 25 us a page.
        """
        ...

    def map_pages(self, index: int, pages: Sequence[int], *, writable: bool = True) -> None:
        """As map(), for pages in any order at consecutive indices: in as few calls as the medium allows."""
        ...

    def map_private(self, index: int, count: int = 1) -> None:
        """Fresh zeroed memory of this window alone (the null page). Lives until unmap() or close()."""
        ...

    def unmap(self, index: int, count: int = 1) -> None:
        """Make holes; all of the range is mapped now. Raises: BadMapping, TooManyMappings, VmmError."""
        ...

    def plan_map(self, index: int, pages: Sequence[int], *, writable: bool = True) -> list[Op]:
        """The calls of map_pages(), not yet made. Raises: BadMapping, TooManyMappings."""
        ...

    def plan_unmap(self, index: int, count: int = 1) -> list[Op]:
        """The calls of unmap(), not yet made. Not for private memory. Raises: BadMapping, TooManyMappings."""
        ...

    def apply(self, ops: Sequence[Op]) -> None:
        """Make the calls, in order. Raises: VmmError at the first that is refused."""
        ...

    def entry_points(self) -> dict[int, int]:
        """Addresses of the C functions behind each op code; empty when there are none to call directly."""
        ...

    def prepare_thread(self) -> None:
        """Call once in each thread that executes ops, before the first (a GPU's context is per thread)."""
        ...

    def span(self, offset_bytes: int = 0, size_bytes: int | None = None, owner: object = None) -> object:
        """The memory as torch takes it without a copy: a memoryview on the host, an object with
        __cuda_array_interface__ on a GPU. Valid until close(). torch looks at the first byte's mapping: map it first.

        Args: owner: of what is mapped there: lives as long as the window does for this, as any tensor made of it.
        """
        ...

    def close(self) -> None:
        """Unmap everything and give the addresses back; nothing may touch the window any more. Idempotent."""
        ...


def map_identity(window: PageWindow, num_pages: int) -> None:
    """Index 0 a private null page, page p at index p + 1, mapped once and for good (vLLM's block id = page id + 1).

    Raises: BadMapping unless the window is empty and has num_pages + 1 places; VmmError.
    Cost: host: two calls. GPU: one call a page and two for access: 16,384 pages of 2 MiB in about 0.4 s.
    """
    window.map_private(0)
    window.map(1, 0, num_pages)
