"""Far places as processes map them: read-only, at their own addresses, and nothing is left where something was."""

import ctypes
import os
import re
from pathlib import Path

import pytest

from shared.engine.far_tables import TableChange, runs
from shared.engine.far_window import HostFar, free_addresses, map_nothing, reserve_above
from shared.engine.far_window_cuda import ROOMS_A_PLACE, CudaFar, room_for_slabs
from shared.mempool.rank_memory import PageSlabs
from shared.vmm.errors import VmmError
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, READ_ONLY, FakeVmmDriver

PAGE = GRANULARITY_BYTES
NUM_OWN, NUM_PLACES = 3, 4
HOST_BYTES = 64 * PAGE


@pytest.fixture
def memory():
    """A memfd of eight pages, each full of its number + 1, of which only reading descriptors are given out."""
    fd = os.memfd_create("far-test")
    os.ftruncate(fd, 8 * PAGE)
    for page in range(8):
        os.pwrite(fd, bytes([page + 1]) * PAGE, page * PAGE)
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    yield reading
    os.close(fd)
    os.close(reading)


def permissions(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end, flags = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
        if int(begin, 16) <= address < int(end, 16):
            return flags
    return ""


def read(address: int) -> set[int]:
    return set(ctypes.string_at(address, PAGE))


def test_host_pages_are_mapped_read_only_and_their_places_hold_nothing_before_and_after(memory):
    base = free_addresses(NUM_PLACES * PAGE, PAGE)
    reserve_above(base, NUM_PLACES * PAGE, PAGE)
    far = HostFar(base, PAGE, NUM_PLACES)
    far.map([2, 0], [memory], [5 * PAGE, 1 * PAGE])
    assert read(base + 2 * PAGE) == {6}
    assert read(base) == {2}
    assert permissions(base) == "r--s"
    assert permissions(base + PAGE) == "---p"
    far.unmap([2, 0, 3])
    assert permissions(base + 2 * PAGE) == "---p"
    far.map([2], [memory], [7 * PAGE])
    far.map([2], [memory], [0])  # by the next mempool
    assert read(base + 2 * PAGE) == {1}
    with pytest.raises(ValueError, match="place 4"):
        far.map([4], [memory], [0])
    assert far.block_of(7) == 7


class Gpu:
    """A window of three own blocks and four far places over the fake driver."""

    def __init__(self, **options) -> None:
        self.driver = FakeVmmDriver()
        self.address = self.driver.reserve(
            (NUM_OWN + NUM_PLACES) * PAGE, free_addresses(HOST_BYTES * 2, PAGE)
        )
        self.far = CudaFar(
            self.driver, self.address, PAGE, NUM_OWN, NUM_PLACES, host_bytes=HOST_BYTES, **options
        )

    def block(self, block_id: int) -> int:
        return self.address + self.far.block_of(block_id) * PAGE

    def page(self, byte: int) -> int:
        """Descriptor of another GPU's page."""
        fd = self.driver.export_fd(self.driver.create(PAGE))
        os.pwrite(fd, bytes([byte]) * PAGE, 0)
        return fd


def test_another_gpus_page_is_imported_and_this_gpu_may_only_read_it():
    gpu = Gpu()
    fds = [gpu.page(8), gpu.page(9)]
    gpu.far.map([1, 3], fds, [])
    assert [gpu.far.block_of(NUM_OWN + place) for place in (1, 3)] == [NUM_OWN + 1, NUM_OWN + 3]
    assert read(gpu.block(NUM_OWN + 1)) == {8}
    assert read(gpu.block(NUM_OWN + 3)) == {9}
    assert {call[2] for call in gpu.driver.named("cuMemSetAccess")} == {READ_ONLY}
    assert len(gpu.driver.named("cuMemRelease")) == 2, "the mapping keeps it"
    gpu.far.unmap([1, 3])
    assert not gpu.driver.mapped


@pytest.mark.parametrize("reads_only", [True, False])
def test_host_pages_lie_a_whole_number_of_blocks_above_the_window(memory, reads_only):
    gpu = Gpu()
    gpu.driver.registers_read_only = reads_only
    gpu.far.map([0, 2], [memory], [4 * PAGE, 6 * PAGE])
    assert read(gpu.block(NUM_OWN)) == {5}
    assert read(gpu.block(NUM_OWN + 2)) == {7}
    assert permissions(gpu.block(NUM_OWN)) == ("r--s" if reads_only else "rw-s")
    assert gpu.block(NUM_OWN + 2) + PAGE <= gpu.far.end
    gpu.far.map([1], [memory], [4 * PAGE])  # the same page again
    gpu.far.unmap([0])
    assert read(gpu.block(NUM_OWN + 1)) == {5}
    gpu.far.close()
    assert not gpu.driver.registered
    assert permissions(gpu.far.end - HOST_BYTES + 4 * PAGE) == "---p"


def test_what_fails_half_way_leaves_nothing_mapped(memory):
    gpu = Gpu()
    gpu.driver.refuse_map_number = 2
    with pytest.raises(VmmError):
        gpu.far.map([0, 1], [gpu.page(1), gpu.page(2)], [])
    assert not gpu.driver.mapped
    with pytest.raises(ValueError, match="host memory at"):
        gpu.far.map([0, 1], [memory], [0, HOST_BYTES])
    assert not gpu.driver.registered


def test_without_addresses_for_host_memory_pages_of_gpus_still_serve(memory):
    def none(*_: int) -> int:
        raise OSError("none")

    gpu = Gpu(reserve=none)
    gpu.far.map([0], [gpu.page(3)], [])
    assert read(gpu.block(NUM_OWN)) == {3}
    with pytest.raises(ValueError, match="host memory at"):
        gpu.far.map([1], [memory], [0])


def test_addresses_are_taken_above_and_never_from_anybody():
    base = free_addresses(4 * PAGE, PAGE)
    first = reserve_above(base, 4 * PAGE, PAGE)
    second = reserve_above(base, 4 * PAGE, PAGE)
    assert first == base
    assert second >= first + 4 * PAGE
    assert (second - base) % PAGE == 0
    map_nothing(first, 4 * PAGE)


# -- pages that share slabs -----------------------------------------------------------------------------------


PIECE = PAGE // 4 * 3  # four of them are three of the driver's pages: no place of one can be mapped by itself
SLAB = 4 * PIECE
MEMORY = 77


class SlabGpu(Gpu):
    """A window of eight own blocks, behind a null block, in two slabs of four; and far places."""

    def __init__(self) -> None:
        self.driver = FakeVmmDriver()
        own = PAGE + 2 * SLAB
        size = own + room_for_slabs(NUM_PLACES, PIECE, SLAB)
        self.reserved = self.driver.reserve(size, free_addresses(HOST_BYTES * 2, PAGE))
        self.address = self.reserved + PAGE - PIECE
        self.far = CudaFar(
            self.driver, self.address, PIECE, 9, NUM_PLACES, host_bytes=HOST_BYTES, room_bytes=SLAB
        )
        self.reserved_end = self.reserved + size

    def slab(self, *numbers: int, slab_bytes: int = SLAB) -> int:
        """Descriptor of a slab whose pages are full of these."""
        fd = self.driver.export_fd(self.driver.create(slab_bytes))
        for nth, number in enumerate(numbers):
            os.pwrite(fd, bytes([number]) * PIECE, nth * PIECE)
        return fd

    def read(self, place: int) -> set[int]:
        at = self.address + self.far.block_of(9 + place) * PIECE
        assert self.reserved <= at <= self.reserved_end - PIECE, "reserved for nobody else"
        return set(ctypes.string_at(at, PIECE))


def slabs(*numbers: int, slab_bytes: int = SLAB, memory_id: int = MEMORY, life: int = 0) -> PageSlabs:
    return PageSlabs(memory_id, list(numbers), slab_bytes, life)


def test_pages_that_share_a_slab_are_read_in_it_and_it_is_mapped_once_while_one_of_them_is_read():
    gpu = SlabGpu()
    fds = [gpu.slab(1, 2, 3, 4), gpu.slab(5, 6, 7, 8)]
    gpu.far.map([0, 1, 2], fds, [PIECE, 3 * PIECE, 0], slabs(12, 30, 12))
    assert [gpu.read(place) for place in (0, 1, 2)] == [{2}, {8}, {1}]
    assert len(gpu.driver.mapped) == 2
    gpu.far.map([3], [gpu.slab(9)], [2 * PIECE], slabs(12))
    assert gpu.read(3) == {3}, "the slab that is mapped"
    assert {call[2] for call in gpu.driver.named("cuMemSetAccess")} == {READ_ONLY}
    gpu.far.unmap([0, 2])
    assert len(gpu.driver.mapped) == 2
    gpu.far.unmap([3])
    assert len(gpu.driver.mapped) == 1
    gpu.far.map([0], [gpu.slab(9)], [0], slabs(12, memory_id=MEMORY + 1))
    assert gpu.read(0) == {9}, "another memory's slab of the same number"
    gpu.far.map([3], [gpu.slab(7)], [0], slabs(12, memory_id=MEMORY + 1, life=1))
    assert gpu.read(3) == {7}, (
        "the next mempool's, which may have made it anew while the old one is still mapped"
    )
    gpu.far.close()
    assert not gpu.driver.mapped
    assert gpu.far.block_of(9) == 9


def test_a_lenders_slabs_may_be_larger_and_find_room_as_long_as_there_is_some():
    gpu = SlabGpu()
    half = NUM_PLACES * ROOMS_A_PLACE // 2 * SLAB  # of all rooms
    fds = [gpu.slab(1, slab_bytes=half), gpu.slab(2, slab_bytes=half)]
    gpu.far.map([0, 1], fds, [0, 0], slabs(1, 2, slab_bytes=half))
    with pytest.raises(ValueError, match="no addresses"):
        gpu.far.map([2], [gpu.slab(3)], [0], slabs(3))
    assert [gpu.read(0), gpu.read(1)] == [{1}, {2}]
    gpu.far.unmap([0])
    gpu.far.map([2, 3], [gpu.slab(3), gpu.slab(4)], [0, 0], slabs(3, 4))
    assert [gpu.read(place) for place in (1, 2, 3)] == [{2}, {3}, {4}]


@pytest.mark.parametrize(
    ("offsets", "wanted", "reason"),
    [
        ([4 * PIECE], slabs(1), "a page at"),
        ([PIECE // 2], slabs(1), "a page at"),
        ([0], slabs(1, slab_bytes=SLAB + PIECE), "a slab of"),
        ([0], slabs(1, 1), "descriptors"),
        ([], slabs(1), "descriptors"),
    ],
)
def test_what_is_no_page_of_a_slab_is_refused_with_nothing_mapped(offsets, wanted, reason):
    gpu = SlabGpu()
    with pytest.raises(ValueError, match=reason):
        gpu.far.map([0], [gpu.slab(1)], offsets, wanted)
    assert not gpu.driver.mapped
    assert gpu.far.block_of(9) == 9


def test_a_driver_that_refuses_the_second_slab_leaves_the_first_one_unmapped():
    gpu = SlabGpu()
    gpu.driver.refuse_map_number = 2
    with pytest.raises(VmmError):
        gpu.far.map([0, 1], [gpu.slab(1), gpu.slab(2)], [0, 0], slabs(1, 2))
    assert not gpu.driver.mapped


def test_changes_of_a_table_are_as_few_as_they_can_be():
    assert runs("a", {4: 9, 3: 8, 7: 1}) == [TableChange("a", 3, [8, 9]), TableChange("a", 7, [1])]
