"""A crash ends the process that has it, wherever it comes."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
IN_MALLOC = """
import ctypes, threading, time
from shared.engine.crashes import die_when_crashed
{before}
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # with one thread malloc() takes no lock
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
freed = [libc.malloc(ctypes.c_size_t(90_000)) for _ in range(9)][4]
libc.free(freed)
ctypes.memset(freed, 0x41, 16)  # where the heap says what is free
while True:
    libc.malloc(ctypes.c_size_t(95_000))
"""
GRAMMARS = "import xgrammar"


@pytest.mark.parametrize("before", ["die_when_crashed()", f"die_when_crashed(); {GRAMMARS}"])
def test_a_crash_within_malloc_ends_the_process_and_says_where(before):
    if "xgrammar" in before and importlib.util.find_spec("xgrammar") is None:
        pytest.skip("xgrammar comes with vLLM")
    words = [sys.executable, "-c", IN_MALLOC.format(before=before)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGABRT), done.stderr
    assert "Fatal Python error" in done.stderr
    assert 'File "<string>", line' in done.stderr
