"""Where the pages of a space are, and this process's mappings of them: made once, in the background, before any copy.

A host space lies in one memfd; its ranks are ranges of it. On GPUs every rank has allocations ("slabs") of its own,
which lie side by side in one reserved range here (mover_gpu.py). Nothing here imports CUDA.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from shared.transfer.errors import PathUnavailable
from shared.transfer.interface import Region, RegionKind
from shared.transfer.reslice import KvEnd

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

    @property
    def slab_bytes(self) -> int:
        """Of one allocation."""
        return self.page_bytes * self.pages_per_slab


RankRegion: TypeAlias = HostRegion | SlabRegion


@dataclass(slots=True)
class MappedRegion:
    """One rank's pages, mapped here until close(). `readers`: GPUs whose copy engines may read it (all, of host
    memory)."""

    region: Region
    close: Callable[[], None]
    readers: set[str] = field(default_factory=set)


@dataclass(slots=True)
class MappedSpace:
    """All ranks of one space. `end`: how its engine cuts a block over its ranks; None: never between unequal ends."""

    number: int
    ranks: list[MappedRegion]
    end: KvEnd | None = None

    def close(self) -> None:
        """Unmap; nothing may be copying any more."""
        for rank in self.ranks:
            rank.close()


def region_name(space: int, rank: int) -> str:
    """Of Region.name: unique in this mempool."""
    return f"{space}.{rank}"


def space_and_rank(name: str) -> tuple[int, int]:
    """Of region_name()."""
    space, _, rank = name.partition(".")
    return int(space), int(rank)


def map_host(space: int, rank: int, where: HostRegion) -> MappedRegion:
    """Cost: address space only; memory is touched as pages are copied. Raises: PathUnavailable."""
    length = where.page_bytes * where.num_pages
    begin = where.offset_bytes - where.offset_bytes % mmap.ALLOCATIONGRANULARITY
    end = where.offset_bytes + length
    try:
        size = os.fstat(where.fd).st_size
        if size < end:
            raise PathUnavailable(
                f"space {space}, rank {rank}: {size} bytes of memory, its pages end at {end}"
            )
        mapping = mmap.mmap(where.fd, end - begin, offset=begin)
    except (OSError, ValueError) as error:
        raise PathUnavailable(f"space {space}, rank {rank} cannot be mapped: {error}") from error
    base = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    region = Region(
        name=region_name(space, rank),
        kind=RegionKind.HOST,
        address=base + where.offset_bytes - begin,
        page_bytes=where.page_bytes,
        num_pages=where.num_pages,
        memory_key=f"space {space}.{rank}",
    )
    return MappedRegion(region, mapping.close)
