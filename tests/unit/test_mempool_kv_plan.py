"""Fetch or recompute at the mempool: what is brought for a reader, what is not, and what it is told of it."""

import pytest

from shared.ids import HandoffId
from shared.wire import mempool as wire
from tests.unit.test_mempool_remote import TwoMempools
from tests.unit.test_mempool_spaces import ABC, DECODE, FRONT, PREFILL, Spaces, acquire, answers


@pytest.fixture
def spaces() -> Spaces:
    made = Spaces()
    made.worker(PREFILL, "cpu:0")
    made.worker(DECODE, "cpu:1")
    made.client(FRONT, f"i{DECODE}")
    return made


@pytest.fixture
def hosts() -> TwoMempools:
    return TwoMempools()


def test_a_reader_for_whom_computing_is_quicker_gets_its_own_space_alone(spaces):
    spaces.fill(PREFILL, 0, ABC, "abc")
    spaces.fill(DECODE, 1, ABC[:1], "a")
    acquire(spaces, ABC, own_space_only=True)
    (got,) = answers(spaces, FRONT, wire.Acquired)
    assert (got.num_blocks, got.blocks_peer) == (1, 0)
    assert not spaces.copies
    assert not spaces.core.counters["pulls"]


def test_a_reader_is_told_what_was_brought_for_it(spaces):
    spaces.fill(PREFILL, 0, ABC, "abc")
    spaces.fill(DECODE, 1, ABC[:1], "a")
    acquire(spaces, ABC)
    spaces.copied()
    acquire(spaces, ABC, 2)
    first, again = answers(spaces, FRONT, wire.Acquired)
    assert (first.num_blocks, first.blocks_peer, first.blocks_dram, first.blocks_remote) == (3, 2, 0, 0)
    assert (again.num_blocks, again.blocks_peer) == (3, 0)


def test_without_a_handoff_a_reader_gets_what_the_best_holder_has(hosts):
    hosts.a.fill(PREFILL, 0, ABC, "abc")
    hosts.acquire(handoff_id=HandoffId(""))
    hosts.deliver()
    hosts.copy()
    hosts.deliver()
    (got,) = hosts.got()
    assert (got.num_blocks, got.blocks_remote, got.blocks_peer) == (3, 3, 0)
    assert hosts.bytes_of(got) == ["a", "b", "c"]
    hosts.assert_at_rest()


def test_a_reader_of_its_own_space_alone_asks_nobody(hosts):
    hosts.a.fill(PREFILL, 0, ABC, "abc")
    hosts.acquire(handoff_id=HandoffId(""), own_space_only=True)
    (got,) = hosts.got()
    assert got.num_blocks == 0
    assert hosts.deliver() == []
