"""shared/vmm on a real GPU: torch over a window, another process's pages, the native mapper calling the driver."""

import gc
import os

import pytest

from loadtest.bench_vmm import Child
from shared.errors import ClusterError
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages, ImportedCudaPages
from shared.vmm.errors import VmmError, VmmUnavailable
from shared.vmm.interface import map_identity
from shared.vmm.mapper import NativeMapper, ThreadMapper

pytestmark = pytest.mark.gpu
PAGE = 4 << 20


@pytest.fixture
def driver():
    try:
        made = CudaVmmDriver(0)
    except VmmUnavailable as error:
        pytest.skip(error.message)
    yield made
    made.close()


def tensor(window, offset_bytes=0, size_bytes=None):
    torch = pytest.importorskip("torch")
    return torch.as_tensor(window.span(offset_bytes, size_bytes), device="cuda")


def test_torch_sees_the_identity_window_and_its_null_page_is_zero(driver):
    pages = CudaPages(driver, 6, PAGE)
    window = pages.window(7)
    map_identity(window, 6)
    whole = tensor(window)
    assert whole.numel() == 7 * PAGE
    assert int(whole[:PAGE].count_nonzero()) == 0
    for page in range(6):
        whole[(page + 1) * PAGE : (page + 2) * PAGE] = page + 1
    alias = pages.window(3)
    alias.map_pages(0, [5, 0, 5], writable=False)
    assert tensor(alias).view(3, PAGE)[:, -1].tolist() == [6, 1, 6]
    del whole
    gc.collect()
    window.close()
    alias.close()
    pages.close()


def test_a_part_of_a_reservation_with_holes_is_a_tensor(driver):
    pages = CudaPages(driver, 2, PAGE)
    window = pages.window(1 << 15)  # 128 GiB of addresses
    window.map(0, 0)
    window.map(20_000, 1)
    whole = tensor(window)
    whole[20_000 * PAGE + 5] = 42
    assert int(whole[20_000 * PAGE + 5]) == 42
    del whole
    gc.collect()
    window.close()
    pages.close()


def test_another_process_imports_pages_and_lets_go(driver):
    pages = CudaPages(driver, 8, PAGE)
    importer = Child("importer")
    importer.call("begin", 8, PAGE)
    fds = [pages.export_fd(page) for page in range(8)]
    importer.call("add", 0, 8, fds)
    for fd in fds:
        os.close(fd)
    assert importer.call("map")["fds"] < 100
    free = driver.memory_info()[0]
    pages.close()
    assert driver.memory_info()[0] < free + 4 * PAGE, "the importer keeps them"
    importer.call("drop", 0, 8)
    assert driver.memory_info()[0] >= free + 8 * PAGE - (2 << 20)
    importer.close()


def test_imported_pages_are_the_same_memory_and_are_not_exported_again(driver):
    pages = CudaPages(driver, 2, PAGE)
    imported = ImportedCudaPages(driver, 2, PAGE)
    imported.add(0, [pages.export_fd(0), pages.export_fd(1)])
    one, two = pages.window(2), imported.window(2)
    one.map(0, 0, 2)
    two.map_pages(0, [1, 0])
    tensor(one).view(2, PAGE)[1] = 7
    assert int(tensor(two)[0]) == 7
    with pytest.raises(VmmError):
        imported.export_fd(0)
    gc.collect()
    for one_of_all in (one, two, pages, imported):
        one_of_all.close()


@pytest.mark.parametrize("kind", [NativeMapper, ThreadMapper])
def test_a_mapper_maps_in_the_background_while_kernels_run(driver, kind):
    torch = pytest.importorskip("torch")
    pages = CudaPages(driver, 64, PAGE)
    window = pages.window(65)
    window.map_private(64)
    mapper = kind(window)
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        a = (a @ a).tanh()
    for _ in range(3):
        mapper.submit(window.plan_map(0, range(63, -1, -1)))
        mapper.submit(window.plan_unmap(0, 64))
    mapper.wait(mapper.submit(window.plan_map(0, range(64))))
    both = tensor(window)
    both[: 64 * PAGE] = 3
    assert int(both[63 * PAGE]) == 3
    del both
    gc.collect()
    mapper.close()
    window.close()
    pages.close()


def test_a_refused_driver_call_in_the_background_is_told(driver):
    pages = CudaPages(driver, 1, PAGE)
    window = pages.window(2)
    mapper = NativeMapper(window)
    ops = window.plan_map(0, [0])
    ticket = mapper.submit([*ops, *ops])  # mapped twice
    with pytest.raises(VmmError, match="background"):
        mapper.wait(ticket)
    mapper.close()
    window.close()
    pages.close()


def test_pages_without_a_context_can_be_made_and_sent(driver):
    bare = Child("bare")
    try:
        assert bare.call("create", PAGE)["handle"]
    except ClusterError as error:
        pytest.skip(f"this driver needs a context: {error.message}")
    finally:
        bare.close()
