"""Memory of a memfd becomes huge pages where it is mapped, with what is in it, and stays as it is where it cannot."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.vmm import huge_pages
from shared.vmm.huge_pages import huge_page_bytes, make_huge, map_congruent, unmap
from tests.support.huge import HUGE, needs_huge

SIZE = 5 * HUGE
PAGE = mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("test-huge")
    os.ftruncate(found, SIZE)
    yield found
    os.close(found)


def lines_of(address: int) -> list[str]:
    """What /proc/self/smaps says of the mapping that begins there."""
    found, is_mine = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_mine = int(line.split("-")[0], 16) == address
        if is_mine:
            found.append(line)
    return found


def huge_bytes_at(address: int) -> int:
    return sum(1024 * int(line.split()[1]) for line in lines_of(address) if line.startswith("ShmemPmdMapped"))


@needs_huge
def test_memory_that_nobody_has_used_and_memory_that_is_full_become_huge_with_what_is_in_them(fd):
    os.pwrite(fd, b"before" * 1000, HUGE + 100)
    address = map_congruent(fd, 0, SIZE)
    try:
        assert huge_bytes_at(address) == 0
        assert make_huge(address, SIZE) == SIZE
        assert huge_bytes_at(address) == SIZE
        assert os.pread(fd, 6000, HUGE + 100) == b"before" * 1000
        assert os.pread(fd, 100, HUGE) == bytes(100)
        ctypes.memmove(address + 3 * HUGE, b"behind", 6)
        assert os.pread(fd, 6, 3 * HUGE) == b"behind"
        assert make_huge(address, SIZE) == SIZE  # again: they are
    finally:
        unmap(address, SIZE)


@needs_huge
def test_another_mapping_of_the_same_memory_has_the_huge_pages_too(fd):
    first = map_congruent(fd, 0, SIZE)
    second = map_congruent(fd, HUGE, 2 * HUGE)
    try:
        make_huge(first, SIZE)
        ctypes.string_at(second, 1)
        assert huge_bytes_at(second) >= HUGE
    finally:
        unmap(first, SIZE)
        unmap(second, 2 * HUGE)


@needs_huge
def test_only_whole_huge_pages_within_the_bytes_are_made(fd):
    address = map_congruent(fd, 0, SIZE)
    try:
        assert make_huge(address + PAGE, HUGE - PAGE) == 0
        assert make_huge(address + PAGE, 3 * HUGE) == 2 * HUGE
        assert huge_bytes_at(address) == 2 * HUGE
        assert os.fstat(fd).st_blocks * 512 == 2 * HUGE  # nothing else has got memory
    finally:
        unmap(address, SIZE)


@needs_huge
@pytest.mark.parametrize("offset", [0, PAGE, HUGE - PAGE, HUGE, HUGE + 3 * PAGE])
def test_a_mapping_lies_in_its_huge_pages_as_its_bytes_do_in_the_file_and_leaves_nothing_beside_it(
    fd, offset
):
    num_bytes = 2 * HUGE + 5
    address = map_congruent(fd, offset, num_bytes)
    try:
        assert (address - offset) % HUGE == 0
        begin, end = lines_of(address)[0].split()[0].split("-")
        assert (int(begin, 16), int(end, 16)) == (address, address + 2 * HUGE + PAGE)
        os.pwrite(fd, b"seen", offset + 2 * HUGE)
        assert ctypes.string_at(address + 2 * HUGE, 4) == b"seen"
    finally:
        unmap(address, num_bytes)
    assert not lines_of(address)


@needs_huge
def test_what_cannot_be_mapped_leaves_nothing_mapped(fd):
    with pytest.raises(OSError, match="descriptor"):
        map_congruent(1 << 20, 0, SIZE)
    with pytest.raises(OSError, match="Invalid"):
        map_congruent(fd, 1, SIZE)
    assert "test-huge" not in Path("/proc/self/maps").read_text()


@needs_huge
def test_where_the_kernel_refuses_memory_stays_as_it_is(fd, monkeypatch):
    address = map_congruent(fd, 0, SIZE)
    try:
        monkeypatch.setattr(huge_pages.libc, "madvise", lambda *_: -1)
        assert make_huge(address, SIZE) == 0
        ctypes.memmove(address, b"usable", 6)
        assert os.pread(fd, 6, 0) == b"usable"
        monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 0)
        assert make_huge(address, SIZE) == 0
    finally:
        unmap(address, SIZE)


def test_huge_pages_that_round_up_too_much_are_none(tmp_path, monkeypatch):
    for text, wanted in (("2097152\n", 2 << 20), ("536870912\n", 0), ("", 0)):
        (tmp_path / "size").write_text(text)
        monkeypatch.setattr(huge_pages, "_SIZE", tmp_path / "size")
        huge_page_bytes.cache_clear()
        assert huge_page_bytes() == wanted
    monkeypatch.setattr(huge_pages, "_SIZE", tmp_path / "none")
    huge_page_bytes.cache_clear()
    assert huge_page_bytes() == 0
    huge_page_bytes.cache_clear()
