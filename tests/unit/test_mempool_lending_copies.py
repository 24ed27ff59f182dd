"""Copies that wait for a lender's budget: those that a request's turn waits for begin first."""

from services.mempool.core.actions import CopyPages
from services.mempool.core.lending_copies import LendingCopies
from services.mempool.core.loans import Shelf
from services.mempool.core.page_table import PageTable
from shared.ids import Epoch, PageId

LOAN, PRODUCER, CONSUMER = 5, 1, 0


def copy(number: int) -> CopyPages:
    return CopyPages(number, LOAN, [PageId(number)], [(CONSUMER, PageId(number))], 100)


def issue(copies: LendingCopies, numbers: list[int], now_ms: int) -> list[int]:
    begun, refused = copies.issue(
        map(copy, numbers), now_ms, has_reader=lambda _: False, dropping=lambda _: False,
        goes_first=lambda number: number >= 10,
    )  # fmt: skip
    assert not refused
    return [action.copy_id for action in begun if isinstance(action, CopyPages)]


def test_within_the_budget_swaps_begin_before_what_came_earlier_and_nobody_waits_for():
    shelf = Shelf(LOAN, PRODUCER, CONSUMER, PageTable(16, Epoch(1)))
    copies = LendingCopies({LOAN: shelf}, lambda _: 1_000, lambda _: False, 50)
    copies.limit(1_000)
    assert issue(copies, [1], 0) == [1]
    assert issue(copies, [2, 3], 0) == []
    assert issue(copies, [10, 11], 0) == []
    order = [number for second in range(1, 8) for number in issue(copies, [], 1_000 * second)]
    assert order == [10, 11, 2, 3]


def test_without_a_budget_everything_begins_swaps_first():
    shelf = Shelf(LOAN, PRODUCER, CONSUMER, PageTable(16, Epoch(1)))
    copies = LendingCopies({LOAN: shelf}, lambda _: 1_000, lambda _: False, 50)
    assert issue(copies, [1, 2, 10], 0) == [10, 1, 2]
