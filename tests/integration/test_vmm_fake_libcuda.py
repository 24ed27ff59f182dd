"""shared/vmm through cuda.bindings and the driver's C interface, over a libcuda without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.build_libcuda import environment_with

ROOT = Path(__file__).resolve().parents[2]

NATIVE_MAPPER = """
import ctypes
from shared.vmm.cuda_driver import CudaVmmDriver
from shared.vmm.cuda_pages import CudaPages
from shared.vmm.errors import VmmError
from shared.vmm.mapper import NativeMapper
driver = CudaVmmDriver("cuda:" + "ab" * 16)
pages = CudaPages(driver, 4, 2 << 20)
window = pages.window(8)
mapper = NativeMapper(window)
for _ in range(20):
    mapper.submit(window.plan_map(0, [3, 1, 2]))
    mapper.submit(window.plan_unmap(0, 3))
mapper.wait(mapper.submit(window.plan_map(4, [2, 2])))
at = window.address + (4 << 21)
ctypes.memset(at, 7, 9)
assert ctypes.string_at(at + (2 << 20), 9) == b"\\7" * 9
ops = window.plan_map(0, [0])
try:
    mapper.wait(mapper.submit([*ops, *ops]))
except VmmError as error:
    print("told:", error.message)
mapper.close()
window.close()
print("free again:", driver.memory_info()[0] + pages.resident_bytes() == driver.memory_info()[1])
"""

BENCH = """
from loadtest import bench_vmm, mapper_stall
mapper_stall.MAPS, mapper_stall.PIECES, mapper_stall.table.__defaults__ = 50, 100, (2,)
bench = bench_vmm.Bench(1, 1)
for section in (bench.contexts, lambda: bench.pages(8), bench.pool, bench.background, bench.slots):
    section()
print("\\n".join(bench.lines))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return environment_with("fake_libcuda_vmm.c", tmp_path_factory.mktemp("libcuda"))


def run(arguments, environment):
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpu_pages_pass_the_conformance_suite_through_the_c_interface(environment):
    suite = "tests/conformance/test_vmm_windows.py"
    out = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", suite, "-k", "[cuda]"], environment)
    assert "10 passed" in out
    assert "skipped" not in out


def test_the_native_mapper_calls_the_drivers_own_functions(environment):
    out = run(["-c", NATIVE_MAPPER], environment)
    assert "told: op" in out
    assert "free again: True" in out


def test_the_benchmarks_sections_run(environment):
    out = run(["-c", BENCH], environment)
    assert "made and mapped in" in out
    assert "importer" in out
    assert "native thread" in out
    assert "decode steps" in out
