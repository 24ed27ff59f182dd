"""A condemned block, and what is behind it, is found by nobody; when its last pin has ended it goes as others do."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from services.mempool.core.twins import Pinned
from shared.ids import BlockHash, PageId
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import chain, page_lists
from tests.unit.test_mempool_spaces import FRONT, Spaces, acquire, answers

SEED = BlockHash(b"\0" * 32)


def block(*path: int) -> BlockHash:
    """Of the path from the root: distinct paths, distinct hashes."""
    return BlockHash(bytes(path).ljust(31, b"\xff") + b"\1")


def index_of(*paths: tuple[int, ...]) -> Index:
    index = Index()
    for page, path in enumerate(sorted(paths, key=len)):
        parent = block(*path[:-1]) if len(path) > 1 else SEED
        assert index.insert(Entry(block(*path), parent, PageId(page), 4))
    return index


class Watched:
    def __init__(self) -> None:
        self.gone: list[BlockHash] = []

    def stored(self, entries) -> None: ...

    def removed(self, entries) -> None:
        self.gone += [entry.block_hash for entry in entries]


def test_what_nobody_pins_goes_at_once_with_all_that_continues_it():
    index = index_of((1,), (1, 1), (1, 1, 1), (1, 1, 2), (1, 2), (2,))
    index.watch = watched = Watched()
    removed, pinned = index.condemn(block(1, 1))
    assert {entry.block_hash for entry in removed} == {block(1, 1), block(1, 1, 1), block(1, 1, 2)}
    assert pinned == []
    assert set(watched.gone) == {entry.block_hash for entry in removed}
    assert len(index) == 3


def test_what_is_pinned_stays_under_a_name_that_nobody_asks_for_until_its_last_pin_ends():
    index = index_of((1,), (1, 1), (1, 1, 1))
    kept = index.get(block(1, 1))
    assert kept is not None
    index.pin([kept])
    index.watch = watched = Watched()
    removed, pinned = index.condemn(block(1, 1))
    assert [entry.block_hash for entry in removed] == [block(1, 1, 1)]
    assert pinned == [kept]
    assert block(1, 1) not in index
    assert block(1, 1) in watched.gone
    assert index.num_pinned == 1
    fresh = Entry(block(1, 1), block(1), PageId(9), 4)
    assert index.insert(fresh)  # computed again
    assert [entry.page for entry in index.prefix([block(1), block(1, 1)])] == [0, 9]
    index.unpin([kept])
    assert index.num_pinned == 0
    assert {entry.page for entry in iter(index.evict, None)} == {0, 1, 9}
    assert len(index) == index.num_branches == 0


def test_a_block_that_is_unknown_or_known_elsewhere_changes_nothing():
    index = index_of((1,), (1, 1))
    assert index.condemn(block(7)) == ([], [])
    assert len(index) == 2


def twin_of(index: Index, path: tuple[int, ...], page: int) -> Entry:
    """An engine's page of a block that is indexed under another."""
    twin = Entry(block(*path), block(*path[:-1]), PageId(page), 4)
    pinned: Pinned = {twin.page: twin}
    index.twins.add(twin, pinned, index.get(twin.block_hash))
    return twin


def test_twins_are_condemned_with_what_they_may_have_been_computed_from():
    """Also those of blocks that have left the index meanwhile, and what is indexed behind such a twin."""
    index = index_of((1,), (1, 1), (1, 1, 1, 1), (2,), (2, 1))
    twins = [twin_of(index, (1, 1), 10), twin_of(index, (1, 1, 1), 11)]  # (1, 1, 1) itself is not indexed
    good = twin_of(index, (2, 1), 12)
    behind = index.get(block(1, 1, 1, 1))
    assert behind is not None
    index.pin([behind])
    removed, pinned = index.condemn(block(1))
    assert {entry.block_hash for entry in removed} == {block(1), block(1, 1)}
    assert pinned == [behind, *twins]
    assert index.twins.pages.keys() == {good.block_hash, *(twin.block_hash for twin in twins)}
    assert not {block(1, 1), block(1, 1, 1), block(1, 1, 1, 1)} & {entry.block_hash for entry in pinned}
    for twin in (*twins, good):  # its engine uses it no more
        index.twins.end(twin)
    assert not index.twins.pages


def computed_by_two() -> tuple[Spaces, list, list, list]:
    """Engine 1 has computed a, b; engine 2, whose request leases the page of a, has computed b beside it."""
    rig = Spaces(16)
    rig.worker(1, "cpu:0")
    rig.worker(2, "cpu:0")
    rig.client(FRONT, "i2")
    hashes = chain("a", "b")
    pages = rig.save(1, hashes)
    acquire(rig, hashes[:1], until_release=True)
    twin = rig.take(2, 1)
    rig.write(2, twin)
    rig.seal(2, twin, hashes, first=1)
    return rig, hashes, pages, twin


