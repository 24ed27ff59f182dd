"""Copies from and to lent pages: which producer's pages they touch, and when its budget lets them begin. No I/O.

Every copy that the mempool orders passes here last. One that touches lent pages is charged to their producers' budgets
(shared/lending/budget.py) and held while one of them is in debt: in order, for as long as it takes, but those first for
which a request's turn waits (`goes_first`: swaps), then what nobody waits for. One that a reader
waits for is refused when that would be longer than readers wait for pages, and so is every held copy of a loan past its
deadline: the producer's pages come back without it. What has to leave a page before it comes back, as its bytes are
nowhere else or an engine reads them, is charged and never held: the producer wants its memory more than its link.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from services.mempool.core.actions import Action, CopyPages
from services.mempool.core.loans import Shelf
from shared.lending.budget import Budget

BURST_PARTS = 10  # a rested budget lets a tenth of a second's bytes pass at once


@dataclass(slots=True)
class _Held:
    action: CopyPages
    until_ms: int | None  # refused then; None: nobody waits for it
    goes_first: bool = False


class LendingCopies:
    """Of one mempool.

    Args:
        shelves: by number of the space of lent pages, a view.
        unit_bytes: of a page of a space, on all ranks.
        is_dram: whether a space is host memory behind others.
        patience_ms: so long a copy is held for a reader.
    """

    def __init__(
        self,
        shelves: Mapping[int, Shelf],
        unit_bytes: Callable[[int], int],
        is_dram: Callable[[int], bool],
        patience_ms: int,
    ) -> None:
        self._shelves, self._unit_bytes, self._patience_ms = shelves, unit_bytes, patience_ms
        self._is_dram = is_dram
        self._bytes_per_s = 0
        self._own_limits: dict[int, int] = {}  # by number of the producer
        self._budgets: dict[int, Budget] = {}  # by number of the producer
        self._held: deque[_Held] = deque()
        self.num_moved: dict[int, int] = {}  # pages in and out, by number of the space of lent pages
        self.num_ended: Counter[int] = (
            Counter()
        )  # of spaces of lent pages that are over, by number of the borrower
        self.num_back: Counter[int] = Counter()  # blocks that host memory gave back, by number of the space
        self.num_refused = 0

    def limit(self, bytes_per_s: int) -> None:
        """Of each producer from now on; 0: none."""
        self._bytes_per_s = bytes_per_s
        self._budgets.clear()
        self._own_limits.clear()

    def limit_one(self, producer: int, bytes_per_s: int) -> None:
        """Of this producer, instead; 0: none. What it owes stays owed."""
        self._own_limits[producer] = bytes_per_s
        if (budget := self._budgets.get(producer)) is not None:
            budget.change(bytes_per_s, bytes_per_s // BURST_PARTS)

    def limit_of(self, producer: int) -> int:
        """Bytes per second; 0: no limit."""
        return self._own_limits.get(producer, self._bytes_per_s)

    def is_open(self, producer: int, now_ms: int) -> bool:
        """Whether a copy of this producer's lent pages could begin now."""
        budget = self._budgets.get(producer)
        return (budget is None or budget.is_open(now_ms)) and not any(
            producer in self._producers(held.action) for held in self._held
        )

    def issue(
        self,
        copies: Sequence[Action],
        now_ms: int,
        *,
        has_reader: Callable[[int], bool],
        dropping: Callable[[Shelf], bool],
        goes_first: Callable[[int], bool] = lambda _: False,
        evacuates: Callable[[int], bool] = lambda _: False,
    ) -> tuple[list[Action], list[int]]:
        """What begins now, and numbers of copies that are refused.

        Args: has_reader, goes_first, evacuates: of a copy; dropping: whether a shelf's pages are overdue.
        """
        if not copies and not self._held:
            return [], []
        out: list[Action] = []
        refused: list[int] = []
        todo: list[_Held] = []
        for held in self._held:
            overdue = any(dropping(shelf) for shelf in self._touched(held.action))
            if overdue or (held.until_ms is not None and now_ms >= held.until_ms):
                refused.append(held.action.copy_id)
            else:
                todo.append(held)
        for action in copies:
            if isinstance(action, CopyPages) and not self._is_dram(action.space):
                by_space = Counter(map(itemgetter(0), action.sources))
                from_dram = sum(count for space, count in by_space.items() if self._is_dram(space))
                self.num_back[action.space] += from_dram
            if not isinstance(action, CopyPages) or not self._shelves or not self._touched(action):
                out.append(action)
                continue
            if evacuates(action.copy_id):
                self._start(action, now_ms, out)
                continue
            until_ms = now_ms + self._patience_ms if has_reader(action.copy_id) else None
            todo.append(_Held(action, until_ms, goes_first(action.copy_id)))
        self._held, blocked = deque(), set[int]()
        for held in sorted(todo, key=lambda held: not held.goes_first):
            self._pass(held, now_ms, blocked, out)
        self.num_refused += len(refused)
        return out, refused

    def _pass(self, held: _Held, now_ms: int, blocked: set[int], out: list[Action]) -> None:
        """It begins, unless a producer of it is in debt or has one held that came before. What has begun goes on: it
        costs what it would have cost as one copy."""
        producers, follows = self._producers(held.action), held.action.follows
        has_begun = follows and all(other.action.copy_id != follows for other in self._held)
        may_begin = not blocked & producers and all(self._budget(each).is_open(now_ms) for each in producers)
        if not (has_begun or may_begin):
            blocked |= producers
            self._held.append(held)
            return
        self._start(held.action, now_ms, out)

    def _start(self, action: CopyPages, now_ms: int, out: list[Action]) -> None:
        for shelf, count in self._touched(action).items():
            self._budget(shelf.producer).spend(count * self._unit_bytes(shelf.number), now_ms)
            self.num_moved[shelf.number] = self.num_moved.get(shelf.number, 0) + count
        out.append(self._physical(action))

    def _budget(self, producer: int) -> Budget:
        known = self._budgets.get(producer)
        if known is None:
            bytes_per_s = self.limit_of(producer)
            known = self._budgets[producer] = Budget(bytes_per_s, bytes_per_s // BURST_PARTS)
        return known

    def next_ms(self, now_ms: int) -> int | None:
        """When a held copy may begin or is refused."""
        due = [held.until_ms for held in self._held if held.until_ms is not None]
        for held in self._held:
            opens = (self._budget(each).opens_at_ms(now_ms) for each in self._producers(held.action))
            due.append(max((when for when in opens if when is not None), default=now_ms))
        return min(due, default=None)

    def _touched(self, action: CopyPages) -> dict[Shelf, int]:
        """Shelves, and how many of their pages it reads or writes."""
        out: dict[Shelf, int] = {}
        if (target := self._shelves.get(action.space)) is not None:
            out[target] = len(action.sources)
        for space, _ in action.sources:
            if (source := self._shelves.get(space)) is not None:
                out[source] = out.get(source, 0) + 1
        return out

    def _producers(self, action: CopyPages) -> set[int]:
        return {shelf.producer for shelf in self._touched(action)}

    def _physical(self, action: CopyPages) -> CopyPages:
        """The same copy, of and into the pages that were lent."""
        sources = [(self._producer(space), page) for space, page in action.sources]
        return replace(action, space=self._producer(action.space), sources=sources, raw=True)

    def _producer(self, number: int) -> int:
        shelf = self._shelves.get(number)
        return number if shelf is None else shelf.producer

    def end(self, shelf: Shelf) -> None:
        """Nothing is lent by its lender to its borrower any more: one of the two spaces is over."""
        self.num_ended[shelf.consumer] += self.num_moved.pop(shelf.number, 0)

    def forget(self, number: int) -> None:
        """The space is over, whoever it lent to or borrowed from."""
        self._own_limits.pop(number, None)
        self._budgets.pop(number, None)
        del self.num_back[number], self.num_ended[number]

    def spent_bytes(self) -> dict[int, int]:
        """By number of the producer."""
        return {number: budget.spent_bytes for number, budget in self._budgets.items()}

    @property
    def num_held(self) -> int:
        """Copies that wait for a budget."""
        return len(self._held)
