"""A GPU that refuses a call in the middle of a batch, or is late: an engine's window holds what its books say."""

import os
import threading
from types import SimpleNamespace

import pytest

from shared.engine import page_window_cuda
from shared.engine.page_window_cuda import CudaWindow
from shared.vmm import mapper as mappers
from shared.vmm.errors import VmmError
from shared.vmm.interface import OP_PAUSE
from shared.vmm.mapper import MAPPER_THREAD, ThreadMapper
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, READ_WRITE, FakeVmmDriver


class StoppingMapper:
    """Executes `most` ops, and is refused the next one."""

    def __init__(self, window, most):
        self.window, self.most, self.done = window, most, 0

    def submit(self, ops):
        self.window.apply([op for op in ops[: self.most] if op.code != OP_PAUSE])
        self.done = min(self.most, len(ops))
        return len(ops)

    def wait(self, ticket):
        if self.done < ticket:
            raise VmmError("refused")

    def close(self):
        pass


class HastyMapper(ThreadMapper):
    """Nobody waits for it for longer than 20 ms."""

    def wait(self, ticket, timeout_s=0.02):
        super().wait(ticket, timeout_s)


class ProcessEnds(BaseException):
    """Where the process would end."""


@pytest.fixture
def driver():
    made = FakeVmmDriver()
    yield made
    made.close()


@pytest.fixture
def fds(driver):
    other = FakeVmmDriver()
    made = [other.export_fd(other.create(GRANULARITY_BYTES)) for _ in range(3)]
    yield made
    for fd in made:
        os.close(fd)
    other.close()


@pytest.fixture
def open_window(driver, fds, monkeypatch):
    def opened(num_slabs, most_ops=0, kind=None):
        made = kind or (lambda window: StoppingMapper(window, most_ops))
        monkeypatch.setattr(page_window_cuda, "open_mapper", made)
        header = SimpleNamespace(num_pages=3, page_bytes=GRANULARITY_BYTES)
        given = [os.dup(fd) for fd in fds[:num_slabs]]
        memory = SimpleNamespace(
            header=header, pages_per_slab=1, num_slabs=3, slab_fds=lambda: iter([(0, given)])
        )
        return CudaWindow(memory, driver)

    return opened


@pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
def test_slabs_that_were_refused_halfway_are_mapped_with_access_when_asked_for_again(
    refused, driver, fds, open_window, monkeypatch
):
    window = open_window(1)
    before = set(driver.mapped)
    with monkeypatch.context() as patch:
        if refused == "cuMemMap":  # of the second slab
            driver.refuse_map_number = len(driver.named("cuMemMap")) + 2
        else:
            patch.setattr(driver, "set_access", refuse)
        with pytest.raises(VmmError):
            window.map([1, 2], fds[1:])
    assert set(driver.mapped) == before
    driver.refuse_map_number = 0
    window.map([1, 2], fds[1:])
    at = max(before) + GRANULARITY_BYTES
    assert driver.named("cuMemSetAccess")[-1] == (at, 2 * GRANULARITY_BYTES, READ_WRITE)


def refuse(*_):
    raise VmmError("cuMemSetAccess: CUDA_ERROR_UNKNOWN")


@pytest.mark.parametrize(("most_ops", "gone"), [(0, 0), (1, 1), (2, 1), (3, 2), (5, 3)])
def test_a_slab_whose_pause_was_refused_is_unmapped(most_ops, gone, driver, open_window):
    window = open_window(3, most_ops)
    with pytest.raises(VmmError):
        window.unmap([0, 1, 2], bytes_per_s=1 << 40)
    assert len(driver.named("cuMemUnmap")) == gone
    window.unmap([0, 1, 2])
    assert len(driver.named("cuMemUnmap")) == 3, "each once"


@pytest.fixture
def late(driver, monkeypatch):
    """The driver's unmaps in the background last until this is set."""
    go_on, unmap = threading.Event(), driver.unmap

    def unmap_late(address, size_bytes):
        if threading.current_thread().name == MAPPER_THREAD:
            go_on.wait()
        unmap(address, size_bytes)

    monkeypatch.setattr(driver, "unmap", unmap_late)
    yield go_on
    go_on.set()


def test_a_late_mapper_unmaps_no_slab_that_was_mapped_again(driver, fds, open_window, late):
    window = open_window(3, kind=HastyMapper)
    thread, slab = window._mapper._thread, window.address + GRANULARITY_BYTES
    assert slab in driver.mapped
    threading.Timer(0.06, late.set).start()
    with pytest.raises(VmmError, match="is not executed after"):
        window.unmap([0, 1, 2], bytes_per_s=1 << 40)
    window.unmap([0, 1, 2])
    window.map([0], fds[:1])
    thread.join()
    assert slab in driver.mapped
    assert len(driver.named("cuMemUnmap")) == 3, "each once"


def test_a_mapper_of_which_nobody_knows_what_it_will_unmap_ends_the_process(
    driver, open_window, late, monkeypatch
):
    def end():
        raise ProcessEnds

    monkeypatch.setattr(page_window_cuda, "end_process", end, raising=False)
    monkeypatch.setattr(mappers, "WAIT_TIMEOUT_S", 0.02)
    window = open_window(3, kind=HastyMapper)
    thread = window._mapper._thread
    with pytest.raises(ProcessEnds):
        window.unmap([0, 1, 2], bytes_per_s=1 << 40)
    assert not driver.named("cuMemUnmap"), "nor by another thread"
    late.set()
    thread.join()
