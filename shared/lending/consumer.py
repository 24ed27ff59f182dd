"""Whether a space borrows: what it asks for when host memory has what it reads, and when it returns that. No I/O.

    content --ask_bytes came back in window_ms, or are read there in place--> asking --granted--> borrowing
    borrowing --renewed at half its time--> borrowing
    asking --refused--> content, for pause_ms and twice as long each time     borrowing --idle_ms unused--> returned

What comes back had left for lack of room and is wanted again: pages of requests that waited for their turn (AQUA's swap
space), and prefixes that overflowed; the mempool lends the same pages for both. What only leaves says nothing: a cache
that is full turns over. Blocks of a prompt longer than its engine's memory never come back: each step reads them where
they are, so that what counts of them is how many are in host memory now. AQUA 4.1 (swap need), 6 and 9.2.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.ids import LeaseId
from shared.lending.load import MAX_READINGS
from shared.lending.rules import EngineProfile, LendingRules


@dataclass(frozen=True, slots=True)
class Need:
    """A reading of one space.

    Args:
        back_bytes: blocks that came back to it from host memory, since its start.
        moved_bytes: into and out of pages that are lent to it, since its start.
        read_bytes: of pages that are lent to it and read in place now.
        far_bytes: blocks of running requests that are read in host memory now, or found no room even there, beyond
            what lent pages have room for.
        is_stuck: some found no room.
    """

    back_bytes: int
    moved_bytes: int
    read_bytes: int = 0
    far_bytes: int = 0
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A loan to the space, as its mempool knows it."""

    lease_id: LeaseId
    length_bytes: int
    remaining_ms: int
    is_held: bool  # not on its way back


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for so many bytes, least_bytes at least; answered by Consumer.answered().

    Args: in_place: of whom the engine can map pages: they are to be read there.
    """

    length_bytes: int
    least_bytes: int
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """It goes on for ttl_ms."""

    lease_id: LeaseId
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Return:
    """Nobody used it."""

    lease_id: LeaseId


class Consumer:
    """Of one space. Same readings, same decisions.

    Args: profiles: of the engines in the space; their need is the most that is asked for.
    """

    def __init__(self, rules: LendingRules, profiles: Sequence[EngineProfile] = ()) -> None:
        self._rules = rules
        self._limit_bytes = rules.borrow_bytes
        if profiles:
            self._limit_bytes = min(self._limit_bytes, sum(max(0, -each.num_bytes) for each in profiles))
        self._back: deque[tuple[int, int]] = deque(
            maxlen=MAX_READINGS
        )  # (when, bytes since the reading before)
        self._last: Need | None = None
        self._used_at_ms: int | None = None
        self._paused_until_ms = 0
        self._pause_ms = rules.pause_ms
        self.is_asking = False

    def answered(self, now_ms: int, *, granted: bool, retry_after_ms: int = 0) -> None:
        """Ask has its answer. Args: retry_after_ms: what the coordinator said; the pause is at least as long."""
        self.is_asking = False
        if granted:
            self._pause_ms = self._rules.pause_ms
            self._used_at_ms = now_ms
            return
        self._paused_until_ms = now_ms + max(self._pause_ms, min(retry_after_ms, self._rules.max_pause_ms))
        self._pause_ms = min(2 * self._pause_ms, self._rules.max_pause_ms)

    def lost(self, now_ms: int) -> None:
        """A loan was taken back: whoever lent it needs it."""
        self._paused_until_ms = max(self._paused_until_ms, now_ms + self._rules.pause_ms)

    @property
    def is_short(self) -> bool:
        """Whether so much came back within the window, or is read in host memory, that memory is to be asked for."""
        far = self._last
        is_stuck, far_bytes = (far.is_stuck, far.far_bytes) if far is not None else (False, 0)
        return is_stuck or self._back_bytes + far_bytes >= self._rules.ask_bytes

    @property
    def _back_bytes(self) -> int:
        return sum(count for _, count in self._back)

    def decide(
        self, loans: Sequence[Borrowed], now_ms: int, *, lends: bool = False, lives: bool = True
    ) -> list[Ask | Renew | Return]:
        """After note(). Args: lends: the space has offers of its own; lives: its engines report. Who is silent renews
        nothing.
        """
        held = [loan for loan in loans if loan.is_held]
        if not lives or self._used_at_ms is None:
            return []
        if held and now_ms - self._used_at_ms >= self._rules.idle_ms:
            return [Return(loan.lease_id) for loan in held]
        out: list[Ask | Renew | Return] = [
            Renew(loan.lease_id, self._rules.ttl_ms)
            for loan in held
            if 0 < loan.remaining_ms <= self._rules.ttl_ms // 2
        ]
        return out + self._ask(loans, now_ms, lends=lends)

    def note(self, need: Need, now_ms: int) -> None:
        """A reading."""
        before, self._last = self._last, need
        has_moved = before is not None and need.moved_bytes != before.moved_bytes
        if self._used_at_ms is None or has_moved or need.read_bytes:
            self._used_at_ms = now_ms
        if before is not None and need.back_bytes > before.back_bytes:
            self._back.append((now_ms, need.back_bytes - before.back_bytes))
        while self._back and self._back[0][0] <= now_ms - self._rules.window_ms:
            self._back.popleft()

    def _ask(self, loans: Sequence[Borrowed], now_ms: int, *, lends: bool) -> list[Ask]:
        back_bytes = self._back_bytes
        room_bytes = self._limit_bytes - sum(loan.length_bytes for loan in loans)
        if not self.is_short or room_bytes <= 0 or lends or self.is_asking or now_ms < self._paused_until_ms:
            return []
        self.is_asking = True
        self._back.clear()  # what came back is asked for once
        far_bytes = self._last.far_bytes if self._last is not None else 0
        length_bytes = min(room_bytes, max(back_bytes + far_bytes, self._rules.ask_bytes))
        least_bytes = min(length_bytes, self._rules.ask_bytes)
        return [Ask(length_bytes, least_bytes, in_place=back_bytes < self._rules.ask_bytes)]
