"""Far places on a GPU (far_window.py): another GPU's pages behind the window's own, host memory further up.

A page on a GPU is an allocation: its descriptor is imported, mapped at its place, and this GPU alone may read it; its
bytes stay where they are, SMs read them over the link. Where pages share an allocation, that is mapped further up
(far_slabs_cuda.py). Host memory cannot be mapped at addresses of the driver: it is
mapped where this process has addresses, a multiple of the page size above the window, and registered, which lets the
GPU read it under the same address. Block ids of both are others than the engine's, and block_of() says which.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence

from shared.engine.far_slabs_cuda import FarSlabs
from shared.engine.far_window import map_nothing, map_shared, reserve_above
from shared.errors import ClusterError
from shared.mempool.rank_memory import PageSlabs
from shared.vmm.cuda_driver import VmmDriver

MAX_HOST_BYTES = 1 << 40  # of the host memory that can be mapped: addresses only
ROOMS_A_PLACE = 4  # for slabs, each as large as the engine's own: a lender with more pages has larger ones
LESS_HOST_BYTES = (1 << 38, 1 << 36, 1 << 34)  # where there are not so many

logger = logging.getLogger(__name__)


class CudaFar:
    """Of one rank.

    Args:
        address: of block 0. first: block id of the first place. host_bytes: of the host memory that can be mapped.
        room_bytes: of reserved rooms for slabs behind the places (room_for_slabs); 0: there are none.
        reserve: where addresses of host memory come from (reserve_above).
    `end`: where the last block may end.
    Cost: 0.1 ms a page on a GPU, about 1 ms a page in host memory.
    """

    def __init__(
        self,
        driver: VmmDriver,
        address: int,
        page_bytes: int,
        first: int,
        num_places: int,
        *,
        host_bytes: int = MAX_HOST_BYTES,
        room_bytes: int = 0,
        reserve: Callable[[int, int, int], int] = reserve_above,
    ) -> None:
        self._driver, self._address, self._page_bytes = driver, address, page_bytes
        self._first, self._num_places = first, num_places
        self._on_gpu: set[int] = set()
        self._in_host: dict[int, int] = {}  # place -> offset of its page in host memory
        self._users: dict[int, int] = {}  # places by offset
        self._in_slab: dict[int, int] = {}  # place -> address of its page
        self._is_read_only = True  # what is registered, as long as the driver can do that
        behind = address + (first + num_places) * page_bytes
        if room_bytes:
            behind = address + first * page_bytes + _rooms_begin(num_places, page_bytes, room_bytes)
        num_rooms = num_places * ROOMS_A_PLACE
        self._slabs = FarSlabs(driver, behind, room_bytes, num_rooms) if room_bytes else None
        self.end = self._host = behind + num_rooms * room_bytes
        self._host_bytes = 0
        for size in (host_bytes, *(less for less in LESS_HOST_BYTES if less < host_bytes)):
            with contextlib.suppress(OSError):
                self._host = reserve(self.end, size, page_bytes)
                self._host_bytes, self.end = size, self._host + size
                break
        else:  # blocks go to other GPUs only
            logger.error("host memory cannot be mapped at far places: no addresses above %#x", address)

    def map(
        self,
        places: Sequence[int],
        fds: Sequence[int],
        offsets: Sequence[int],
        slabs: PageSlabs | None = None,
    ) -> None:
        """See FarUser. What an earlier mempool had mapped there gives way."""
        if any(not 0 <= place < self._num_places for place in places):
            raise ValueError(f"places {list(places)} of {self._num_places}")
        num_fds = len(set(slabs.numbers)) if slabs else 1 if offsets else len(places)
        wrong = bool(slabs) and len(slabs.numbers) != len(offsets)
        if wrong or len(fds) != num_fds or len(offsets) not in (0, len(places)):
            raise ValueError(f"{len(fds)} descriptors and {len(offsets)} offsets for {len(places)} places")
        self._driver.make_current()
        self.unmap(places)
        try:
            if slabs:
                self._map_slabs(places, fds, offsets, slabs)
            elif offsets:
                for place, offset in zip(places, offsets, strict=True):
                    self._map_host(place, fds[0], offset)
            else:
                for place, fd in zip(places, fds, strict=True):
                    self._map_page(place, fd)
        except (ClusterError, OSError, ValueError):
            self.unmap(places)
            raise

    def _map_slabs(
        self, places: Sequence[int], fds: Sequence[int], offsets: Sequence[int], slabs: PageSlabs
    ) -> None:
        if self._slabs is None:
            raise ValueError("no addresses for slabs")
        fd_of = dict(zip(dict.fromkeys(slabs.numbers), fds, strict=True))
        for place, offset, number in zip(places, offsets, slabs.numbers, strict=True):
            if offset % self._page_bytes or not 0 <= offset <= slabs.slab_bytes - self._page_bytes:
                raise ValueError(f"a page at {offset} of a slab of {slabs.slab_bytes} bytes")
            key = slabs.life, slabs.memory_id, number
            at = self._slabs.use(place, key, slabs.slab_bytes, lambda number=number: fd_of[number])
            self._in_slab[place] = at + offset

    def _map_page(self, place: int, fd: int) -> None:
        handle = self._driver.import_fd(fd)
        try:
            self._driver.map(self._at(place), self._page_bytes, handle)
        finally:
            self._driver.release(handle)  # the mapping keeps the memory
        self._on_gpu.add(place)
        self._driver.set_access(self._at(place), self._page_bytes, self._driver.access_address(False))

    def _map_host(self, place: int, fd: int, offset: int) -> None:
        if offset % self._page_bytes or not 0 <= offset <= self._host_bytes - self._page_bytes:
            raise ValueError(f"a page of host memory at {offset}")
        if offset not in self._users:
            self._register(fd, offset)
        self._in_host[place] = offset
        self._users[offset] = self._users.get(offset, 0) + 1

    def _register(self, fd: int, offset: int) -> None:
        at, size = self._host + offset, self._page_bytes
        if self._is_read_only:
            map_shared(at, size, fd, offset)
            try:
                self._driver.register_host(at, size, writable=False)
                return
            except ClusterError as error:
                logger.warning("host memory is registered writable, though nobody writes there: %s", error)
                self._is_read_only = False
        mine = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            map_shared(at, size, mine, offset, writable=True)
        finally:
            os.close(mine)
        try:
            self._driver.register_host(at, size, writable=True)
        except ClusterError:
            map_nothing(at, size)
            raise

    def unmap(self, places: Sequence[int]) -> None:
        """See FarUser."""
        self._driver.make_current()
        for place in self._on_gpu.intersection(places):
            self._driver.unmap(self._at(place), self._page_bytes)
            self._on_gpu.discard(place)
        if self._slabs is not None:
            self._slabs.leave(places)
        for place in places:
            self._in_slab.pop(place, None)
        for place in [place for place in places if place in self._in_host]:
            offset = self._in_host.pop(place)
            self._users[offset] -= 1
            if not self._users[offset]:
                del self._users[offset]
                self._driver.unregister_host(self._host + offset)
                map_nothing(self._host + offset, self._page_bytes)

    def block_of(self, block_id: int) -> int:
        """See FarPlaces. A block in host memory, or in a slab, is there as long as it is mapped."""
        place = block_id - self._first
        if (at := self._in_slab.get(place)) is None:
            if (offset := self._in_host.get(place)) is None:
                return block_id
            at = self._host + offset
        return (at - self._address) // self._page_bytes

    def close(self) -> None:
        """Nothing is mapped any more; no step reads anything."""
        with contextlib.suppress(ClusterError):
            self.unmap(range(self._num_places))

    def _at(self, place: int) -> int:
        return self._address + (self._first + place) * self._page_bytes


def room_for_slabs(num_places: int, page_bytes: int, slab_bytes: int) -> int:
    """Bytes of addresses that far places and their rooms of slab_bytes take, behind an engine's own slabs of that."""
    return _rooms_begin(num_places, page_bytes, slab_bytes) + num_places * ROOMS_A_PLACE * slab_bytes


def _rooms_begin(num_places: int, page_bytes: int, slab_bytes: int) -> int:
    """Behind the first place: whole slabs, so that rooms begin where the driver can map and blocks can lie."""
    return -(-num_places * page_bytes // slab_bytes) * slab_bytes
