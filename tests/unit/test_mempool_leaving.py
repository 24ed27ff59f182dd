"""Blocks that were copied away leave the index as branches, as they would one by one."""

import pytest

from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from shared.ids import PageId
from tests.unit.mempool_harness import SEED, chain

NAMES = chain(*"abcdef")


class Told:
    def __init__(self) -> None:
        self.gone = []

    def stored(self, entries) -> None: ...

    def removed(self, entries) -> None:
        self.gone += [entry.block_hash for entry in entries]


@pytest.fixture
def index() -> Index:
    index = Index()
    made = zip(NAMES, [SEED, *NAMES], strict=False)
    index.insert_all([Entry(h, parent, PageId(i), 4) for i, (h, parent) in enumerate(made)])
    index.watch = Told()
    return index


def hashes(entries: list[Entry]) -> list[bytes]:
    return [entry.block_hash for entry in entries]


def is_clean(index: Index, left: list[bytes]) -> None:
    assert set(index.hashes) == set(left)
    assert index.num_pinned == sum(entry.pins > 0 for entry in index.entries())
    assert index.num_branches == len({id(entry.branch) for entry in index.entries()})
    assert set(index.watch.gone) == set(NAMES) - set(left)
    assert len(index.watch.gone) == len(NAMES) - len(left)


def test_a_branch_leaves_whole_from_its_end(index):
    moving = index.take_coldest(6)
    assert hashes(index.left(moving)) == NAMES[::-1]
    assert [(entry.pins, entry.branch) for entry in moving] == [(0, None)] * 6
    assert index.watch.gone == NAMES[::-1]
    is_clean(index, [])


def test_its_end_leaves_and_what_is_before_it_can_go_next(index):
    index.left(index.take_coldest(4))
    is_clean(index, NAMES[:2])
    assert index.evict().block_hash == NAMES[1]


def test_what_somebody_pinned_since_stays_with_all_before_it(index):
    moving = index.take_coldest(6)
    index.pin([index.get(NAMES[2])])
    assert hashes(index.left(moving)) == NAMES[:2:-1]
    is_clean(index, NAMES[:3])
    assert [index.get(h).pins for h in NAMES[:3]] == [0, 0, 1]


def test_what_was_used_since_stays(index):
    moving = index.take_coldest(6)
    index.prefix(NAMES[:4])
    assert hashes(index.left(moving)) == NAMES[:3:-1]
    is_clean(index, NAMES[:4])


def test_parts_that_end_out_of_order_leave_no_hole_behind_which_blocks_are_lost(index):
    first, second = index.take_coldest(3), index.take_coldest(3)
    assert hashes(index.left(second)) == NAMES[2::-1]
    is_clean(index, NAMES[3:])
    index.watch = None
    index.insert_all([Entry(NAMES[2], NAMES[1], PageId(9), 4)])
    assert hashes(index.prefix(NAMES[2:])) == NAMES[2:]  # used together again: nothing of it leaves
    assert index.left(first) == []
    assert index.num_branches == 1


@pytest.mark.parametrize("order", [(0, 2, 4, 1, 3, 5), (5, 4, 3, 2, 1, 0), (0, 1, 2, 5, 4, 3)])
def test_any_order_comes_to_the_same(index, order):
    moving = index.take_coldest(6)
    assert set(hashes(index.left([moving[i] for i in order]))) == set(NAMES)
    is_clean(index, [])


def test_what_is_not_named_waits(index):
    moving = index.take_coldest(6)
    assert hashes(index.left(moving[:3])) == NAMES[:2:-1]
    is_clean(index, NAMES[:3])
    assert index.num_pinned == 3
    index.left(moving[3:])
    is_clean(index, [])


def test_a_block_with_a_twin_is_looked_at_by_itself(index):
    moving = index.take_coldest(6)
    index.twins.pages[NAMES[3]] = {PageId(7): {}}
    index.left(moving)
    assert hashes(index.twins.loose) == [NAMES[3]]
    is_clean(index, [])
