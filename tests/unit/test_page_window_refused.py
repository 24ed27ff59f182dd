"""A GPU that refuses a call in the middle of a batch: an engine's window holds what its books say."""

import os
from types import SimpleNamespace

import pytest

from shared.engine import page_window_cuda
from shared.engine.page_window_cuda import CudaWindow
from shared.vmm.errors import VmmError
from shared.vmm.interface import OP_PAUSE
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
    def opened(num_slabs, most_ops=0):
        monkeypatch.setattr(page_window_cuda, "open_mapper", lambda window: StoppingMapper(window, most_ops))
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
