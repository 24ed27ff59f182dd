"""Names that come once, as with a process id in them, do not fill a mempool: the spaces of who is gone make room."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.keeper_rig import KeeperProcess
from tests.integration.many_names import PAGE_BYTES
from tests.integration.mempool_rig import ROOT, EngineProcess, MempoolProcess, until
from tests.support.build_libcuda import environment_with

GPU = f"cuda:{bytes([0xA0] * 16).hex()}"
SETTINGS: dict[str, Any] = {
    "max-spaces": 6,
    "dram-bytes": 4 * PAGE_BYTES,
    "dram-for-host": "true",
    "capacity-bytes": 4 * PAGE_BYTES,
}


def names(mempool: MempoolProcess, first: int, count: int, *how: str, device: str = "") -> list[str]:
    module = [sys.executable, "-m", "tests.integration.many_names"]
    command = [*module, str(mempool.socket), str(first), str(count), device, *how]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def num_descriptors(mempool: MempoolProcess) -> int:
    return len(os.listdir(f"/proc/{mempool.process.pid}/fd"))


@pytest.mark.parametrize("how", [("lends",), ()])
def test_seventy_processes_of_other_names_find_pages_one_after_the_other(tmp_path, how):
    mempool = MempoolProcess(tmp_path, **SETTINGS)
    engine = None
    try:
        engine = EngineProcess(mempool.socket, "prefill-0")
        assert names(mempool, 0, 10, *how) == [""] * 10
        before = num_descriptors(mempool)
        assert names(mempool, 10, 60, *how) == [""] * 60
        until(lambda: num_descriptors(mempool) <= before + 8, "what ended spaces had is given back")
        status = mempool.status()
        assert len(status["spaces"]) <= 6
        assert status["counters"]["spaces_ended"] >= 60
        assert not status["counters"].get("attaches_refused")
        assert any("prefill-0" in name for space in status["spaces"] for name in space["engines"])
        kept = {space["number"] for space in status["spaces"]}
        ended = {line["space"] for line in mempool.log_lines() if line["event"] == "space_ended"}
        assert not kept & ended
    finally:
        if engine is not None:
            engine.kill()
        mempool.stop()


def test_a_successor_finds_the_spaces_that_are_left_and_goes_on_with_numbers_of_its_own(tmp_path):
    keeper = KeeperProcess(tmp_path)
    mempool = MempoolProcess(tmp_path, **(SETTINGS | {"keeper-socket": str(keeper.socket)}))
    try:
        assert names(mempool, 0, 12, "lends") == [""] * 12
        left = {space["number"]: space["content_key"] for space in mempool.status()["spaces"]}
        assert len(left) <= 6
        mempool.kill()
        mempool.start()
        found = {space["number"]: space["content_key"] for space in mempool.status()["spaces"]}
        assert found == left
        assert names(mempool, 12, 12, "lends") == [""] * 12
        assert names(mempool, 0, 1, "lends") == [""], "a name of long ago is a new one"
        assert len(mempool.status()["spaces"]) <= 6
    finally:
        mempool.stop()
        keeper.stop()


def test_memory_on_gpus_and_behind_them_goes_with_the_spaces_of_who_is_gone(tmp_path):
    environment = environment_with("fake_libcuda_two_gpus.c", tmp_path)
    mempool = MempoolProcess(tmp_path, env=environment, **SETTINGS)
    try:
        assert names(mempool, 0, 8, device=GPU) == [""] * 8
        before = num_descriptors(mempool)
        assert names(mempool, 8, 16, device=GPU) == [""] * 16
        assert names(mempool, 24, 8, "lends", device=GPU) == [""] * 8
        until(lambda: num_descriptors(mempool) <= before + 8, "what ended spaces had is given back")
        until(lambda: set(copied_spaces(mempool)) == set(spaces(mempool)), "the mover knows which are there")
        assert len(spaces(mempool)) <= 6
    finally:
        mempool.stop()


def spaces(mempool: MempoolProcess) -> list[str]:
    return [str(space["number"]) for space in mempool.status()["spaces"]]


def copied_spaces(mempool: MempoolProcess) -> dict[str, str]:
    return mempool.status()["copies"]["spaces"]
