"""Where the pages of a space are, as add_space() is told; and host memory as this process maps it.

A host space lies in one memfd, its ranks are ranges of it. On GPUs every rank has allocations ("slabs") of its own,
which lie side by side in one reserved range here (mover_gpu.py).
"""

import mmap
import os
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shared.transfer.errors import PathUnavailable
from shared.vmm.huge_pages import map_congruent, unmap

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class HostRegion:
    """One rank's pages in a memfd: page p at offset_bytes + p * page_bytes. The descriptor stays the caller's, and
    is needed until the space is mapped."""

    fd: int
    offset_bytes: int
    page_bytes: int
    num_pages: int


class Slabs(Protocol):
    """DeviceSlabs and KeptSlabs of slabs.py."""

    def export(self, slab: int) -> int:
        """A descriptor of one slab, the caller's to close. Raises: ResourceError, OSError."""
        ...

    def is_present(self, slab: int) -> bool:
        """Whether it has memory."""
        ...


@dataclass(frozen=True, slots=True)
class SlabRegion:
    """One rank's pages on a GPU ("cuda:" and its UUID in hex): page p is in slab p // pages_per_slab.

    The slabs stay the caller's; closing them before the space is mapped makes it unusable.
    """

    device: str
    slabs: Slabs
    page_bytes: int
    num_pages: int
    pages_per_slab: int
    slabs_per_page: int = 1  # more where parts of a page are mapped apart

    @property
    def slab_bytes(self) -> int:
        """Of one allocation."""
        return self.page_bytes * self.pages_per_slab // self.slabs_per_page


RankRegion: TypeAlias = HostRegion | SlabRegion


def region_name(space: int, rank: int) -> str:
    """Of Region.name: unique in this mempool."""
    return f"{space}.{rank}"


def space_and_rank(name: str) -> tuple[int, int]:
    """Of region_name()."""
    space, _, rank = name.partition(".")
    return int(space), int(rank)


class HostMapping:
    """One rank's pages in this process, until close(). Whole pages of the kernel's are mapped: `base`, `num_bytes`.

    Cost: address space only; memory is touched as pages are copied. Raises: PathUnavailable.
    """

    def __init__(self, where: HostRegion) -> None:
        begin = where.offset_bytes - where.offset_bytes % mmap.ALLOCATIONGRANULARITY
        end = where.offset_bytes + where.page_bytes * where.num_pages
        try:
            size = os.fstat(where.fd).st_size
            if size < end:
                raise PathUnavailable(f"{size} bytes of memory, the pages end at {end}")
            self.base = map_congruent(where.fd, begin, end - begin)
        except OSError as error:
            raise PathUnavailable(f"a memfd cannot be mapped: {error}") from error
        self.num_bytes = end - begin
        self.address = self.base + where.offset_bytes - begin

    def close(self) -> None:
        """Unmap; nothing may be copying any more."""
        unmap(self.base, self.num_bytes)
        self.num_bytes = 0
