"""Processes that attach to a mempool: what it reads of them, and those that leave while it works for them."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from loadtest.processes import family
from services.mempool.core.actions import CreateSlabs
from services.mempool.processes import start_time
from services.mempool.shell import MempoolShell
from services.mempool.takeover import KeptProcess, ProcessMeta, Takeover
from shared.ids import Epoch
from shared.testing.processes import session_members

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
        listed = child.pid in session_members(os.getsid(0)), child.pid in family(os.getpid())
        child.kill()
    assert listed == (True, True)
    assert found.isdigit()
    assert int(found) > 0


def test_a_process_that_is_gone_has_no_start_time():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert start_time(child.pid) == ""


def test_a_peer_that_left_while_its_memory_could_not_be_made_ends_nothing():
    shell = object.__new__(MempoolShell)
    shell._connections = {}  # its connection ended as an earlier action was performed
    shell.spaces = SimpleNamespace(create_slabs=lambda action: False)  # pyright: ignore[reportAttributeAccessIssue]
    shell._perform_one(CreateSlabs(7, 0, "cuda:0", 1, 1 << 21))


def test_a_mempool_knows_whose_engine_died_before_it_came():
    """And no other of the instance lives: such ranks have nobody who says what they hold."""
    adopted: list[set[str]] = []
    rig = SimpleNamespace(
        _processes=SimpleNamespace(adopt=lambda number, pidfd: number),
        kept=SimpleNamespace(
            adopted=lambda number, pidfd, meta: None, found_dead=lambda number, pidfd: os.close(pidfd)
        ),
        _adopt=lambda space, members, bereft: adopted.append(bereft),
        _end_silent=lambda: None,
    )
    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # its pid stays its own
    processes = [
        KeptProcess(number, os.pidfd_open(pid), ProcessMeta(kind=kind, instance=instance))
        for number, (pid, kind, instance) in enumerate(
            [
                (dead.pid, "engine", "bereft"),
                (os.getpid(), "rank", "bereft"),
                (dead.pid, "engine", "succeeded"),
                (os.getpid(), "engine", "succeeded"),
                (dead.pid, "rank", "whole"),
                (os.getpid(), "engine", "whole"),
            ]
        )
    ]
    living = [one.pidfd for one in processes if not one.dead]

    async def adopt() -> None:
        MempoolShell.adopt(rig, Takeover(Epoch(1), [SimpleNamespace()], processes))

    asyncio.run(adopt())
    assert adopted == [{"bereft"}]
    dead.wait()
    for pidfd in living:
        os.close(pidfd)
