"""A condemned block, and what is behind it, is found by nobody; when its last pin has ended it goes as others do."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from services.mempool.core.entry import Entry
from services.mempool.core.radix import Index
from shared.ids import BlockHash, PageId

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
