"""Which parked requests' blocks are outside the engine's memory, or on their way, and how fast the way is. No I/O.

    (here) --leave--> leaving --left: some are kept--> away --come--> coming --came--> (here)
              forget: at any moment                     lost_pool: leaving -> here, coming -> away

A swap is one request's absence; its number is new each time. What is asked of the mempool is answered once, unless the
mempool is lost; an answer about a swap that was forgotten is for nobody, but its pages have to be taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shared.ids import BlockHash

MAX_HASHES = 8_192  # of one swap: a message's worth
NO_SPACE_S = 1.0  # swap space that took nothing is tried again
PROBE_INTERVAL_S = 10.0  # what was measured so long ago is measured again, while somebody waits
PROBE_BYTES = 64 << 20
PROBE_PAUSE_S = 1.0  # from one attempt to measure to the next
LOOK_AGAIN_S = 0.02  # who waits for pages looks so often for its blocks among others': as much work as a step
FORGET_RATIO = 0.5  # what earlier measurements weigh, each time


class SwapState(StrEnum):
    """Of a request that is not wholly here."""

    LEAVING = "leaving"  # its blocks are here and may be used
    AWAY = "away"
    COMING = "coming"


class Block(NamedTuple):
    """`parent`: hash of the block before, or the chain's seed."""

    block_hash: BlockHash
    parent: BlockHash


@dataclass(slots=True)
class Swap:
    """`blocks`: by position in the request's block table: those that leave, then those that are away."""

    number: int
    request_id: str
    blocks: dict[int, Block]
    state: SwapState
    asked_s: float
    is_forgotten: bool = False
    is_probe: bool = False  # nothing leaves: it only measures
    alone: frozenset[int] = frozenset()  # positions of those that leave whose pages are free then
    num_shared: int = 0  # of those that are away, whose pages others used when they left
    looked_s: float = -LOOK_AGAIN_S  # when there were no pages for those that nobody has here

    def hashes(self) -> list[BlockHash]:
        """Of the blocks, in their order."""
        return [block.block_hash for block in self.blocks.values()]


