"""Which blocks are far: no place serves two blocks or is lost, whatever is answered, moved, refused and ended, when."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.fair.far import PATIENCE_S, RETRY_S, Candidate, FarBook, choose
from shared.ids import BlockHash
from shared.wire.mempool_far import NO_PLACE
from tests.support.examples import examples

CAPACITY, SPARE = 12, 4
REQUESTS = ("a", "b", "c")


@given(st.lists(st.lists(st.integers(0, 50), unique=True, max_size=12), max_size=5), st.integers(-3, 40))
@settings(max_examples=examples(300), deadline=None)
def test_the_oldest_blocks_of_the_longest_requests_leave_and_no_more_than_are_wanted(lists, count):
    candidates = [Candidate(str(n), sorted(positions)) for n, positions in enumerate(lists)]
    chosen = dict(choose(candidates, count))
    movable = sum(len(c.movable) for c in candidates)
    assert sum(map(len, chosen.values())) == max(0, min(count, movable))
    taken = {c.request_id: list(chosen.get(c.request_id, [])) for c in candidates}
    for c in candidates:
        assert taken[c.request_id] == list(c.movable[: len(taken[c.request_id])])
    partly = [c for c in candidates if len(taken[c.request_id]) < len(c.movable)]
    assert all(
        len(c.movable) <= len(d.movable)
        for c in partly
        for d in candidates
        if taken[d.request_id] and d not in partly
    )


class Host:
    """A mempool with CAPACITY + SPARE places, an engine's tables, and a book between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.book = FarBook(CAPACITY)
        self.free = set(range(CAPACITY + SPARE))
        self.calls: list[tuple[int, str, list[int]]] = []  # not answered yet
        self.tables: dict[str, dict[int, int]] = {name: {} for name in REQUESTS}  # position -> place
        self.now_s = 0.0

    def ask(self) -> None:
        name = self.rng.choice(REQUESTS)
        leaving = self.book.leaving(name)
        open_ = [p for p in range(30) if p not in leaving and p not in self.tables[name]]
        count = min(self.rng.randint(1, 6), self.book.room(self.now_s), len(open_))
        if count:
            blocks = {p: BlockHash(bytes([p]) * 32) for p in open_[:count]}
            self.calls.append((self.book.ask(name, blocks, self.now_s), name, list(blocks)))
            assert self.book.leaving(name) >= set(blocks)

    def answer(self) -> None:
        if not self.calls:
            return
        number, name, positions = self.calls.pop(self.rng.randrange(len(self.calls)))
        places = [self.free.pop() if self.free and self.rng.random() < 0.8 else NO_PLACE for _ in positions]
        found = self.book.placed(number, places, self.now_s)
        assert found is not None
        assert found.request_id == name
        said = [place for _, place in found.entries] + found.strays
        assert sorted(said) == sorted(place for place in places if place != NO_PLACE)
        assert not (found.entries and found.strays)
        for position, place in found.entries:
            if self.rng.random() < 0.9:
                self.book.take(name, position, place)
                self.tables[name][position] = place
            else:  # another request came with the same prefix
                self.free.add(place)
        self.free.update(found.strays)
        if NO_PLACE in places:
            assert self.book.room(self.now_s) == 0

    def move(self) -> None:
        used = [place for table in self.tables.values() for place in table.values()]
        stale = [CAPACITY + SPARE + 1]  # what the engine has dropped meanwhile
        pairs = [
            (old, self.free.pop() if self.free and self.rng.random() < 0.7 else NO_PLACE)
            for old in self.rng.sample(used, min(len(used), 3)) + stale
        ]
        moved, strays = self.book.moved(pairs)
        self.free.update(strays)
        for one in moved:
            assert self.tables[one.request_id].pop(one.position) == one.old
            self.free.add(one.old)
            if one.new != NO_PLACE:
                self.tables[one.request_id][one.position] = one.new
        assert {one.old for one in moved} == {old for old, _ in pairs if old in used}

    def end(self) -> None:
        name = self.rng.choice(REQUESTS)
        self.book.forget(name)
        self.free.update(self.tables[name].values())
        self.tables[name].clear()

    def check(self) -> None:
        used = [place for table in self.tables.values() for place in table.values()]
        assert len(used) == len(set(used)) == self.book.num_far
        assert self.book.num_far + self.book.num_asked <= CAPACITY + SPARE
        assert self.book.num_asked == sum(len(positions) for _, _, positions in self.calls)
        assert self.book.in_use == bool(used or self.calls)
        assert 0 <= self.book.room(self.now_s) <= self.book.spare
        assert len(self.book._asked) <= self.book.num_asked <= CAPACITY


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_places_add_up_whatever_happens(seed):
    host = Host(random.Random(seed))
    for _ in range(120):
        host.rng.choice([host.ask, host.ask, host.answer, host.answer, host.move, host.end])()
        host.now_s += host.rng.choice([0.0, RETRY_S, PATIENCE_S])
        host.check()
    while host.calls:
        host.answer()
    for name in REQUESTS:
        host.book.forget(name)
    assert not host.book.in_use


def test_who_waits_for_places_that_are_refused_waits_no_longer_than_its_patience():
    book = FarBook(4)
    number = book.ask("a", {0: BlockHash(b"\1" * 32)}, 9.0)
    book.placed(number, [NO_PLACE], 10.0)
    assert book.room(10.0) == 0
    assert book.room(10.0 + RETRY_S) == 4
    number = book.ask("a", {0: BlockHash(b"\1" * 32)}, 11.0)
    book.placed(number, [NO_PLACE], 11.0)
    assert book.is_worth_waiting(9.9 + PATIENCE_S)
    assert not book.is_worth_waiting(10.0 + PATIENCE_S)
    number = book.ask("a", {0: BlockHash(b"\1" * 32)}, 11.0)
    book.placed(number, [3], 13.0)
    assert not book.is_worth_waiting(13.0), "nothing is on its way, and nothing was refused since"
    for now_s in (50.0, 90.0):  # what was refused long ago does not count
        number = book.ask("a", {1: BlockHash(b"\1" * 32)}, now_s)
        book.placed(number, [NO_PLACE], now_s)
        assert book.is_worth_waiting(now_s)


def test_who_waits_for_an_answer_that_never_comes_waits_no_longer_than_its_patience():
    """A rank that answers its mempool no more held every request that found no page, for ever."""
    book = FarBook(4)
    number = book.ask("a", {0: BlockHash(b"\1" * 32)}, 10.0)
    assert book.is_worth_waiting(9.9 + PATIENCE_S)
    assert not book.is_worth_waiting(10.0 + PATIENCE_S)
    assert book.room(10.0 + PATIENCE_S) == 3, "it may be answered yet"
    found = book.placed(number, [2], 90.0)
    assert found is not None
    assert found.entries == [(0, 2)]


def test_an_answer_to_nothing_known_is_nobodys():
    assert FarBook(4).placed(7, [1], 0.0) is None
