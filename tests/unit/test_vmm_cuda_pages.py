"""Which driver calls GPU pages make, seen by a fake driver that keeps CUDA's rules."""

import ctypes
import gc
import os

import pytest

from shared.errors import OutOfPages
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages, ImportedCudaPages
from shared.vmm.errors import BadMapping, VmmError, VmmUnavailable
from shared.vmm.interface import map_identity
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, READ_ONLY, READ_WRITE, FakeVmmDriver

PAGE = 2 * GRANULARITY_BYTES


@pytest.fixture
def driver():
    made = FakeVmmDriver()
    yield made
    made.close()


def test_the_identity_window_sets_access_once_for_all_pages(driver):
    window = CudaPages(driver, 20, PAGE).window(21)
    map_identity(window, 20)
    assert len(driver.named("cuMemMap")) == 21
    assert driver.named("cuMemSetAccess")[-1] == (window.address + PAGE, 20 * PAGE, READ_WRITE)
    assert len(driver.named("cuMemSetAccess")) == 2
    window.close()


def test_scattered_pages_at_consecutive_indices_are_one_run(driver):
    window = CudaPages(driver, 5, PAGE).window(5)
    window.map_pages(1, [4, 0, 2])
    assert driver.named("cuMemSetAccess") == [(window.address + PAGE, 3 * PAGE, READ_WRITE)]
    window.unmap(1, 3)
    assert driver.named("cuMemUnmap") == [(window.address + PAGE, 3 * PAGE)]
    window.close()


def test_aliases_of_a_peers_pages_are_read_only(driver):
    own = CudaPages(driver, 2, PAGE)
    peer = ImportedCudaPages(driver, 2, PAGE)
    fds = [own.export_fd(0), own.export_fd(1)]
    peer.add(0, fds)
    window = peer.window(2)
    window.map(0, 0, 2, writable=False)
    assert driver.named("cuMemSetAccess") == [(window.address, 2 * PAGE, READ_ONLY)]
    window.close()


def test_an_importer_closes_every_descriptor_also_when_one_is_refused(driver):
    own = CudaPages(driver, 3, PAGE)
    peer = ImportedCudaPages(driver, 3, PAGE)
    gc.collect()  # what others left open
    before = len(os.listdir("/proc/self/fd"))
    peer.add(1, [own.export_fd(1)])
    for page, count in ((2, 2), (0, 2)):  # one more than there is room for; one that is there already
        fds = [own.export_fd(i) for i in range(count)]
        with pytest.raises(BadMapping):
            peer.add(page, fds)
    assert [peer.is_present(i) for i in range(3)] == [True, True, False]
    held_by_the_fake = 2
    assert len(os.listdir("/proc/self/fd")) == before + held_by_the_fake


def test_imported_pages_are_neither_exported_again_nor_made(driver):
    peer = ImportedCudaPages(driver, 2, PAGE)
    peer.add(0, [CudaPages(driver, 1, PAGE).export_fd(0)])
    with pytest.raises(VmmError):
        peer.export_fd(0)
    peer.acquire(0)
    with pytest.raises(BadMapping):
        peer.acquire(1)


def test_a_gpu_without_memory_keeps_nothing(driver):
    driver.memory_bytes = 3 * PAGE
    with pytest.raises(OutOfPages):
        CudaPages(driver, 4, PAGE)
    assert driver.used_bytes == 0
    assert not driver.handles


def test_a_refused_map_leaves_no_trace(driver):
    window = CudaPages(driver, 4, PAGE).window(4)
    driver.refuse_map_number = 3
    with pytest.raises(VmmError):
        window.map(0, 0, 4)
    assert not driver.mapped
    window.map(0, 0, 4)
    window.close()
    assert not driver.mapped
    assert not driver.reservations


def test_private_memory_that_could_not_be_zeroed_leaves_no_trace(driver, monkeypatch):
    window = CudaPages(driver, 2, PAGE).window(3)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "zero", refuse)
        with pytest.raises(VmmError, match="refused"):
            window.map_private(0, 2)
    assert not driver.mapped
    assert driver.used_bytes == 2 * PAGE
    window.map_private(0, 2)
    window.close()
    assert driver.used_bytes == 2 * PAGE


def test_what_the_driver_does_not_unmap_stays_in_the_books(driver, monkeypatch):
    window = CudaPages(driver, 2, PAGE).window(3)
    map_identity(window, 2)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "unmap", refuse)
        with pytest.raises(VmmError):
            window.unmap(0, 2)
    assert window.page_at(1) == 0
    window.unmap(0, 2)
    assert len(driver.mapped) == 1
    window.close()
    assert driver.used_bytes == 2 * PAGE


def refuse(*_):
    raise VmmError("refused: CUDA_ERROR_UNKNOWN")


def test_the_null_page_ends_with_its_window(driver):
    pages = CudaPages(driver, 2, PAGE)
    window = pages.window(3)
    map_identity(window, 2)
    assert driver.used_bytes == 3 * PAGE
    window.close()
    assert driver.used_bytes == 2 * PAGE


def test_a_run_that_the_driver_keeps_holds_up_nothing_else_of_a_closing_window(driver, monkeypatch):
    pages = CudaPages(driver, 2, PAGE)
    window = pages.window(6)
    window.map(0, 0)
    window.map_private(2)
    window.map(4, 1)
    unmap = driver.unmap

    def refuse_the_first(address, size_bytes):
        if address == window.address:
            raise VmmError("cuMemUnmap: CUDA_ERROR_UNKNOWN")
        unmap(address, size_bytes)

    monkeypatch.setattr(driver, "unmap", refuse_the_first)
    with pytest.raises(VmmError, match="cuMemUnmap"):
        window.close()
    assert list(driver.mapped) == [window.address]
    assert driver.used_bytes == 2 * PAGE, "the private page is the system's again"
    assert window.address in driver.reservations, "something lies there"


def test_a_forgotten_window_gives_everything_back(driver):
    pages = CudaPages(driver, 2, PAGE)
    window = pages.window(2)
    window.map(0, 0, 2)
    span = window.span()
    del window
    assert driver.mapped, "the span keeps its window"
    del span
    assert not driver.mapped
    assert not driver.reservations


def test_the_span_says_where_and_how_long(driver):
    window = CudaPages(driver, 2, PAGE).window(2)
    window.map(0, 0, 2)
    interface = window.span(PAGE, 64).__cuda_array_interface__
    assert interface["shape"] == (64,)
    assert interface["data"] == (window.address + PAGE, False)
    ctypes.memset(interface["data"][0], 7, 64)
    window.close()


def test_page_sizes_are_multiples_of_the_drivers_granularity(driver):
    with pytest.raises(BadMapping):
        CudaPages(driver, 1, GRANULARITY_BYTES // 2)


def test_without_a_gpu_the_error_is_typed():
    with pytest.raises(VmmUnavailable) as caught:
        CudaVmmDriver(10_000)
    assert caught.value.code == "vmm.unavailable"
