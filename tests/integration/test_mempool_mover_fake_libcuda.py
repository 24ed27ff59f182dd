"""The mover through cuda.bindings and the driver's C interface, over a libcuda with two GPUs and no hardware."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.build_libcuda import environment_with

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return environment_with("fake_libcuda_two_gpus.c", tmp_path_factory.mktemp("libcuda"))


def test_every_way_between_two_gpus_and_host_memory_is_exact_through_the_c_interface(environment):
    command = [sys.executable, "-m", "tests.gpu.mover_on_gpus", "--small"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("--- mover") :]
    for path in (" shm ", " imported ", " staged "):
        assert path in table
    assert table.count("->") == 2 * 10 + 4
