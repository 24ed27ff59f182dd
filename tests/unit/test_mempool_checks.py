"""Which pages are in the sample: as many as the rate says, by their block's hash alone; and what of a page counts."""

import hashlib
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from services.mempool.checks import MAX_WAITING, Checks
from services.mempool.core.actions import CopyPages, WriteEntries
from services.mempool.core.entry import Entry
from services.mempool.core.inheritance import pack_entry
from services.mempool.memory import PoolMemory
from services.mempool.page_sums import HostPages
from shared.ids import BlockHash, Epoch, PageId
from shared.transport.clock import MonotonicClock

NUM_BLOCKS = 4000
HASHES = [BlockHash(hashlib.sha256(b"%d" % i).digest()) for i in range(NUM_BLOCKS)]


class Core:
    """Every page is as it is said to be."""

    def __init__(self) -> None:
        self.held: list[BlockHash] = []

    def hold(self, space, block_hash, page, epoch):
        self.held.append(block_hash)
        return object()


@pytest.fixture
def memory():
    found = PoolMemory(8, 4096, Epoch(1), 2)
    yield found
    found.close()


def checks_at(rate: float, memory: PoolMemory) -> tuple[Checks, Core]:
    core = Core()
    spaces = SimpleNamespace(
        memories={0: memory}, has_slabs=lambda space: False,
        description_of=lambda space: SimpleNamespace(block_bytes=4000),
    )  # fmt: skip
    made = Checks(rate, core, spaces, MonotonicClock(), lambda actions: None)
    made._sums.sums = lambda pieces, then: None
    return made, core


def sampled(checks: Checks, core: Core, epoch: int) -> set[BlockHash]:
    entries = [
        (i, pack_entry(Entry(h, HASHES[0], PageId(i), 4), Epoch(epoch + i))) for i, h in enumerate(HASHES)
    ]
    core.held.clear()
    checks.sealed(WriteEntries(entries, 0))
    checks.begin()
    return set(core.held)


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_the_sample_has_the_rates_share_of_blocks_and_goes_by_hash_alone(memory, rate):
    checks, core = checks_at(rate, memory)
    found = sampled(checks, core, 1)
    assert abs(len(found) / NUM_BLOCKS - rate) < 0.04
    assert sampled(checks, core, 70_000) == found
    checks.close()


def test_another_mempool_has_another_sample(memory):
    samples = set()
    for _ in range(2):
        checks, core = checks_at(0.25, memory)
        samples.add(frozenset(sampled(checks, core, 1)))
        checks.close()
    assert len(samples) == 2


def test_what_is_sealed_beyond_the_bound_has_no_sum_and_is_counted(memory):
    checks, core = checks_at(1.0, memory)
    checks._sums.num_waiting = MAX_WAITING - 10
    assert len(sampled(checks, core, 1)) == 10
    assert checks.counters["checks_pages_skipped"] == NUM_BLOCKS - 10
    checks.close()


def test_the_sum_of_what_lay_in_a_lent_page_ends_when_something_else_is_copied_there(memory):
    checks, core = checks_at(1.0, memory)
    sampled(checks, core, 1)
    assert checks.of(0, 5, 6) is not None
    copy = CopyPages(1, 0, [PageId(5)], [(0, PageId(7))], 1000)
    checks.copying(copy)
    assert checks.of(0, 5, 6) is not None  # a page of the space's own gets a new epoch
    checks.copying(replace(copy, copy_id=2, raw=True))
    assert checks.of(0, 5, 6) is None
    assert checks.of(0, 6, 7) is not None
    checks.close()


@pytest.mark.parametrize("at", [0, 3999, 4000, 4095])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_byte_of_the_block_counts_on_every_rank_and_what_is_behind_it_does_not(memory, at, rank):
    pages = HostPages(memory)
    before = pages.sum(5, 4000)
    os.pwrite(memory.page_fd, b"\1", (rank * 8 + 5) * 4096 + at)
    assert (pages.sum(5, 4000) != before) == (at < 4000)
    assert pages.sum(4, 4000) == pages.sum(6, 4000)
    pages.close()
