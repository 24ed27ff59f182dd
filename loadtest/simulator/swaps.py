"""Parked requests' blocks leave an engine's memory and come back: as shared/engine/fair_swap.py, without bytes.

Which are where is kept by the core that production has (shared/fair/away.py). Lent pages are taken first, then host
memory; each has a link of its own, each way of it moves one swap after the other. Whole blocks leave that nobody else
uses; what still lies in the engine's memory when its request comes back is not copied.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.simulator.blocks import BlockStore, tokens_of
from loadtest.simulator.events import EventQueue
from loadtest.simulator.held import find_again, keep_here, leave, seal_prompt, shared_tokens
from loadtest.simulator.links import Rate
from loadtest.simulator.local import Local
from loadtest.simulator.task import Task
from shared.fair.away import (
    MAX_HASHES,
    NO_SPACE_S,
    PROBE_BYTES,
    PROBE_INTERVAL_S,
    Absences,
    Block,
    Swap,
    SwapRate,
    SwapState,
)
from shared.ids import BlockHash

ANY = Block(BlockHash(b""), BlockHash(b""))  # blocks are counted here, not named


@dataclass(slots=True)
class _Tier:
    rate: Rate
    room_bytes: int
    out_free_ms: float = 0.0
    in_free_ms: float = 0.0


class SwapSpace:
    """Of one engine: lent pages, then host memory."""

    def __init__(self, local: Local) -> None:
        self._tiers = (_Tier(local.peer, local.peer_bytes), _Tier(local.dram, local.dram_bytes))
        self._kept: dict[int, tuple[int, ...]] = {}  # bytes in each tier, by swap
        self.used_bytes = self.peak_bytes = 0

    @property
    def room_bytes(self) -> int:
        """In all tiers."""
        return sum(tier.room_bytes for tier in self._tiers)

    def put(self, number: int, num_bytes: int, now_ms: float) -> float:
        """Take room and begin to copy. Returns: when all is there. There is room."""
        done_ms, parts = now_ms, []
        for tier in self._tiers:
            part = min(num_bytes - sum(parts), tier.room_bytes)
            parts.append(part)
            if part:
                tier.room_bytes -= part
                tier.out_free_ms = max(now_ms, tier.out_free_ms) + part / tier.rate.bytes_per_ms
                done_ms = max(done_ms, tier.out_free_ms + tier.rate.latency_ms)
        assert sum(parts) == num_bytes, "counted before"
        self._kept[number] = tuple(parts)
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return done_ms

    def get(self, number: int, num_bytes: int, now_ms: float) -> float:
        """Begin to copy so much of it back, of each tier its share. Returns: when all is there."""
        kept, done_ms = self._kept[number], now_ms
        for tier, part in zip(self._tiers, kept, strict=True):
            if part:
                took_ms = part * num_bytes / sum(kept) / tier.rate.bytes_per_ms
                tier.in_free_ms = max(now_ms, tier.in_free_ms) + took_ms
                done_ms = max(done_ms, tier.in_free_ms + tier.rate.latency_ms)
        return done_ms

    def drop(self, number: int) -> None:
        """Its room is free."""
        for tier, part in zip(self._tiers, self._kept.pop(number), strict=True):
            tier.room_bytes += part
            self.used_bytes -= part


class Swapper:
    """Of one engine. Args: page_tokens: of the blocks that leave; changed: called when an answer is in."""

    def __init__(
        self,
        events: EventQueue,
        store: BlockStore,
        local: Local,
        page_tokens: int,
        page_bytes: int,
        changed: Callable[[], None],
    ) -> None:
        self.space = SwapSpace(local)
        self.absences = Absences()
        self.rate = SwapRate(local.counted_gb_per_s * 1e9)
        self.counts: Counter[str] = Counter()
        self._events, self._store, self._changed = events, store, changed
        self._page_tokens, self._page_bytes = page_tokens, page_bytes
        self._refused_s: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        """The clock's."""
        return self._events.now_ms / 1e3

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that slices may count on now; 0: nothing can leave."""
        return self.rate.value(self.now_s)

    def begin_out(self, task: Task) -> int:
        """Ask for everything of a parked request that may leave. Returns: how many blocks that is."""
        is_refused = self.now_s < self._refused_s.get(task.name, -NO_SPACE_S) + NO_SPACE_S
        if self.absences.state(task.name) is not None or is_refused:
            return 0
        first = -(-shared_tokens(task) // self._page_tokens)
        wanted = min(task.done_tokens // self._page_tokens - first, MAX_HASHES)
        count = min(wanted, self.space.room_bytes // self._page_bytes)
        if wanted <= 0:
            return 0
        if count <= 0:
            self._refuse(task.name)
            return 0
        swap = self.absences.leave(task.name, dict.fromkeys(range(first, first + count), ANY), self.now_s)
        self._put(swap, task)
        return count

    def probe(self, task: Task, num_tokens: int) -> None:
        """Measure the way out with blocks that stay, while somebody waits and nothing new is known."""
        most = min(PROBE_BYTES, self.space.room_bytes) // self._page_bytes
        count = min(num_tokens // self._page_tokens, most)
        if count > 0 and self.rate.wants_probe(self.now_s, PROBE_INTERVAL_S):
            self._put(self.absences.probe(dict.fromkeys(range(count), ANY), self.now_s), task)

    def bring(self, task: Task, spare_tokens: int) -> bool:
        """Ask for everything that is away, if there is memory for it beyond `spare_tokens`. False: not yet."""
        swap = self.absences.of(task.name)
        if swap is None or swap.state is SwapState.COMING:
            return True
        away = len(swap.blocks) * self._page_tokens
        if not self.absences.may_come(task.name) or away + spare_tokens > self._store.room_tokens:
            return False
        find_again(self._store, task)
        here = tokens_of(task.entries) // self._page_tokens
        for position in [p for p in swap.blocks if p < here]:
            self.absences.found(task.name, position)
        if not swap.blocks:
            self.space.drop(swap.number)
        keep_here(self._store, task, task.done_tokens, 0)
        if not swap.blocks:
            return True
        self.absences.come(task.name, self.now_s)
        num_bytes = len(swap.blocks) * self._page_bytes
        self._events.at(
            self.space.get(swap.number, num_bytes, self._events.now_ms), self._came, swap.number, task
        )
        return True

    def forget(self, task: Task) -> None:
        """It is over, runs with blocks that were leaving, or is computed again."""
        self._refused_s.pop(task.name, None)
        is_away = self.absences.state(task.name) is SwapState.AWAY
        number = self.absences.forget(task.name)
        if number is not None and is_away:  # else its copy is under way, and what it took is free behind that
            self.space.drop(number)

    # -- answers ----------------------------------------------------------------------------------

    def _put(self, swap: Swap, task: Task) -> None:
        num_bytes = len(swap.blocks) * self._page_bytes
        at_ms = self.space.put(swap.number, num_bytes, self._events.now_ms)
        self._events.at(at_ms, self._left, swap.number, len(swap.blocks), task)

    def _left(self, number: int, count: int, task: Task) -> None:
        swap, positions = self.absences.left(number, b"\1" * count)
        assert swap is not None, "each is answered once"
        self.rate.add(count * self._page_bytes, self.now_s - swap.asked_s, self.now_s)
        if swap.is_probe:
            self.rate.probed(self.now_s)
        if swap.is_forgotten:
            self.space.drop(number)
        else:
            shared = shared_tokens(task)  # another request may have come with the same prefix
            self.absences.stays(swap, [p for p in positions if p * self._page_tokens < shared])
            if swap.blocks:
                leave(self._store, task, task.done_tokens, len(swap.blocks) * self._page_tokens)
                self._count("out", swap)
            else:
                self.space.drop(number)
        self._changed()

    def _came(self, number: int, task: Task) -> None:
        swap = self.absences.came(number)
        assert swap is not None, "each is answered once"
        self.space.drop(number)
        self.rate.add(len(swap.blocks) * self._page_bytes, self.now_s - swap.asked_s, self.now_s)
        if not swap.is_forgotten:
            seal_prompt(self._store, task, min(task.done_tokens, task.request.prompt_tokens))
            self._count("in", swap)
        self._changed()

    def _refuse(self, name: str) -> None:
        """There is no room; of one request that says little, two of them stop turns for a while."""
        self._refused_s = {one: s for one, s in self._refused_s.items() if self.now_s < s + NO_SPACE_S}
        self._refused_s[name] = self.now_s
        if len(self._refused_s) > 1:
            self.rate.none_until_s = self.now_s + NO_SPACE_S

    def _count(self, way: str, swap: Swap) -> None:
        self.counts[f"swaps_{way}"] += 1
        self.counts[f"swapped_{way}_bytes"] += len(swap.blocks) * self._page_bytes
