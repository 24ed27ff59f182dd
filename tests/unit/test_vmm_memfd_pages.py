"""What is special about host memory: one memfd, seals, runs as single mappings, the limit on mappings."""

import fcntl
import os

import pytest

from shared.vmm.errors import BadMapping, TooManyMappings
from shared.vmm.interface import OP_MMAP, map_identity
from shared.vmm.map_budget import MapBudget, process_budget
from shared.vmm.memfd_pages import MemfdPages, MemfdWindow

PAGE = 4096


def mappings_in(window):
    """Lines of /proc/self/maps inside the window."""
    found = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found += start < window.address + window.size_bytes and end > window.address
    return found


def test_a_new_memfd_can_neither_shrink_nor_grow():
    pages = MemfdPages(4, PAGE)
    for size in (PAGE, 8 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(pages.fd, size)
    pages.close()


def test_an_adopted_memfd_must_be_sealed_and_large_enough():
    soft = os.memfd_create("soft", os.MFD_ALLOW_SEALING)
    os.ftruncate(soft, 4 * PAGE)
    with pytest.raises(BadMapping, match="sealed"):
        MemfdPages(4, PAGE, fd=os.dup(soft))
    fcntl.fcntl(soft, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(BadMapping, match="too small"):
        MemfdPages(4, PAGE, fd=os.dup(soft), offset_bytes=PAGE)
    with open(__file__, "rb") as file, pytest.raises(BadMapping, match="no memfd"):
        MemfdPages(1, PAGE, fd=os.dup(file.fileno()))
    os.close(soft)


def test_a_ranks_pages_are_a_part_of_an_adopted_memfd():
    whole = MemfdPages(8, PAGE)
    rank = MemfdPages(4, PAGE, fd=whole.export_fd(0), offset_bytes=4 * PAGE)
    all_pages, window = whole.window(8), rank.window(4)
    all_pages.map(0, 0, 8)
    window.map(0, 0, 4)
    window.as_memoryview()[: 2 * PAGE] = b"r" * (2 * PAGE)
    all_pages.as_memoryview()[:PAGE] = b"w" * PAGE
    assert bytes(all_pages.as_memoryview(4 * PAGE, 3)) == b"rrr"
    assert (rank.resident_bytes(), whole.resident_bytes()) == (2 * PAGE, 3 * PAGE)
    rank.release(1)
    assert (rank.resident_bytes(), whole.resident_bytes()) == (PAGE, 2 * PAGE)
    for one in (window, all_pages, rank, whole):
        one.close()


def test_reserved_pages_have_their_memory_at_once():
    pages = MemfdPages(4, PAGE, reserve=True)
    assert pages.resident_bytes() == 4 * PAGE
    pages.release(0, 4)
    assert pages.resident_bytes() == 0
    pages.acquire(1, 2)
    assert pages.resident_bytes() == 2 * PAGE
    pages.close()


def test_the_identity_window_is_two_mappings():
    pages = MemfdPages(1000, PAGE)
    window = pages.window(1001)
    map_identity(window, 1000)
    assert window.num_mappings == mappings_in(window) == 2
    assert len(window.plan_unmap(1, 1000)) == 1
    window.close()
    pages.close()


def test_a_run_is_one_call_and_neighbours_merge_in_the_kernel():
    pages = MemfdPages(10, PAGE)
    window = pages.window(10)
    ops = window.plan_map(0, [4, 5, 6, 1, 2])
    assert [(op.code, op.size_bytes) for op in ops] == [(OP_MMAP, 3 * PAGE), (OP_MMAP, 2 * PAGE)]
    window.apply(ops)
    window.map(5, 3)
    assert window.num_mappings == mappings_in(window) == 3  # two runs and the holes behind them
    window.close()
    pages.close()


def test_the_count_of_mappings_is_never_below_the_kernels():
    pages = MemfdPages(8, PAGE)
    window = pages.window(12)
    steps = [
        lambda: window.map(0, 0, 8),
        lambda: window.unmap(2, 2),
        lambda: window.map(2, 2, writable=False),
        lambda: window.map(9, 7),
        lambda: window.map_private(8),
        lambda: window.unmap(7, 3),
        lambda: window.unmap(0, 3),
    ]
    for step in steps:
        step()
        assert mappings_in(window) <= window.num_mappings <= mappings_in(window) + 1
    window.close()
    pages.close()


def test_maps_are_refused_well_before_the_kernel_would_and_change_nothing():
    pages = MemfdPages(100, PAGE)
    budget = MapBudget(40)
    window = MemfdWindow(pages, 100, budget)
    with pytest.raises(TooManyMappings, match="max_map_count"):
        window.map_pages(0, list(range(99, -1, -1)))  # 100 runs
    assert window.page_at(0) is None
    assert budget.used == 1
    window.map(0, 0, 100)
    for i in range(1, 39, 2):
        window.unmap(i)
    assert budget.used == 39
    for i in (41, 43, 45):
        window.unmap(i)
    with pytest.raises(TooManyMappings):
        window.unmap(47)
    assert budget.used == 45 == mappings_in(window)
    window.close()
    assert budget.used == 0
    pages.close()


def test_the_processes_budget_leaves_the_kernel_room():
    with open("/proc/sys/vm/max_map_count") as file:
        assert process_budget().limit * 9 // 8 < int(file.read())


def test_a_view_keeps_its_window():
    pages = MemfdPages(2, PAGE)
    window = pages.window(2)
    window.map(0, 0, 2)
    view = window.as_memoryview()
    del window
    view[0] = 1
    assert view[0] == 1
    pages.close()
