"""A GPU's window with far places through cuda.bindings and the driver's C interface, over a libcuda with two GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.build_libcuda import environment_with

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
READS = """
import os
from types import SimpleNamespace
from cuda.bindings import driver as cuda
from shared.engine.page_window_cuda import CudaWindow
from shared.ids import Epoch
from shared.kv.page_table import TableHeader
from shared.vmm.cuda_driver import CudaVmmDriver

PAGE = 2 << 20
peer, own = CudaVmmDriver(1), CudaVmmDriver(0)

def filled(driver, byte):
    driver.make_current()
    fd = driver.export_fd(driver.create(PAGE))
    os.pwrite(fd, bytes([byte]) * PAGE, 0)
    return fd

def copied(at):
    target = bytearray(PAGE)
    own.make_current()
    (status,) = cuda.cuMemcpyDtoH(target, at, PAGE)
    return set(target) if int(status) == 0 else status.name

memory = SimpleNamespace(
    header=TableHeader(Epoch(1), 2, PAGE), pages_per_slab=1, num_slabs=2,
    slab_fds=lambda: iter([(0, [filled(own, 1), filled(own, 2)])]),
)
window = CudaWindow(memory, own, far_places=3)
host = os.memfd_create("host")
os.ftruncate(host, 4 * PAGE)
os.pwrite(host, b"\\7" * PAGE, 3 * PAGE)
reading = os.open(f"/proc/self/fd/{host}", os.O_RDONLY)
window.far.map([2], [filled(peer, 5)], [])
window.far.map([0], [reading], [3 * PAGE])
at = [window.address + window.far.block_of(block) * PAGE for block in range(6)]
assert window.far.block_of(5) == 5 < window.far.block_of(3), at
assert at[3] + PAGE <= window.address + window.size_bytes
print([copied(at[block]) for block in (0, 1, 2, 3, 5)])
(status,) = cuda.cuMemcpyHtoD(at[5], bytes(PAGE), PAGE)
print("a write to the peer's page:", status.name)
window.far.unmap([2, 0])
window.far.map([2], [filled(peer, 6)], [])
print(copied(at[5]))
"""

READS_SLABS = """
import os
from types import SimpleNamespace
from cuda.bindings import driver as cuda
from shared.engine.page_window_cuda import CudaWindow
from shared.ids import Epoch
from shared.kv.page_table import TableHeader
from shared.mempool.rank_memory import PageSlabs
from shared.vmm.cuda_driver import CudaVmmDriver

PAGE = 3 << 20  # two of them are three of the driver's
SLAB = 2 * PAGE
peer, own = CudaVmmDriver(1), CudaVmmDriver(0)

def filled(driver, *numbers):
    driver.make_current()
    fd = driver.export_fd(driver.create(SLAB))
    for nth, number in enumerate(numbers):
        os.pwrite(fd, bytes([number]) * PAGE, nth * PAGE)
    return fd

def copied(at):
    target = bytearray(PAGE)
    own.make_current()
    (status,) = cuda.cuMemcpyDtoH(target, at, PAGE)
    return set(target) if int(status) == 0 else status.name

memory = SimpleNamespace(
    header=TableHeader(Epoch(1), 4, PAGE), pages_per_slab=2, num_slabs=2,
    slab_fds=lambda: iter([(0, [filled(own, 1, 2), filled(own, 3, 4)])]),
)
window = CudaWindow(memory, own, far_places=3)
host = os.memfd_create("host")
os.ftruncate(host, 4 * PAGE)
os.pwrite(host, b"\\7" * PAGE, 3 * PAGE)
reading = os.open(f"/proc/self/fd/{host}", os.O_RDONLY)
window.far.map([2, 1], [filled(peer, 8, 9)], [PAGE, 0], PageSlabs(5, [6, 6], SLAB))
window.far.map([0], [reading], [3 * PAGE])
at = [window.address + window.far.block_of(block) * PAGE for block in range(8)]
assert all(each + PAGE <= window.address + window.size_bytes for each in at)
print([copied(each) for each in at])
(status,) = cuda.cuMemcpyHtoD(at[7], bytes(PAGE), PAGE)
print("a write to the peer's page:", status.name)
window.far.unmap([2])
print(copied(at[6]))
window.far.unmap([1, 0])
print([window.far.block_of(block) for block in (5, 6, 7)])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return environment_with("fake_libcuda_two_gpus.c", tmp_path_factory.mktemp("libcuda"))


def lines_of(script: str, environment: dict[str, str]) -> list[str]:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_blocks_of_a_peer_and_of_host_memory_are_read_through_one_window_and_not_written(environment):
    lines = lines_of(READS, environment)
    assert lines[0] == "[{0}, {1}, {2}, {7}, {5}]"
    assert lines[1] == "a write to the peer's page: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert lines[2] == "{6}"


def test_a_peers_pages_that_share_a_slab_are_read_in_it_until_nobody_does(environment):
    lines = lines_of(READS_SLABS, environment)
    assert lines[0] == "[{0}, {1}, {2}, {3}, {4}, {7}, {8}, {9}]"
    assert lines[1] == "a write to the peer's page: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert lines[2] == "{8}"
    assert lines[3] == "[5, 6, 7]"
