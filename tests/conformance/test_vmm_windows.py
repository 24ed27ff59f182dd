"""One interface for pages and windows over host memory, a GPU, and a fake GPU (PageSource, PageWindow)."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from shared.vmm.errors import BadMapping
from shared.vmm.interface import map_identity
from tests.support import vmm_backends


@pytest.fixture(params=vmm_backends.NAMES)
def backend(request):
    made = vmm_backends.make(request.param)
    if made is None:
        pytest.skip("no GPU here")
    yield made
    made.close()


@pytest.fixture
def source(backend):
    pages = backend.pages(6)
    yield pages
    pages.close()


@pytest.fixture
def window(source):
    made = source.window(8)
    yield made
    made.close()


def at(window, index):
    return window.address + index * window.page_bytes


def test_a_mapped_page_keeps_its_bytes_at_every_index_where_it_is_mapped(backend, window):
    window.map(0, 3)
    window.map(5, 3)
    backend.write(at(window, 0), b"first")
    backend.write(at(window, 6) - 4, b"last")
    assert backend.read(at(window, 5), 5) == b"first"
    assert backend.read(at(window, 1) - 4, 4) == b"last"
    assert [window.page_at(i) for i in (0, 1, 5)] == [3, None, 3]


def test_a_run_maps_consecutive_pages_and_a_list_maps_any(backend, window):
    window.map(0, 1, 3)
    for i in range(3):
        backend.write(at(window, i), bytes([i + 1]) * 8)
    window.map_pages(4, [3, 1, 2])
    assert [backend.read(at(window, i), 1)[0] for i in (4, 5, 6)] == [3, 1, 2]


def test_the_identity_window_has_a_null_page_and_then_every_page(backend, source):
    window = source.window(source.num_pages + 1)
    map_identity(window, source.num_pages)
    assert [window.page_at(i) for i in range(7)] == [None, 0, 1, 2, 3, 4, 5]
    assert backend.read(at(window, 0), window.page_bytes) == bytes(window.page_bytes)
    backend.write(at(window, 0), b"null")
    backend.write(at(window, 6), b"page 5")
    other = source.window(1)
    other.map(0, 5)
    assert backend.read(at(other, 0), 6) == b"page 5"
    window.close()
    other.close()


def test_private_memory_is_nobody_elses(backend, source):
    one, two = source.window(2), source.window(2)
    one.map_private(0)
    two.map_private(0)
    backend.write(at(one, 0), b"mine")
    assert backend.read(at(two, 0), 4) == bytes(4)
    one.unmap(0)
    one.map(0, 0)
    one.close()
    two.close()


def test_unmapping_a_range_leaves_the_rest_and_the_bytes(backend, window):
    window.map(0, 0, 6)
    backend.write(at(window, 5), b"kept")
    window.unmap(1, 3)
    assert [window.page_at(i) for i in range(6)] == [0, None, None, None, 4, 5]
    window.map_pages(1, [5, 0])
    assert backend.read(at(window, 1), 4) == b"kept"


def test_a_taken_index_a_hole_and_a_foreign_page_are_refused_and_change_nothing(window):
    window.map(2, 2, 2)
    for wrong in (
        lambda: window.map(1, 0, 2),
        lambda: window.map(0, 5, 2),
        lambda: window.map(7, 0, 2),
        lambda: window.map(-1, 0),
        lambda: window.map_pages(0, [0, -1]),
        lambda: window.map_pages(0, []),
        lambda: window.unmap(1, 2),
        lambda: window.unmap(7, 2),
        lambda: window.map_private(3),
        lambda: window.span(window.size_bytes, 1),
    ):
        with pytest.raises(BadMapping):
            wrong()
    assert [window.page_at(i) for i in range(8)] == [None, None, 2, 3, None, None, None, None]


def test_released_pages_go_back_to_the_system_and_can_come_again(backend, source, window):
    size = source.page_bytes
    window.map(0, 0, 6)
    for i in range(6):
        backend.write(at(window, i), b"x" * size)
    full = source.resident_bytes()
    window.unmap(0, 6)
    source.release(1, 3)
    assert full - source.resident_bytes() == 3 * size
    assert [source.is_present(i) for i in range(6)] == [True, False, False, False, True, True]
    with pytest.raises(BadMapping):
        window.map(0, 0, 2)
    with pytest.raises(BadMapping):
        source.export_fd(2)
    source.release(0, 6)
    source.acquire(0, 6)
    window.map(0, 0, 6)
    backend.write(at(window, 2), b"again")
    assert backend.read(at(window, 2), 5) == b"again"


def test_planned_calls_change_the_books_at_once_and_the_memory_when_applied(backend, window):
    first = window.plan_map(0, [4, 5])
    assert window.page_at(1) == 5
    second = window.plan_unmap(0, 1)
    window.apply(first)
    backend.write(at(window, 1), b"planned")
    window.apply(second)
    window.map(3, 5)
    assert backend.read(at(window, 3), 7) == b"planned"


def test_a_closed_window_closes_again_and_the_pages_live_on(backend, source):
    window = source.window(2)
    window.map(0, 2)
    backend.write(at(window, 0), b"alive")
    window.close()
    window.close()
    other = source.window(1)
    other.map(0, 2)
    assert backend.read(at(other, 0), 5) == b"alive"
    other.close()


def test_pages_outlive_their_source_in_a_window_and_in_a_descriptor(backend):
    pages = backend.pages(2)
    window = pages.window(1)
    window.map(0, 1)
    fd = pages.export_fd(1)
    backend.write(at(window, 0), b"still")
    pages.close()
    assert backend.read(at(window, 0), 5) == b"still"
    window.close()
    os.close(fd)


TOUCH = """
import sys
from tests.support import vmm_backends
backend = vmm_backends.make(sys.argv[1])
window = backend.pages(4).window(4)
window.map(0, 0, 3, writable=sys.argv[2] != "write-read-only")
if sys.argv[2] == "unmapped":
    window.unmap(1)
print(backend.read(window.address, 1), flush=True)
where = {"hole": 3, "unmapped": 1, "write-read-only": 2}[sys.argv[2]]
backend.write(window.address + where * window.page_bytes, b"x")
"""


@pytest.mark.parametrize("how", ["hole", "unmapped", "write-read-only"])
@pytest.mark.parametrize("name", ["memfd", "fake-cuda"])
def test_a_stray_access_faults(name, how):
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOUCH), name, how], capture_output=True, timeout=60
    )
    assert child.stdout.startswith(b"b'"), child.stderr
    assert child.returncode == -signal.SIGSEGV
