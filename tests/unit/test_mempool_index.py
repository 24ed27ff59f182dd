"""The index finds the longest prefix, keeps what is pinned and forgets leaves first."""

import hashlib

import pytest

from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from shared.errors import InvariantBroken
from shared.ids import BlockHash, PageId


def block(name: str) -> BlockHash:
    return BlockHash(hashlib.sha256(name.encode()).digest())


def chain_of(index: Index, *names: str, root: str = "seed") -> list[BlockHash]:
    """Insert a chain; pages are numbered by insertion."""
    previous = root
    for name in names:
        index.insert(Entry(block(name), block(previous), PageId(len(index)), valid_tokens=4))
        previous = name
    return [block(name) for name in names]


def test_longest_indexed_prefix_is_found():
    index = Index()
    hashes = chain_of(index, "a", "b", "c")
    assert [e.block_hash for e in index.prefix([*hashes, block("unknown")])] == hashes
    assert index.prefix([block("unknown"), *hashes]) == []
    assert index.prefix([]) == []


def test_second_seal_of_a_hash_changes_nothing():
    index = Index()
    (a,) = chain_of(index, "a")
    assert not index.insert(Entry(a, block("seed"), PageId(9), valid_tokens=4))
    assert index.prefix([a])[0].page == 0
    assert len(index) == 1


def test_eviction_takes_leaves_before_their_parents():
    index = Index()
    hashes = chain_of(index, "a", "b", "c")
    assert [index.evict().block_hash for _ in range(3)] == hashes[::-1]
    assert index.evict() is None


def test_eviction_takes_the_least_recently_used_leaf():
    index = Index()
    old = chain_of(index, "old1", "old2")
    new = chain_of(index, "new1", "new2")
    index.prefix(old)
    assert index.evict().block_hash == new[1]
    assert index.evict().block_hash == new[0]
    assert index.evict().block_hash == old[1]


def test_pinned_entries_and_what_they_hang_on_stay():
    index = Index()
    hashes = chain_of(index, "a", "b", "c")
    held = index.prefix(hashes[:2])
    index.pin(held)
    index.pin(held[:1])
    assert index.num_pinned == 2
    assert index.evict().block_hash == hashes[2]
    assert index.evict() is None
    assert index.delete(hashes) == []
    index.unpin(held)
    assert index.num_pinned == 1
    assert index.evict().block_hash == hashes[1]
    index.unpin(held[:1])
    assert index.evict().block_hash == hashes[0]


def test_unpinning_more_often_than_pinning_is_our_bug():
    index = Index()
    chain_of(index, "a")
    with pytest.raises(InvariantBroken):
        index.unpin(index.entries())


def test_block_that_came_before_its_parent_is_found_once_the_parent_is_there():
    index = Index()
    a, b = block("a"), block("b")
    index.insert(Entry(b, a, PageId(0), valid_tokens=4))
    assert index.prefix([a, b]) == []
    index.insert(Entry(a, block("seed"), PageId(1), valid_tokens=4))
    assert len(index.prefix([a, b])) == 2
    assert index.evict().block_hash == b


def test_deleted_blocks_are_gone_and_their_successors_age():
    index = Index()
    hashes = chain_of(index, "a", "b", "c")
    assert [e.block_hash for e in index.delete([hashes[1], block("unknown")])] == [hashes[1]]
    assert len(index.prefix(hashes)) == 1
    assert {index.evict().block_hash for _ in range(2)} == {hashes[0], hashes[2]}
    chain_of(index, "x", "y")
    index.pin(index.prefix([block("x")]))
    assert [e.block_hash for e in index.delete_unpinned()] == [block("y")]


def test_the_list_of_leaves_stays_bounded():
    index = Index()
    hashes = chain_of(index, *(f"n{i}" for i in range(8)))
    for _ in range(10_000):
        index.prefix(hashes)
        index.pin(entries := index.prefix(hashes[:1]))
        index.unpin(entries)
    assert len(index._leaves) <= 4 * len(index) + 64
    assert [index.evict().block_hash for _ in range(8)] == hashes[::-1]