def test_a_block_that_was_computed_anew_is_not_replaced_by_a_twin_that_was_computed_from_wrong_bytes():
    rig, hashes, pages, _ = computed_by_two()
    rig.run(rig.core.on_corrupt(0, hashes[0], 0))
    assert rig.core.counters["blocks_condemned"] == 3
    rig.say(1, wire.Unpin(**page_lists(pages)))
    fresh = rig.save(1, hashes)
    rig.say(1, wire.Unpin(**page_lists(fresh)))
    acquire(rig, hashes, call_id=2)
    assert u32_list(answers(rig, FRONT, wire.Acquired)[-1].pages) == [page for page, _ in fresh]


@pytest.mark.parametrize("leases", [True, False])
def test_what_an_engine_computes_from_a_condemned_block_is_not_found_until_it_has_let_go_of_that(leases):
    """Whether it leases that page or has computed it itself."""
    rig = Spaces(16)
    rig.worker(1, "cpu:0")
    rig.worker(2, "cpu:0", quota=6)
    rig.client(FRONT, "i2")
    hashes = chain("a", "b", "c")
    pages = rig.save(1 if leases else 2, hashes[:1])
    if leases:
        acquire(rig, hashes[:1], until_release=True)
    late = rig.take(2, 2)
    rig.write(2, late)
    rig.run(rig.core.on_corrupt(0, hashes[0], 0))
    rig.save(1, hashes[:1])  # by another engine
    rig.seal(2, late, hashes, first=1)  # what its step was about to write, and what it computed from that
    rig.run(rig.core.on_corrupt(0, chain("other")[0], 0))
    assert [each in rig.core.pools[0].index for each in hashes] == [True, False, False]
    if leases:
        (lease,) = answers(rig, FRONT, wire.Acquired)
        rig.say(2, wire.Release(lease_id=lease.lease_id))
    rig.say(1 if leases else 2, wire.Unpin(**page_lists(pages)))
    rig.say(2, wire.Unpin(**page_lists(late)))
    fresh = rig.save(2, hashes)
    acquire(rig, hashes, call_id=2)
    assert u32_list(answers(rig, FRONT, wire.Acquired)[-1].pages)[1:] == [page for page, _ in fresh[1:]]
    rig.run(rig.core.on_corrupt(0, chain("other")[0], 0))
    assert not rig.core.pools[0].index.condemned, "nobody has any of them"


PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)


@given(st.sets(PATHS, min_size=1, max_size=24), st.data())
def test_whatever_is_pinned_and_condemned_the_rest_is_found_and_everything_goes_in_the_end(paths, data):
    whole = sorted({path[: n + 1] for path in paths for n in range(len(path))}, key=len)
    index = index_of(*whole)
    pins = data.draw(st.lists(st.sampled_from(whole), max_size=8))
    held = [entry for path in pins if (entry := index.get(block(*path))) is not None]
    index.pin(held)
    bad: set[tuple[int, ...]] = set()
    fresh = count(1000)
    for path in data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=3)):
        removed, pinned = index.condemn(block(*path))
        if path in bad:
            assert (removed, pinned) == ([], [])
            continue
        behind = {other for other in whole if other[: len(path)] == path} - bad
        assert len(removed) + len(pinned) >= len(behind)  # what is condemned already may lie behind it too
        assert all(not entry.pins for entry in removed)
        bad |= behind
        if path[:-1] not in bad and data.draw(st.booleans()):  # some are computed again
            again = Entry(block(*path), block(*path[:-1]) if len(path) > 1 else SEED, PageId(next(fresh)), 4)
            assert index.insert(again)
            bad.discard(path)
    for path in whole:
        hashes = [block(*path[: n + 1]) for n in range(len(path))]
        good = next((n for n in range(len(path)) if path[: n + 1] in bad), len(path))
        assert [entry.block_hash for entry in index.prefix(hashes)] == hashes[:good]
    assert index.num_pinned == len({id(entry) for entry in held})
    half = data.draw(st.integers(0, len(held)))
    index.unpin(held[:half])
    gone = index.delete_unpinned()  # from under what is pinned still
    index.unpin(held[half:])
    assert index.num_pinned == 0
    gone += iter(index.evict, None)
    assert len(index) == index.num_branches == 0
    assert len({entry.page for entry in gone}) == len(gone)
