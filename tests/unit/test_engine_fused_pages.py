"""Ranks of a fused group hand each other their memory: each gets every other's descriptor; a missing rank is named."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shared.engine import fused_pages
from shared.engine.fused_pages import exchange_fds, page_arena
from shared.errors import PeerTimeout
from shared.vmm.errors import VmmError
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, FakeVmmDriver

WORLD = 3


def test_every_rank_gets_every_other_ranks_descriptor():
    files = [os.memfd_create(f"rank{rank}") for rank in range(WORLD)]
    inodes = [os.fstat(fd).st_ino for fd in files]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORLD) as pool:
        for _ in range(2):  # the sockets are gone after an exchange
            jobs = [
                pool.submit(exchange_fds, Path(folder), rank, WORLD, files[rank]) for rank in range(WORLD)
            ]
            for rank, job in enumerate(jobs):
                found = job.result()
                assert {other: os.fstat(fd).st_ino for other, fd in found.items()} == {
                    other: inodes[other] for other in range(WORLD) if other != rank
                }
                for fd in found.values():
                    os.close(fd)
            assert not list(Path(folder).iterdir())
    for fd in files:
        os.close(fd)


@pytest.mark.parametrize(
    ("rank", "said"), [(0, "ranks \\[1\\] did not come"), (1, "nobody listens at arena-0.sock")]
)
def test_a_rank_that_does_not_come_is_named_in_time(rank, said):
    fd = os.memfd_create("alone")
    with tempfile.TemporaryDirectory() as folder, pytest.raises(PeerTimeout, match=said):
        exchange_fds(Path(folder), rank, 2, fd, timeout_s=0.05)
    os.close(fd)


def refuse(*_):
    raise VmmError("refused")


@pytest.mark.parametrize(
    "call", ["export_fd", "reserve", "map", "set_access", "import_fd", "the first peer's map"]
)
def test_of_an_arena_that_cannot_be_had_nothing_is_kept(call, monkeypatch):
    driver, peer = FakeVmmDriver(), FakeVmmDriver()
    theirs: list[int] = []

    def exchange(*_):
        theirs.extend(peer.export_fd(peer.create(GRANULARITY_BYTES)) for _ in range(2))
        return dict(enumerate(theirs, 1))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(fused_pages, "exchange_fds", exchange)
    if hasattr(driver, call):
        monkeypatch.setattr(driver, call, refuse)
    else:
        driver.refuse_map_number = 2
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(VmmError):
        page_arena(GRANULARITY_BYTES, torch.device("cuda"), 0, 3, Path(), driver=driver)
    assert (driver.handles, driver.reservations, driver.mapped, driver.used_bytes) == ({}, {}, {}, 0)
    peer.close()  # the two allocations themselves
    assert len(os.listdir("/proc/self/fd")) == before, "their descriptors, too"
