"""The radix index finds the longest prefix, keeps what is pinned, forgets leaves first, and works on branches."""

import hashlib

import pytest

from services.mempool.core.radix import Entry, Index
from shared.errors import InvalidRequest, InvariantBroken
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


def test_the_heap_stays_bounded():
    index = Index()
    hashes = chain_of(index, *(f"n{i}" for i in range(8)))
    for _ in range(10_000):
        index.prefix(hashes)
        index.pin(entries := index.prefix(hashes[:1]))
        index.unpin(entries)
    assert len(index._leaves) <= 2 * index.num_branches + 64
    assert [index.evict().block_hash for _ in range(8)] == hashes[::-1]


def numbered(*names: str, first_page: int = 0) -> tuple[list[BlockHash], list[PageId]]:
    return [block(name) for name in names], [PageId(first_page + i) for i in range(len(names))]


def test_prompts_share_one_run_until_they_part():
    index = Index()
    common = [f"s{i}" for i in range(8)]
    index.insert_path(block("seed"), *numbered(*common, "a1", "a2"), 16)
    assert index.num_branches == 1
    entries = index.insert_path(block("seed"), *numbered(*common, "b1", first_page=20), 16, last_tokens=5)
    assert [entry.page for entry in entries] == [0, 1, 2, 3, 4, 5, 6, 7, 28]
    assert entries[-1].valid_tokens == 5
    assert index.num_branches == 3
    assert len(index) == 11


def test_a_part_that_is_used_outlives_the_rest_of_its_run():
    index = Index()
    old = chain_of(index, *(f"n{i}" for i in range(6)))
    index.prefix(old[:3])
    new = chain_of(index, "m0", "m1")
    index.prefix(old[:3])
    gone = [index.evict().block_hash for _ in range(5)]
    assert gone == [old[5], old[4], old[3], new[1], new[0]]


def test_runs_that_no_longer_part_become_one_again():
    index = Index()
    hashes = chain_of(index, *(f"n{i}" for i in range(64)))
    for length in range(1, 64):
        index.prefix(hashes[:length])
    assert index.num_branches == 2
    index.prefix(hashes)
    assert index.num_branches == 1


def test_a_list_that_leaves_the_tree_ends_there():
    index = Index()
    a, b, c, d = chain_of(index, "a", "b", "c", "d")
    assert [e.block_hash for e in index.prefix([a, c, d])] == [a]
    assert [e.block_hash for e in index.prefix([b, c])] == [b, c]
    other = chain_of(index, "x")[0]
    assert [e.block_hash for e in index.prefix([a, b, other])] == [a, b]


def test_a_chain_that_bites_its_tail_is_still_evicted():
    """Only a peer that lies can make one."""
    index = Index()
    index.insert(Entry(block("a"), block("b"), PageId(0), 16))
    index.insert(Entry(block("b"), block("a"), PageId(1), 16))
    assert {index.evict().page, index.evict().page} == {0, 1}
    assert (index.evict(), len(index), index.num_branches) == (None, 0, 0)


def test_blocks_on_their_way_out_stay_if_they_are_used_meanwhile():
    index = Index()
    hashes = chain_of(index, "a", "b", "c", "d")
    moving = index.take_coldest(3)
    assert [entry.block_hash for entry in moving] == hashes[:0:-1]
    assert index.num_pinned == 3
    index.prefix(hashes[:2])
    assert [entry.block_hash for entry in index.left(moving)] == hashes[:1:-1]
    assert len(index) == 2
    assert index.num_pinned == 0


def test_a_whole_prompt_that_is_used_on_its_way_out_stays():
    index = Index()
    hashes = chain_of(index, "a", "b")
    moving = index.take_coldest(2)
    index.prefix(hashes)
    assert index.left(moving) == []
    assert [index.evict().block_hash for _ in range(2)] == hashes[::-1]


def test_blocks_that_are_pinned_while_they_leave_stay_with_what_is_before_them():
    index = Index()
    hashes = chain_of(index, "a", "b", "c", "d")
    moving = index.take_coldest(4)
    index.pin([index.get(hashes[2])])
    assert [entry.block_hash for entry in index.left(moving)] == [hashes[3]]
    index.unpin([index.get(hashes[2])])
    assert [index.evict().block_hash for _ in range(3)] == hashes[2::-1]


def test_copies_that_aged_go_before_older_blocks():
    index = Index()
    old = chain_of(index, "o1", "o2")
    index.age(index.prefix(chain_of(index, "n1", "n2", "n3")))
    gone = [index.evict().block_hash for _ in range(4)]
    assert gone == [block("n3"), block("n2"), block("n1"), old[1]]


def test_a_block_named_twice_is_refused_before_anything_changes():
    index = Index()
    with pytest.raises(InvalidRequest):
        index.insert_path(block("seed"), *numbered("a", "b", "a"), 16)
    assert len(index) == 0
