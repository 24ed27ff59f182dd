"""What a mempool reads of the processes that attach to it."""

import subprocess
import sys

import pytest

from services.mempool.processes import start_time

RENAMES = """
import sys
with open("/proc/self/comm", "wb") as file:
    file.write(bytes.fromhex(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", [b"fourteen bytes\xc3", b"a) 1 (b", b"\xff\xfe"])
def test_a_process_is_known_whatever_bytes_its_name_has(name):
    words = [sys.executable, "-c", RENAMES, name.hex()]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = start_time(child.pid)
        child.kill()
    assert found.isdigit()
    assert int(found) > 0


def test_a_process_that_is_gone_has_no_start_time():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert start_time(child.pid) == ""
