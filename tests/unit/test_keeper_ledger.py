"""The keeper's bookkeeping: which descriptors it holds for which pages, who may change that, what is bounded."""

import pytest

from services.mempool.keeper import ledger
from services.mempool.keeper.ledger import BadRange, Floor, KeeperFull, Ledger
from shared.errors import StaleEpoch
from shared.ids import Epoch
from shared.wire.keeper import MAX_FDS, MAX_META_BYTES


def everything(book: Ledger, space: str = "s", kind: str = "cuda-page") -> dict[int, int]:
    """page -> descriptor, as Fetch would find it."""
    out, after = {}, 0
    while (held := book.held(space, kind, after)) is not None:
        first, count, _, fds = held
        out |= dict(zip(range(first, first + count), fds, strict=True))
        after = first + count
    return out


def kept(book: Ledger, first: int, fds: list[int], meta: bytes = b"") -> list[int]:
    return book.keep("s", "cuda-page", first, len(fds), meta, fds)


def test_what_was_kept_is_found_in_page_order_whatever_the_order_it_came_in():
    book = Ledger(100)
    for first in (8, 0, 4):
        assert kept(book, first, [first + 10, first + 11]) == []
    assert everything(book) == {0: 10, 1: 11, 4: 14, 5: 15, 8: 18, 9: 19}
    assert book.num_fds == 6


def test_keeping_again_replaces_and_says_what_to_close():
    book = Ledger(100)
    kept(book, 0, [10, 11, 12, 13])
    assert kept(book, 1, [21, 22]) == [11, 12]
    assert everything(book) == {0: 10, 1: 21, 2: 22, 3: 13}
    assert book.num_fds == 4


def test_forgetting_closes_exactly_these_pages():
    book = Ledger(100)
    kept(book, 0, [10, 11, 12, 13])
    assert book.forget("s", "cuda-page", 1, 2) == [11, 12]
    assert book.forget("s", "cuda-page", 1, 2) == []
    assert book.forget("unknown", "cuda-page", 0, 5) == []
    assert everything(book) == {0: 10, 3: 13}
    assert book.forget("s", "cuda-page", 0, 1 << 32) == [10, 13]
    assert (book.num_fds, list(book.summary())) == (0, [])


def test_neighbours_of_one_meta_become_one_run_and_are_handed_out_in_messages():
    book = Ledger(2000)
    for first in range(0, 1000, 100):
        kept(book, first, list(range(first, first + 100)), b"m")
    first, count, meta, fds = book.held("s", "cuda-page", 0)
    assert (first, count, meta, len(fds)) == (0, MAX_FDS, b"m", MAX_FDS)
    assert everything(book) == {n: n for n in range(1000)}
    kept(book, 1000, [5000], b"other")
    assert book.held("s", "cuda-page", 1000)[2] == b"other"


def test_one_descriptor_for_many_pages_is_all_or_nothing():
    book = Ledger(100)
    book.keep("s", "pages", 0, 1000, b"", [7])
    with pytest.raises(BadRange):
        book.forget("s", "pages", 0, 999)
    with pytest.raises(BadRange):
        book.keep("s", "pages", 500, 10, b"", [8])
    assert book.held("s", "pages", 999)[:2] == (0, 1000)
    assert book.keep("s", "pages", 0, 1000, b"", [9]) == [7]
    assert book.num_fds == 1


@pytest.mark.parametrize(
    ("kind", "first", "count", "fds"),
    [
        ("cuda-page", 0, 2, [1]),
        ("pages", 0, 2, [1, 2]),
        ("table", 0, 1, []),
        ("cuda-page", -1, 1, [1]),
        ("cuda-page", 0, 0, []),
        ("cuda-page", 1 << 32, 1, [1]),
    ],
)
def test_a_range_that_does_not_fit_its_descriptors_changes_nothing(kind, first, count, fds):
    book = Ledger(100)
    with pytest.raises(BadRange):
        book.keep("s", kind, first, count, b"", fds)
    assert (book.num_fds, list(book.summary())) == (0, [])


def test_a_full_keeper_refuses_and_changes_nothing():
    book = Ledger(3)
    kept(book, 0, [10, 11, 12])
    with pytest.raises(KeeperFull):
        kept(book, 3, [13])
    with pytest.raises(KeeperFull):
        kept(book, 2, [22, 23])
    assert everything(book) == {0: 10, 1: 11, 2: 12}
    assert kept(book, 0, [20, 21, 22]) == [10, 11, 12]


def test_spaces_and_meta_are_bounded():
    book = Ledger(10_000)
    for number in range(ledger.MAX_SPACES):
        book.keep(f"s{number}", "table", 0, 1, b"", [number])
    with pytest.raises(KeeperFull):
        book.keep("one more", "table", 0, 1, b"", [99])
    with pytest.raises(KeeperFull):
        book.keep("s0", "table", 0, 1, b"x" * (MAX_META_BYTES + 1), [99])
    room = ledger.MAX_META_TOTAL_BYTES // MAX_META_BYTES
    for page in range(room):
        book.keep("s0", "cuda-page", page, 1, bytes([page % 256]) * MAX_META_BYTES, [page])
    with pytest.raises(KeeperFull):
        book.keep("s0", "cuda-page", room, 1, b"one more", [room])
    with pytest.raises(BadRange):
        book.keep("", "table", 0, 1, b"", [1])


def test_an_old_generation_never_gets_the_floor_back():
    floor = Floor()
    assert floor.take(1, Epoch(5)) == 0
    floor.check(1)
    assert floor.take(2, Epoch(6)) == 5
    with pytest.raises(StaleEpoch):
        floor.check(1)
    with pytest.raises(StaleEpoch):
        floor.take(1, Epoch(5))
    floor.check(2)


def test_the_same_mempool_may_reconnect_and_its_old_connection_ends():
    floor = Floor()
    floor.take(1, Epoch(5))
    assert floor.take(2, Epoch(5)) == 5
    floor.check(2)
    with pytest.raises(StaleEpoch):
        floor.check(1)


def test_nobody_has_the_floor_before_the_first_hello():
    with pytest.raises(StaleEpoch):
        Floor().check(1)
    with pytest.raises(StaleEpoch):
        Floor().take(1, Epoch(0))
