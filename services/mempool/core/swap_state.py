"""What swaps.py keeps of a swap, of a call that is not answered yet, and of a copy on its way. No I/O."""

from collections import Counter, deque
from dataclasses import dataclass, field

from services.mempool.core.engines import Engine
from services.mempool.core.entry import Entry
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, PageId

Place = tuple[Pool, Entry]


@dataclass(slots=True)
class Swap:
    """`kept`: pinned outside the engine's space. `adrift`: on their way between two places there, without a pin."""

    pool: Pool  # the engine's
    connection: int
    number: int
    kept: dict[BlockHash, Place] = field(default_factory=dict)
    adrift: set[BlockHash] = field(default_factory=set)
    loans: set[int] = field(default_factory=set)  # spaces of lent pages where some are, or were
    is_over: bool = False


@dataclass(slots=True)
class Job:
    """A SwapOut or SwapIn that is not answered yet."""

    swap: Swap
    engine: Engine
    hashes: list[BlockHash]
    is_in: bool
    waiting: deque[tuple[int, Place]] = field(default_factory=deque)  # position in the call; pinned there
    pages: list[PageId] = field(default_factory=list)  # in: granted, to copy into; as many as are waiting
    num_given: int = 0  # in: pages of the engine
    num_in_flight: int = 0
    arrived: dict[int, PageId] = field(default_factory=dict)  # in: by position
    came: Counter[str] = field(default_factory=Counter)

    def take(self, count: int) -> list[tuple[int, Place]]:
        """The next ones, in order; of what leaves the last ones: no block of the prompt is behind them, and their pages
        come free.
        """
        if self.is_in:
            return [self.waiting.popleft() for _ in range(count)]
        return [self.waiting.pop() for _ in range(count)][::-1]


@dataclass(frozen=True, slots=True)
class Copy:
    """Of some blocks of one call into pages of `target`; `items` as in Job.waiting."""

    job: Job
    target: Pool
    items: list[tuple[int, Place]]
    pages: list[PageId]

    def entries(self) -> list[Entry]:
        """As they are in the target's pages."""
        return [e.at(page) for (_, (_, e)), page in zip(self.items, self.pages, strict=True)]
