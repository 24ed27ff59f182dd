"""Own copies of callers between two GPUs, through cuda.bindings and the driver's C interface, without any hardware.

The library refuses a copy by a GPU that was not let into a page, or in a context that is not the thread's.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.build_libcuda import environment_with

ROOT = Path(__file__).resolve().parents[2]
BENCH = """
import sys
import loadtest.bench_pool_transfer as bench
import loadtest.peer_memory as peer_memory
peer_memory.gpu_device = lambda ordinal: f"cuda:{(bytes([0xa0 + ordinal]) * 16).hex()}"
bench.SETS = {2 * bench.MIB: (1, 4, 32)}
bench.peers = lambda repeats: iter(())
sys.exit(bench.main(["--quick", "--pool-gib", "0.3"]))
"""
WINDOW = """
import os
import numpy as np
from cuda.bindings import driver as cuda
from shared.mempool.direct_cuda import gpu_in_use
from shared.transfer.errors import PathUnavailable
from shared.vmm.cuda_driver import CudaVmmDriver

SLAB = 2 << 20
try:
    gpu_in_use()
except PathUnavailable as error:
    print(error)
own = CudaVmmDriver(1)
peer = CudaVmmDriver(0)
peer.close()

def filled(byte):
    fd = own.export_fd(own.create(SLAB))
    os.pwrite(fd, bytes([byte]) * SLAB, 0)
    return fd

own.make_current()
gpu = gpu_in_use()
print("device", gpu.device[-2:])
print("submitted by", type(gpu._pages).__name__)
cuda.cuCtxSetCurrent(0)
window = gpu.window(4, SLAB, writes=True)
source = gpu.window(1, SLAB, writes=False)
fds = [filled(n) for n in (1, 2, 3)]
window.map([0, 1, 3], fds)
source.map([0], [filled(9)])
was = 0xc00  # another context of this thread's
cuda.cuCtxSetCurrent(was)

def copied(sources, targets):
    try:
        ticket = gpu.submitter(pulls=len(sources) > 1)(np.array(sources, np.uint64), np.array(targets, np.uint64), SLAB)
        return ticket.done()
    except Exception as error:
        return error.status

print("arrives", copied([source.address], [window.address + SLAB]), os.pread(fds[1], 1, 5))
pairs = [window.address, source.address], [window.address + SLAB, window.address + 3 * SLAB]
print("pulled", copied(*pairs), os.pread(fds[1], 1, 5), os.pread(fds[2], 1, 5))
os.pwrite(fds[1], bytes([9]) * SLAB, 0)
print("written back", copied([window.address], [source.address]))
window.unmap([1, 2])
window.map([1, 2], [fds[1], filled(4)])
cuda.cuCtxSetCurrent(was)  # mapping is for threads of its own
print("mapped again", copied([window.address + SLAB], [window.address + 2 * SLAB]), os.pread(fds[1], 1, 0))
print("context kept", int(cuda.cuCtxGetCurrent()[1]) == was)
window.close()
source.close()
cuda.cuCtxSetCurrent(was)
gpu.close()
print("context kept", int(cuda.cuCtxGetCurrent()[1]) == was)
"""


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return environment_with("fake_libcuda_two_gpus.c", tmp_path_factory.mktemp("libcuda"))


def run(script: str, environment) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_page_between_two_gpus_arrives_by_the_callers_own_copies(environment):
    """Keeper, mempool and workers as processes; every page is wiped before and looked at behind the copies."""
    lines = run(BENCH, environment)
    assert sum("MemPool.transfer, direct" in line for line in lines) == 3
    assert sum(" mediated " in line for line in lines) == 3
    assert any("refused: 32 of 32" in line for line in lines)


@pytest.mark.parametrize("before", ["", WITHOUT_NUMBA], ids=["machine code", "Python"])
def test_a_window_lets_the_copying_gpu_into_its_slabs_alone_and_threads_keep_their_context(
    before, environment
):
    assert run(before + WINDOW, environment) == [
        "this process uses no GPU",
        "device a1",
        f"submitted by {'PageStream' if before else 'NativeStream'}",
        "arrives True b'\\t'",
        "pulled True b'\\x01' b'\\t'",
        "written back CUDA_ERROR_ILLEGAL_ADDRESS",
        "mapped again True b'\\t'",
        "context kept True",
        "context kept True",
    ]
