"""Far places in a window (page_window.py): single pages from elsewhere, mapped read-only behind the engine's own.

In host memory a place that maps nothing cannot be touched at all: a step that reads what was unmapped ends the engine
instead of computing with other bytes.
"""

import errno
import mmap
from collections.abc import Sequence
from typing import Protocol

from shared.mempool.rank_memory import FarUser, PageSlabs
from shared.vmm.host_calls import MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_NORESERVE, libc, map_memory

_PROT_NONE = 0
_STEP_BYTES = 4 << 30  # from one try for free addresses to the next
_LOW_ADDRESS = 1 << 40  # above what drivers and libraries take
_END_OF_ADDRESSES = 0x7FFF_FFFF_F000  # of a process


class FarPlaces(FarUser, Protocol):
    """Where a step finds them."""

    def block_of(self, block_id: int) -> int:
        """The block of the cache's tensor in which an engine's block id lies."""
        ...


class HostFar:
    """`num_places` places of `page_bytes` from `address` on, in a mapping of the caller's that lives as long.

    Cost: 3 us a place.
    """

    def __init__(self, address: int, page_bytes: int, num_places: int) -> None:
        self._address, self._page_bytes, self._num_places = address, page_bytes, num_places
        self._mapped: set[int] = set()
        _map(address, num_places * page_bytes, _PROT_NONE)

    def map(
        self,
        places: Sequence[int],
        fds: Sequence[int],
        offsets: Sequence[int],
        slabs: PageSlabs | None = None,
    ) -> None:
        """See FarUser. What an earlier mempool had mapped there gives way."""
        if slabs is not None or len(fds) != 1 or len(offsets) != len(places):
            raise ValueError(f"{len(fds)} descriptors and {len(offsets)} offsets for places {list(places)}")
        self.unmap(places)
        try:
            for place, offset in zip(places, offsets, strict=True):
                _map(self._at(place), self._page_bytes, mmap.PROT_READ, fds[0], offset)
                self._mapped.add(place)
        except OSError:
            self.unmap(places)
            raise

    def unmap(self, places: Sequence[int]) -> None:
        """See FarUser."""
        for place in self._mapped.intersection(places):
            _map(self._at(place), self._page_bytes, _PROT_NONE)
            self._mapped.discard(place)

    def block_of(self, block_id: int) -> int:
        """Each in its own place."""
        return block_id

    def _at(self, place: int) -> int:
        if not 0 <= place < self._num_places:
            raise ValueError(f"place {place} of {self._num_places}")
        return self._address + place * self._page_bytes


def reserve_above(address: int, num_bytes: int, multiple: int) -> int:
    """Addresses of this process that nobody uses and nothing is mapped at: the lowest that were tried from `address`
    on, a multiple of `multiple` away from it. Raises: OSError when there are none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
    at = address
    step = -(-_STEP_BYTES // multiple) * multiple
    while at + num_bytes < _END_OF_ADDRESSES:
        if libc.mmap(at, num_bytes, _PROT_NONE, flags, -1, 0) == at:
            return at
        at += step
    raise OSError(errno.ENOMEM, f"no {num_bytes} bytes of addresses above {address:#x}")


def free_addresses(num_bytes: int, multiple: int) -> int:
    """Where so many are free now, with room above them; 0: nowhere. Nothing is reserved."""
    try:
        at = reserve_above(-(-_LOW_ADDRESS // multiple) * multiple, num_bytes, multiple)
    except OSError:
        return 0
    libc.munmap(at, num_bytes)
    return at


def map_shared(address: int, num_bytes: int, fd: int, offset: int, *, writable: bool = False) -> None:
    """Over whatever was there. Raises: OSError."""
    _map(address, num_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), fd, offset)


def map_nothing(address: int, num_bytes: int) -> None:
    """Over whatever was there; the addresses stay this process's. Raises: OSError."""
    _map(address, num_bytes, _PROT_NONE)


def _map(address: int, num_bytes: int, protection: int, fd: int = -1, offset: int = 0) -> None:
    """Over whatever was there; without a descriptor, nothing. Raises: OSError."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    map_memory(address, num_bytes, protection, flags | MAP_FIXED, fd, offset)
