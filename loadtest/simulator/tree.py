"""The prompt tree under the virtual clock: owners publish with delay through the production HeldBlocks.

Look-ups answer what Redis would at that moment: what was told, not what is held. For all owners at once a block has
one integer, of which bit i says that owner i told of it, so a look-up costs a step a block for any number of owners.
"""

from collections.abc import Iterable, Sequence

from loadtest.simulator.events import EventQueue
from shared.ids import BlockHash
from shared.prompttree.held_blocks import HeldBlocks
from shared.prompttree.publisher import BATCH_WINDOW_MS
from shared.prompttree.scripts import SHORT_HASH_BYTES

CALL_MS = 0.5  # one write to Redis


class SimTree:
    """One publication an instance, for as long as it lives."""

    def __init__(self, events: EventQueue, num_instances: int, *, window_ms: float = BATCH_WINDOW_MS) -> None:
        self._events = events
        self._window_ms = window_ms
        self._told: dict[bytes, int] = {}
        self._held = [HeldBlocks() for _ in range(num_instances)]
        self._waiting = [False] * num_instances
        for held in self._held:
            held.on_claimed()

    @property
    def num_blocks(self) -> int:
        """Blocks of which some owner told."""
        return len(self._told)

    def stored(self, instance: int, blocks: Sequence[BlockHash]) -> None:
        """The instance holds these now."""
        self._held[instance].stored(blocks)
        self._soon(instance)

    def removed(self, instance: int, blocks: Iterable[BlockHash]) -> None:
        """The instance holds these no more, in no tier."""
        self._held[instance].removed(blocks)
        self._soon(instance)

    def expire(self, instance: int) -> None:
        """The publication of a dead owner ends (its TTL)."""
        self._held[instance].cleared()
        keep = ~(1 << instance)
        self._told = {block: left for block, mask in self._told.items() if (left := mask & keep)}

    def lookup(self, blocks: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """(instance, leading blocks that it told of), those with none left out."""
        alive, depth = 0, 0
        out: list[tuple[int, int]] = []
        told = self._told
        for block in blocks:
            mask = told.get(block, 0)
            here = alive & mask if depth else mask
            if here != alive:
                _bits(alive & ~here, depth, out)
                alive = here
            if not alive:
                break
            depth += 1
        _bits(alive, depth, out)
        return out

    def _soon(self, instance: int) -> None:
        if not self._waiting[instance]:
            self._waiting[instance] = True
            self._events.after(self._window_ms + CALL_MS, self._publish, instance)

    def _publish(self, instance: int) -> None:
        self._waiting[instance] = False
        held, bit, told = self._held[instance], 1 << instance, self._told
        if not held.claimed:  # too much was untold: the owner begins a new publication
            self.expire_told(bit)
            held.on_claimed()
        while (batch := held.next_batch()) is not None:
            for block in _cut(batch.stored):
                told[block] = told.get(block, 0) | bit
            for block in _cut(batch.removed):
                if left := told.get(block, 0) & ~bit:
                    told[block] = left
                else:
                    told.pop(block, None)

    def expire_told(self, bit: int) -> None:
        """Forget one owner's blocks. Cost: O(blocks of all)."""
        for block, mask in list(self._told.items()):
            if mask & bit:
                if mask == bit:
                    del self._told[block]
                else:
                    self._told[block] = mask & ~bit


def _cut(blob: bytes) -> Iterable[bytes]:
    return (blob[at : at + SHORT_HASH_BYTES] for at in range(0, len(blob), SHORT_HASH_BYTES))


def _bits(mask: int, depth: int, out: list[tuple[int, int]]) -> None:
    if not depth:
        return
    while mask:
        low = mask & -mask
        out.append((low.bit_length() - 1, depth))
        mask ^= low
