"""Copies of lent pages in any order and at any time: no producer's budget is exceeded, none is lost, none overtakes."""

from hypothesis import given
from hypothesis import strategies as st

from services.mempool.core.actions import CopyPages, PunchPages
from services.mempool.core.lending_copies import LendingCopies
from services.mempool.core.loans import Shelf
from services.mempool.core.page_table import PageTable
from shared.ids import Epoch, PageId

PAGE = 100
PATIENCE_MS = 150
RATE = 1_000  # bytes per second: a page takes 100 ms
CONSUMER, DRAM = 3, 9
SHELVES = {10: 1, 11: 1, 12: 2}  # space of lent pages -> its producer


def make() -> LendingCopies:
    shelves = {n: Shelf(n, producer, CONSUMER, PageTable(8, Epoch(1))) for n, producer in SHELVES.items()}
    made = LendingCopies(shelves, lambda _: PAGE, lambda number: number == DRAM, PATIENCE_MS)
    made.limit(RATE)
    return made


copy = st.tuples(
    st.sampled_from([CONSUMER, DRAM, *SHELVES]),  # target
    st.lists(st.sampled_from([CONSUMER, DRAM, *SHELVES]), min_size=1, max_size=4),  # source of each page
    st.booleans(),  # somebody waits for it
)
turn = st.tuples(
    st.integers(0, 400), st.lists(copy, max_size=3), st.sampled_from([None, None, None, *SHELVES])
)


def producers(action: CopyPages) -> dict[int, int]:
    """Pages that a copy reads or writes, by whose they are."""
    out: dict[int, int] = {}
    for space in [*(space for space, _ in action.sources), *[action.space] * len(action.sources)]:
        if space in SHELVES:
            out[SHELVES[space]] = out.get(SHELVES[space], 0) + 1
    return out


@given(turns=st.lists(turn, max_size=30))
def test_copies_begin_within_the_budget_in_order_or_are_refused(turns):
    copies, now, number = make(), 0, 0
    asked: dict[int, CopyPages] = {}
    asked_at: dict[int, int] = {}
    readers: set[int] = set()
    begun: list[tuple[int, int]] = []  # (when, number)
    ended: set[int] = set()

    def issue(new: list, overdue: int | None) -> None:
        out, refused = copies.issue(
            new, now, has_reader=readers.__contains__, dropping=lambda shelf: shelf.number == overdue
        )
        for action in out:
            if isinstance(action, CopyPages):
                assert action.copy_id not in ended
                wanted = asked[action.copy_id]
                assert action.targets == wanted.targets
                assert [page for _, page in action.sources] == [page for _, page in wanted.sources]
                spaces = [action.space, *(space for space, _ in action.sources)]
                assert not set(spaces) & SHELVES.keys(), "pages are named as their owner's"
                ended.add(action.copy_id)
                begun.append((now, action.copy_id))
        for copy_id in refused:
            assert copy_id not in ended
            ended.add(copy_id)
            is_late = copy_id in readers and now - asked_at[copy_id] >= PATIENCE_MS
            touched = {asked[copy_id].space, *(space for space, _ in asked[copy_id].sources)}
            assert is_late or overdue in touched

    for dt, wanted, overdue in turns:
        now += dt
        new = []
        for target, sources, has_reader in wanted:
            number += 1
            pages = [PageId(i) for i in range(len(sources))]
            asked[number] = CopyPages(number, target, pages, list(zip(sources, pages, strict=True)), 1_000)
            asked_at[number] = now
            readers |= {number} if has_reader else set()
            new.append(asked[number])
        issue(new, overdue)
    while (when := copies.next_ms(now)) is not None:
        now = max(now + 1, when)
        issue([], None)
    assert ended == set(asked), "none is held for ever"
    for producer in set(SHELVES.values()):
        mine = [(at, asked[n]) for at, n in begun if producer in producers(asked[n])]
        assert [action.copy_id for _, action in mine] == sorted(action.copy_id for _, action in mine)
        sizes = [producers(action)[producer] * PAGE for _, action in mine]
        for first in range(len(mine)):
            for last in range(first, len(mine)):
                allowed = (mine[last][0] - mine[first][0]) * RATE / 1_000 + RATE / 10
                assert sum(sizes[first:last]) <= allowed, "and one copy"
    untouched = [n for n, action in asked.items() if not producers(action)]
    assert all(any(at == asked_at[n] for at, other in begun if other == n) for n in untouched)


def test_what_is_no_copy_of_lent_pages_passes_as_it_is():
    copies = make()
    punch = PunchPages([PageId(1)])
    plain = CopyPages(1, CONSUMER, [PageId(0)], [(DRAM, PageId(4))], 1_000)
    out, refused = copies.issue([punch, plain], 0, has_reader=lambda _: True, dropping=lambda _: True)
    assert out == [punch, plain]
    assert not refused
    assert copies.num_back == {CONSUMER: 1}
