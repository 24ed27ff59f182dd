"""The mover through cuda.bindings and the driver's C interface, over a libcuda with two GPUs and no hardware."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    pytest.importorskip("cuda.bindings")
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a machine with a GPU has the real library")
    folder = tmp_path_factory.mktemp("libcuda")
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    source = ROOT / "tests" / "support" / "fake_libcuda_two_gpus.c"
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(source)], check=True, timeout=60)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def test_every_way_between_two_gpus_and_host_memory_is_exact_through_the_c_interface(environment):
    command = [sys.executable, "-m", "tests.gpu.mover_on_gpus", "--small"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("--- mover") :]
    for path in (" shm ", " imported ", " staged "):
        assert path in table
    assert table.count("->") == 2 * 10 + 4
