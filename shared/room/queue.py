"""Which handed-over prompts begin, and which wait where their pages are: in order of arrival. No I/O.

    ask() -> waiting -> admitted: the figures have room for it, or its time is over -> entering -> in the figures
                   \\-- leave(): the client left

What is admitted counts until the engine's own figures know of it. With nothing in the engine the first always begins.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from msgspec import Struct

from shared.room.growth import Need, growth_pages


class Figures(Struct, frozen=True):
    """Of an engine's pages now."""

    num_pages: int  # that it may have at all
    free: int  # of these free, or cached and used by nobody
    in_use: int  # by its requests, shared ones once
    needs: Sequence[Need]  # of its requests
    answer_tokens: int  # of an answer without a bound

    def lacking(self, new: Sequence[Need]) -> int:
        """Pages that the worst moment ahead would lack if these began now; at most 0: there is room."""
        begin = sum(need.held for need in new)
        return begin + growth_pages([*self.needs, *new], in_use=self.in_use + begin) - self.free


class _Waiting(Struct):
    need: Need
    until_ms: int


class RoomQueue:
    """Of one engine. Args: most: that wait; beyond, the first begins."""

    def __init__(self, most: int = 4_096) -> None:
        self._most = most
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._entering: dict[str, Need] = {}
        self._entered: deque[tuple[int, str]] = deque()  # number of the last question that may not know of it
        self._asked = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def pages(self) -> int:
        """That those may need of whom the engine's figures do not know yet."""
        needs = [*(one.need for one in self._waiting.values()), *self._entering.values()]
        return sum(need.held + need.more for need in needs)

    def ask(self, key: str, need: Need, *, until_ms: int) -> None:
        """A prompt wants to begin, at the latest then. Asking twice changes nothing."""
        if key not in self._entering:
            self._waiting.setdefault(key, _Waiting(need, until_ms))

    def leave(self, key: str) -> None:
        """It is over, wherever it was. Unknown ones are ignored."""
        self._waiting.pop(key, None)
        self._entering.pop(key, None)

    def entered(self, key: str) -> None:
        """The engine is about to get it: the second question from now knows of it."""
        self._entered.append((self._asked + 1, key))

    def question(self) -> int:
        """The number of the question for figures that is about to be put to the engine."""
        self._asked += 1
        return self._asked

    def figures_came(self, question: int) -> None:
        """The engine's answer to it."""
        while self._entered and self._entered[0][0] < question:
            self._entering.pop(self._entered.popleft()[1], None)

    def admit(self, figures: Figures | None, *, now_ms: int) -> list[str]:
        """Who begins now: whose time is over, then the first ones in order; the first that has no room keeps those
        behind it waiting. None: not known."""
        # wherever they stand: one whose pages another host holds has less time than one before it
        out = [key for key, one in self._waiting.items() if now_ms >= one.until_ms]
        for key in out:
            self._enter(key)
        while self._waiting:
            key, first = next(iter(self._waiting.items()))
            if not (
                figures is None
                or not (figures.needs or self._entering)
                or len(self._waiting) > self._most
                or figures.lacking([*self._entering.values(), first.need]) <= 0
            ):
                break
            self._enter(key)
            out.append(key)
        return out

    def _enter(self, key: str) -> None:
        self._entering[key] = self._waiting.pop(key).need
