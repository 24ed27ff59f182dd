"""Ranks of a fused group hand each other their memory: each gets every other's descriptor; a missing rank is named."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.engine.fused_pages import exchange_fds
from shared.errors import PeerTimeout

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
