"""UCX is loaded beside running threads, so it must leave the C library as it is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, json
from shared.transfer.config import TransferSettings, apply_ucx_environment

apply_ucx_environment(TransferSettings())
libc = ctypes.CDLL(None)
def code():
    names = ("mmap", "munmap", "mremap", "madvise", "brk", "sbrk")
    return {name: ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value, 16) for name in names}

before = code()
from services.mempool.peer_paths import PathEnd
PathEnd("warm", []).close()
after = code()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed"
)


def patched_functions(**more: str) -> list[str]:
    """Of libc, in a process that has loaded NIXL as the mempool does."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_ucx_leaves_the_functions_of_the_c_library_alone():
    assert patched_functions() == []


def test_an_operator_may_have_ucx_watch_memory_nevertheless():
    assert "sbrk" in patched_functions(UCX_MEM_EVENTS="y")
