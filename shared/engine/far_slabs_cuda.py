"""Slabs of other GPUs of which far places (far_window_cuda.py) read a page each: mapped whole, once, for as long.

An allocation can only be mapped as a whole, so a page that shares one cannot be mapped at its place: its block lies in
the slab, wherever that is mapped, and block_of() says where. The slab's other pages are not named by any block table.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shared.vmm.cuda_driver import VmmDriver

Key = tuple[int, int, int]  # the mempool's life, memory's id, slab


class _Mapped(NamedTuple):
    address: int
    size_bytes: int
    room: int  # first place of its addresses
    places: set[int]  # that read a page of it


class FarSlabs:
    """Of one rank.

    Args: address: of `num_rooms` reserved rooms of room_bytes each, a whole number of blocks behind block 0 and of the
    driver's granularities. A slab takes as many rooms as it needs, one behind the other.
    Cost: 0.1 ms a slab.
    """

    def __init__(self, driver: VmmDriver, address: int, room_bytes: int, num_rooms: int) -> None:
        self._driver, self._address, self._room_bytes = driver, address, room_bytes
        self._taken = bytearray(num_rooms)
        self._mapped: dict[Key, _Mapped] = {}
        self._slab_of: dict[int, Key] = {}  # by place

    def use(self, place: int, key: Key, size_bytes: int, fd: Callable[[], int]) -> int:
        """Where the slab is mapped, for this place too, which uses none. `fd`: asked when it is not mapped yet.

        Raises: ValueError when a slab of another size was meant or there is no room; VmmError when the driver refuses.
        """
        mapped = self._mapped.get(key)
        if mapped is None:
            mapped = self._mapped[key] = self._map(size_bytes, fd())
        elif mapped.size_bytes != size_bytes:
            raise ValueError(f"slab {key} has {mapped.size_bytes} bytes, not {size_bytes}")
        mapped.places.add(place)
        self._slab_of[place] = key
        return mapped.address

    def _map(self, size_bytes: int, fd: int) -> _Mapped:
        granularity = self._driver.granularity_bytes
        if size_bytes <= 0 or size_bytes % granularity:
            raise ValueError(f"a slab of {size_bytes} bytes")
        room = self._taken.find(bytes(self._rooms_of(size_bytes)))
        if room < 0:
            raise ValueError(f"no addresses for another slab of {size_bytes} bytes")
        at = self._address + room * self._room_bytes
        handle = self._driver.import_fd(fd)
        try:
            self._driver.map(at, size_bytes, handle)
        finally:
            self._driver.release(handle)  # the mapping keeps the memory
        try:
            self._driver.set_access(at, size_bytes, self._driver.access_address(False))
        except BaseException:
            self._driver.unmap(at, size_bytes)
            raise
        self._mark(room, size_bytes, taken=True)
        return _Mapped(at, size_bytes, room, set())

    def leave(self, places: Sequence[int]) -> None:
        """These read nothing of a slab any more; one that nobody reads is unmapped. Others are left out."""
        for place in places:
            key = self._slab_of.pop(place, None)
            if key is None:
                continue
            mapped = self._mapped[key]
            mapped.places.discard(place)
            if not mapped.places:
                del self._mapped[key]
                self._driver.unmap(mapped.address, mapped.size_bytes)
                self._mark(mapped.room, mapped.size_bytes, taken=False)

    def _mark(self, room: int, size_bytes: int, *, taken: bool) -> None:
        count = self._rooms_of(size_bytes)
        self._taken[room : room + count] = bytes([taken]) * count

    def _rooms_of(self, size_bytes: int) -> int:
        return -(-size_bytes // self._room_bytes)
