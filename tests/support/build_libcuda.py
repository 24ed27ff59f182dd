"""Builds a libcuda.so.1 without a GPU from its C file beside this one; tests run processes over it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1")


def environment_with(source: str, folder: Path) -> dict[str, str]:
    """The environment of a process that finds it, built into `folder`. Skips where it cannot or must
    not be built.
    """
    pytest.importorskip("cuda.bindings")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a machine with a GPU has the real library")
    command = [compiler, *FLAGS, "-o", str(folder / "libcuda.so.1"), str(Path(__file__).with_name(source))]
    subprocess.run([*command, "-lpthread"], check=True, timeout=60)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}
