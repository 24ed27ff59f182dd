"""What an instance holds and what Redis has not been told yet. No I/O: the publisher sends, this decides.

    UNCLAIMED -(claim: a new publication)-> CLAIMED
    CLAIMED -(lost, failed call, too much pending, cleared)-> UNCLAIMED

While unclaimed only `held` is kept: the next claim publishes all of it. So an outage of Redis costs no
memory, and every doubt about what Redis has ends in one more publication.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from shared.ids import BlockHash
from shared.prompttree.scripts import MAX_BATCH_BLOCKS, SHORT_HASH_BYTES


@dataclass(frozen=True, slots=True)
class Batch:
    """One Lua call's worth; both are concatenated short hashes and disjoint."""

    stored: bytes
    removed: bytes


@dataclass(slots=True)
class HeldBlocks:
    """Args: max_held: more blocks are not published; max_pending: more untold changes mean a new claim."""

    max_held: int = 1 << 20
    max_pending: int = 1 << 16
    claimed: bool = False
    num_ignored: int = 0  # blocks beyond max_held
    num_claims: int = 0
    _held: dict[bytes, None] = field(default_factory=dict)  # a set that keeps its order
    _pending: dict[bytes, bool] = field(default_factory=dict)  # block -> stored, else removed

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_pending(self) -> int:
        """Changes that Redis has not been told."""
        return len(self._pending)

    def stored(self, hashes: Sequence[BlockHash]) -> None:
        """The instance now holds these, parents before children. Repeats are harmless."""
        held, new = self._held, list[bytes]()
        for whole in hashes:
            short = whole[:SHORT_HASH_BYTES]
            if short in held:
                continue
            if len(held) >= self.max_held:
                self.num_ignored += 1
                continue
            held[short] = None
            new.append(short)
        self._note(new, stored=True)

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        """The instance evicted these; unknown ones are ignored."""
        held, gone = self._held, list[bytes]()
        for whole in hashes:
            short = whole[:SHORT_HASH_BYTES]
            if short in held:
                del held[short]
                gone.append(short)
        self._note(gone, stored=False)

    def cleared(self) -> None:
        """The instance holds nothing: the publication ends at once."""
        self._held.clear()
        self.lost()

    def lost(self) -> None:
        """What Redis has is unknown or wrong: claim again, then publish everything."""
        self.claimed = False
        self._pending.clear()

    def on_claimed(self) -> None:
        """A new, empty publication exists in Redis."""
        self.claimed = True
        self.num_claims += 1
        self._pending = dict.fromkeys(self._held, True)

    def next_batch(self) -> Batch | None:
        """Changes to send now, oldest first, or None. They count as told: a call that fails means lost()."""
        if not self.claimed or not self._pending:
            return None
        taken = list(islice(self._pending.items(), MAX_BATCH_BLOCKS))
        for short, _ in taken:
            del self._pending[short]
        return Batch(
            stored=b"".join([short for short, stored in taken if stored]),
            removed=b"".join([short for short, stored in taken if not stored]),
        )

    def agrees(self, num_in_redis: int) -> bool:
        """Whether Redis' count fits. Ask only between batches."""
        num_told = len(self._held)
        for stored in self._pending.values():
            num_told += -1 if stored else 1
        return num_told == num_in_redis

    def _note(self, shorts: list[bytes], *, stored: bool) -> None:
        if self.claimed:
            pending = self._pending
            for short in shorts:
                # stored and removed again before it was told: the server's state did not change
                if pending.pop(short, None) is None:
                    pending[short] = stored
        self._bound()

    def _bound(self) -> None:
        if len(self._pending) > len(self._held) + self.max_pending:
            self.lost()
