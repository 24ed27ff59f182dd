"""A good placement without a solver: what two servers hold is divided anew between them, the best way of all.

With 16 GPUs in two servers there are at most 2^16 ways to divide their instances: all are looked at in one numpy
expression. Repeated for the worst server with each other one, it evens memory out to the last bytes where instances
differ, and gives the exact search (configuration.py) its first answer where they do not. Seeded; no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.placer.problem import Ints, Problem

MOST_WAYS = 1 << 16
SHAKEN_PAIRS = 4
MOST_PARTNERS = 20
Rank = tuple[int, int]  # bytes of imbalance above the level, bytes of memory; smaller is better


@dataclass(slots=True)
class _Ways:
    """Every way to divide two servers' instances; way number w gives the first server `contents(w)`."""

    base: Ints
    divided: list[int]  # kinds, and below how many ways there are for each
    radix: list[int]
    over: Ints  # per way that fits: imbalance above the level, the larger of the two
    memory: Ints  # per way that fits: the larger |mem_s| of the two
    number: Ints  # of the ways that fit

    def contents(self, at: int) -> Ints:
        """What the first server holds in the way at this place of the three columns."""
        mine, way = self.base.copy(), int(self.number[at])
        for kind, ways in zip(self.divided, self.radix, strict=True):
            way, step = divmod(way, ways)
            mine[kind] += step
        return mine


class Exchange:
    """Improves one placement [num_servers, num_kinds], which is `placed` at any time."""

    def __init__(self, problem: Problem, placed: Ints, rng: np.random.Generator) -> None:
        shapes = [problem.shapes[s] for s in problem.shape_of]
        self.problem = problem
        self.placed = placed.copy()
        self.rng = rng
        self.level = 0
        self.gpus = [shape.gpus for shape in shapes]
        self.gpu_bytes = [shape.gpu_memory_bytes for shape in shapes]
        self.most = np.array([[problem.most(kind, shape) for kind in problem.kinds] for shape in shapes])

    def run(self, level: int, floor: int, rounds: int, stop: Callable[[], bool]) -> Rank:
        """Lower the largest memory towards `floor`, with no imbalance above `level` where that can be had.

        Returns: what is left of the imbalance above the level, and the largest memory.
        Cost: `rounds` times MOST_PARTNERS pairs of at most a millisecond; ends early when `stop()` says so.
        """
        self.level = level
        ranks = [self._rank(self.placed[s], s) for s in range(self.problem.num_servers)]
        for _ in range(rounds):
            if max(ranks) <= (0, floor) or stop():
                break
            if not self._relieve_worst(ranks):
                if self.problem.num_servers < 3:
                    break
                self._shake(ranks)
        return max(over for over, _ in ranks), max(memory for _, memory in ranks)

    def _rank(self, contents: Ints, server: int) -> Rank:
        imbalance = abs(int(contents @ self.problem.signs)) * self.gpu_bytes[server]
        return max(0, imbalance - self.level), abs(int(contents @ self.problem.memory_bytes))

    def _relieve_worst(self, ranks: list[Rank]) -> bool:
        """Divide the worst server's instances with the partner that helps most, of 20 at most; False when none does."""
        worst = max(range(len(ranks)), key=lambda s: (ranks[s], s))
        best, found = ranks[worst], None
        others = [s for s in range(len(ranks)) if s != worst]
        if len(others) > MOST_PARTNERS:
            others = [int(s) for s in self.rng.permutation(others)[:MOST_PARTNERS]]
        for other in others:
            ways = self._ways(worst, other)
            least = ways.over.min()
            memory = np.where(ways.over == least, ways.memory, np.iinfo(np.int64).max)
            rank = int(least), int(memory.min())
            if rank < best:
                equals = np.flatnonzero(memory == rank[1])
                best, found = rank, (other, ways.contents(int(equals[self.rng.integers(equals.size)])))
        if found is None:
            return False
        self._divide(worst, *found, ranks)
        return True

    def _shake(self, ranks: list[Rank]) -> None:
        """Divide a few pairs at random, none as bad as the worst server now or then: the search goes on from there."""
        limit = max(ranks)
        for _ in range(SHAKEN_PAIRS):
            one, other = (int(s) for s in self.rng.permutation(len(ranks))[:2])
            if max(ranks[one], ranks[other]) >= limit:
                continue
            ways = self._ways(one, other)
            good = np.flatnonzero(
                (ways.over <= max(ranks[one][0], ranks[other][0])) & (ways.memory < limit[1])
            )
            if good.size:
                self._divide(one, other, ways.contents(int(good[self.rng.integers(good.size)])), ranks)

    def _divide(self, one: int, other: int, mine: Ints, ranks: list[Rank]) -> None:
        theirs = self.placed[one] + self.placed[other] - mine
        self.placed[one], self.placed[other] = mine, theirs
        ranks[one], ranks[other] = self._rank(mine, one), self._rank(theirs, other)

    def _ways(self, one: int, other: int) -> _Ways:
        """All divisions; where they are too many, some kinds, drawn by lot, stay where they are."""
        problem, both = self.problem, self.placed[one] + self.placed[other]
        low, high = np.maximum(both - self.most[other], 0), np.minimum(both, self.most[one])
        order = [int(k) for k in self.rng.permutation(np.flatnonzero(high > low))]
        base, divided, radix, total = self.placed[one].copy(), [], [], 1
        for k in order:
            ways = int(high[k] - low[k]) + 1
            if total * ways <= MOST_WAYS:
                total *= ways
                divided.append(k)
                radix.append(ways)
                base[k] = low[k]
        sums = np.array([[base @ problem.tp], [base @ problem.memory_bytes], [base @ problem.signs]])
        weights = np.array([problem.tp, problem.memory_bytes, problem.signs])
        for k, ways in zip(divided, radix, strict=True):
            steps = np.arange(ways)[None, :, None] * weights[:, k, None, None]
            sums = (steps + sums[:, None, :]).reshape(3, -1)
        rest = (weights @ both)[:, None] - sums
        number = np.flatnonzero((sums[0] <= self.gpus[one]) & (rest[0] <= self.gpus[other]))
        sums, rest = np.abs(sums[1:, number]), np.abs(rest[1:, number])
        over = np.maximum(sums[1] * self.gpu_bytes[one], rest[1] * self.gpu_bytes[other]) - self.level
        return _Ways(base, divided, radix, np.maximum(over, 0), np.maximum(sums[0], rest[0]), number)
