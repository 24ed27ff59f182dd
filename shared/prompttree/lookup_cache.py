"""Look-ups that a gateway remembers, for prompts that begin alike. No I/O: time comes in.

An answer holds for every prompt that shares its blocks: the hash of block i names the whole prefix up to it. So an
answer is kept under its last hash and those of the blocks shortly before it, and a prompt that parts from it within
its own last blocks gets it cut to what they share.

What ends an answer: `max_age_ms`; a retraction anywhere, which the next answer from Redis tells by its version (a lost
one is covered by the age); and its place, when `max_answers` are kept. New blocks end nothing: they are seen once the
answer is too old. So a remembered hit is at most `max_age_ms` older than one from Redis, which is a hint too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.ids import BlockHash
from shared.prompttree.hits import Depths, Found

TAIL_SHARE = 8  # a prompt may part from a remembered one within its last 1/8, so much of a hit may be missed


@dataclass(slots=True)
class _Answer:
    found: Found
    expires_ms: int
    keys: list[BlockHash]


@dataclass(slots=True)
class LookupCache:
    """Of one gateway process. Cost: a dictionary look-up per block of the tail, a few us for 256 blocks."""

    max_answers: int
    max_age_ms: int = 250
    max_tail_blocks: int = 32
    num_hits: int = 0
    num_misses: int = 0
    _version: int = -1
    _answers: OrderedDict[int, _Answer] = field(default_factory=OrderedDict)  # by number, oldest first
    _by_hash: dict[BlockHash, int] = field(default_factory=dict)
    _next: int = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, hashes: Sequence[BlockHash], *, now_ms: int) -> Found | None:
        """What is remembered of these blocks; None: ask."""
        num = len(hashes)
        for depth in range(num, num - self._tail(num) - 1, -1):
            number = self._by_hash.get(hashes[depth - 1])
            if number is None:
                continue
            answer = self._answers[number]
            if answer.expires_ms <= now_ms:
                self._drop(number)
                continue
            self.num_hits += 1
            return {
                name: Depths(min(depth, found.held), min(depth, found.reached))
                for name, found in answer.found.items()
            }
        self.num_misses += 1
        return None

    def put(self, hashes: Sequence[BlockHash], found: Found, version: int, *, now_ms: int) -> None:
        """An answer of Redis. Another version than the last one's ends every earlier answer."""
        if version != self._version:
            self.clear()
            self._version = version
        num = len(hashes)
        if not num or not self.max_answers:
            return
        keys = list(hashes[num - self._tail(num) - 1 :])
        for key in keys:
            known = self._by_hash.get(key)
            if known is not None:
                self._drop(known)
        while len(self._answers) >= self.max_answers:
            self._drop(next(iter(self._answers)))
        self._next += 1
        self._answers[self._next] = _Answer(found, now_ms + self.max_age_ms, keys)
        self._by_hash.update(dict.fromkeys(keys, self._next))

    def clear(self) -> None:
        """Forget all."""
        self._answers.clear()
        self._by_hash.clear()

    def _tail(self, num_blocks: int) -> int:
        return min(num_blocks // TAIL_SHARE, self.max_tail_blocks, num_blocks - 1)

    def _drop(self, number: int) -> None:
        for key in self._answers.pop(number).keys:
            if self._by_hash.get(key) == number:
                del self._by_hash[key]