class SwapRate:
    """Bytes per second of swap space, as measured; 0 until it was, or while there is none.

    Args: fixed: instead of measuring; 0: none.
    """

    def __init__(self, fixed: float = 0.0) -> None:
        self._fixed = fixed
        self._bytes = self._seconds = 0.0
        self.measured_at_s: float | None = None
        self._probed_at_s = -PROBE_PAUSE_S
        self.none_until_s = 0.0

    def add(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """So many bytes went, or came."""
        if num_bytes > 0:
            self._bytes = self._bytes * FORGET_RATIO + num_bytes
            self._seconds = self._seconds * FORGET_RATIO + max(seconds, 1e-6)
            self.measured_at_s = now_s

    def probed(self, now_s: float) -> None:
        """An attempt to measure has ended; perhaps nothing had to be copied."""
        self._probed_at_s = now_s

    def value(self, now_s: float) -> float:
        """Now."""
        if now_s < self.none_until_s:
            return 0.0
        if self._fixed:
            return self._fixed
        return self._bytes / self._seconds if self._seconds else 0.0

    def wants_probe(self, now_s: float, interval_s: float) -> bool:
        """Whether what is known is old, or nothing is."""
        if self._fixed or now_s < max(self.none_until_s, self._probed_at_s + PROBE_PAUSE_S):
            return False
        return self.measured_at_s is None or now_s - self.measured_at_s > interval_s


class Absences:
    """Of one engine. Args of its methods: `now_s` of one clock."""

    def __init__(self) -> None:
        # by request that is not wholly here: blocks that have to come before it runs
        self.away: dict[str, int] = {}
        self.num_leaving = 0  # blocks whose pages may come free soon
        self.num_coming = 0  # blocks for which pages were given
        self._changed: set[str] = set()  # requests of which `away` changed
        self._by_request: dict[str, Swap] = {}
        self._asked: dict[int, Swap] = {}  # by number: an answer is to come
        self._last = 0

    def of(self, request_id: str) -> Swap | None:
        """None: it is wholly here."""
        return self._by_request.get(request_id)

    def state(self, request_id: str) -> SwapState | None:
        """None: it is wholly here."""
        swap = self._by_request.get(request_id)
        return swap.state if swap is not None else None

    def is_here(self, request_id: str) -> bool:
        """Whether it could run: its blocks may be leaving."""
        return request_id not in self.away

    def num_away(self, request_id: str) -> int:
        """Blocks that have to come before it runs."""
        return self.away.get(request_id, 0)

    def num_elsewhere(self, request_id: str) -> int:
        """The same without those that others still had here when they left: bytes that move for its turn."""
        swap = self._by_request.get(request_id)
        return self.num_away(request_id) - (swap.num_shared if swap is not None else 0)

    def take_changed(self) -> set[str]:
        """Requests of which other blocks are away than at the last call; some are over."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def is_waiting(self) -> bool:
        """Whether any answer is to come."""
        return bool(self._asked)

    def all(self) -> list[Swap]:
        """Of requests that are here."""
        return list(self._by_request.values())

    # -- what is asked --------------------------------------------------------------------------------

    def leave(self, request_id: str, blocks: Mapping[int, Block], now_s: float) -> Swap:
        """Ask for these to be kept elsewhere. The request is wholly here."""
        assert request_id not in self._by_request
        swap = self._new(request_id, blocks, SwapState.LEAVING, now_s)
        self._by_request[request_id] = swap
        self.num_leaving += len(swap.blocks)
        return swap

    def probe(self, blocks: Mapping[int, Block], now_s: float) -> Swap:
        """Ask the same of blocks that stay: how long does it take?"""
        swap = self._new("", blocks, SwapState.LEAVING, now_s)
        swap.is_probe = swap.is_forgotten = True
        return swap

    def come(self, request_id: str, now_s: float) -> Swap:
        """Ask for what is away; pages are given for each block."""
        swap = self._by_request[request_id]
        assert swap.state is SwapState.AWAY, swap
        swap.state, swap.asked_s, swap.num_shared = SwapState.COMING, now_s, 0
        self._changed.add(request_id)
        self._asked[swap.number] = swap
        self.num_coming += len(swap.blocks)
        return swap

    def may_come(self, request_id: str) -> bool:
        """Whether come() may be asked now."""
        swap = self._by_request.get(request_id)
        return swap is not None and swap.state is SwapState.AWAY and swap.number not in self._asked

    def again(self, request_id: str, now_s: float) -> Swap:
        """Ask a mempool that knows nothing of it to keep what is away: under a new number."""
        old = self._by_request[request_id]
        swap = self._by_request[request_id] = self._new(request_id, old.blocks, SwapState.AWAY, now_s)
        swap.num_shared = old.num_shared
        return swap

    def found(self, request_id: str, position: int) -> None:
        """This block of those that are away is here after all."""
        self._are_here(self._by_request[request_id], [position])

    def _new(self, request_id: str, blocks: Mapping[int, Block], state: SwapState, now_s: float) -> Swap:
        self._last += 1
        swap = self._asked[self._last] = Swap(self._last, request_id, dict(blocks), state, now_s)
        return swap

    # -- what is answered -----------------------------------------------------------------------------

    def left(self, number: int, kept: bytes) -> tuple[Swap | None, list[int]]:
        """Answer to leave(), probe() and again(). Returns: the swap, and positions of blocks that are away from now on.

        There are none after again(): what it asked about was away, and stays away until it comes. A swap of which
        nothing is kept is over.
        """
        swap = self._asked.pop(number, None)
        if swap is None:
            return None, []
        if swap.is_forgotten or swap.state is not SwapState.LEAVING:
            return swap, []
        found = [p for p, is_kept in zip(swap.blocks, kept, strict=False) if is_kept]
        self.num_leaving -= len(swap.blocks)
        swap.blocks = {position: swap.blocks[position] for position in found}
        if found:
            swap.state = SwapState.AWAY
            self.away[swap.request_id] = len(found)
            self._changed.add(swap.request_id)
        else:
            del self._by_request[swap.request_id]
        return swap, found

    def came(self, number: int) -> Swap | None:
        """Answer to come(): whatever was not lost is here. None: it was asked of another mempool."""
        swap = self._asked.pop(number, None)
        if swap is None:
            return None
        self.num_coming -= len(swap.blocks)
        if self._by_request.get(swap.request_id) is swap:
            del self._by_request[swap.request_id], self.away[swap.request_id]
            self._changed.add(swap.request_id)
        return swap

    def stays(self, swap: Swap, positions: list[int]) -> None:
        """After left(): these were kept elsewhere, but are in use here and stay."""
        self._are_here(swap, positions)

    def forget(self, request_id: str) -> int | None:
        """It is over, goes on with blocks that were leaving, or is computed again. The swap to drop, if any."""
        swap = self._by_request.pop(request_id, None)
        if swap is None:
            return None
        if swap.state is SwapState.LEAVING:
            self.num_leaving -= len(swap.blocks)
        if self.away.pop(request_id, 0):
            self._changed.add(request_id)
        swap.is_forgotten = True
        return swap.number

    def lost_pool(self) -> list[str]:
        """No answer will come: what was leaving is here, what was coming is away. Requests that are away."""
        self._asked.clear()
        self.num_leaving = self.num_coming = 0
        for swap in list(self._by_request.values()):
            if swap.state is SwapState.LEAVING:
                del self._by_request[swap.request_id]
            else:
                swap.state = SwapState.AWAY
        return list(self._by_request)

    def _are_here(self, swap: Swap, positions: Sequence[int]) -> None:
        """These blocks of a request that is away."""
        for position in positions:
            del swap.blocks[position]
        swap.num_shared = min(swap.num_shared, len(swap.blocks))
        if not positions or self._by_request.get(swap.request_id) is not swap:
            return
        self._changed.add(swap.request_id)
        self.away[swap.request_id] = len(swap.blocks)
        if not swap.blocks:
            del self._by_request[swap.request_id], self.away[swap.request_id]
