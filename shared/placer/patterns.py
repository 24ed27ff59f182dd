"""Patterns: everything that one server can hold, enumerated, with what it costs.

Instances of one role and width that differ only in bytes may share a bucket: a pattern then has an interval of memory
instead of a value, and what follows from it is a bound. With a bucket for each kind, patterns are exact.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.placer.problem import Ints, Problem, Shape


@dataclass(frozen=True, slots=True)
class Buckets:
    """Neighbouring kinds of one width and sign. Bucket b holds problem.kinds[first[b]:first[b + 1]]."""

    first: tuple[int, ...]  # of each bucket, and the number of kinds at the end

    def __len__(self) -> int:
        return len(self.first) - 1

    def of_kind(self) -> list[int]:
        return [b for b in range(len(self)) for _ in range(self.first[b], self.first[b + 1])]


@dataclass(frozen=True, slots=True)
class Patterns:
    """What servers of one shape can hold."""

    contents: NDArray[np.int32]  # [patterns, buckets]
    memory: Ints  # least |mem_s| that contents like these can have, bytes
    imbalance: Ints  # G_s * |eq_s|, bytes


def exact(buckets: Buckets) -> bool:
    """Whether every kind has a bucket of its own."""
    return len(buckets) == buckets.first[-1]


def choose_buckets(problem: Problem, most: int) -> Buckets | None:
    """As fine as `most` patterns of each shape allow; None when even one bucket a width and sign is too many."""
    kinds = problem.kinds
    starts = [
        k
        for k in range(len(kinds))
        if k == 0 or (kinds[k - 1].tp, kinds[k - 1].sign) != (kinds[k].tp, kinds[k].sign)
    ]
    every = Buckets(tuple(range(len(kinds) + 1)))
    if _few(problem, every, most):
        return every
    found = Buckets((*starts, len(kinds)))
    if not _few(problem, found, most):
        return None
    closed: set[int] = set()  # buckets, by their first kind, whose splitting gives too many patterns
    while True:
        widths = [
            (kinds[last - 1].bytes_per_gpu - kinds[begin].bytes_per_gpu) * kinds[begin].tp
            if begin not in closed
            else 0
            for begin, last in zip(found.first, found.first[1:], strict=False)
        ]
        b = int(np.argmax(widths))
        if not widths[b]:
            return found
        begin, last = found.first[b], found.first[b + 1]
        middle = (kinds[begin].bytes_per_gpu + kinds[last - 1].bytes_per_gpu) / 2
        cut = next(k for k in range(begin + 1, last) if kinds[k].bytes_per_gpu > middle)
        finer = Buckets(tuple(sorted((*found.first, cut))))
        if _few(problem, finer, most):
            found = finer
        else:
            closed.add(begin)


def enumerate_patterns(problem: Problem, buckets: Buckets, shape: Shape) -> Patterns:
    """All of one shape. Cost: one row of int32 for each, built bucket by bucket."""
    rows = np.zeros((1, 0), dtype=np.int32)
    used = np.zeros(1, dtype=np.int64)
    low, high, signs = (np.zeros(1, dtype=np.int64) for _ in range(3))
    for b in range(len(buckets)):
        kinds = problem.kinds[buckets.first[b] : buckets.first[b + 1]]
        most = [problem.most(kind, shape) for kind in kinds]
        steps = np.arange(_most(problem, buckets, b, shape) + 1)
        least, greatest = _extremes([kind.bytes_per_gpu * kind.tp for kind in kinds], most, len(steps))
        fits = used[:, None] + steps[None, :] * kinds[0].tp <= shape.gpus
        row, step = np.nonzero(fits)
        rows = np.concatenate((rows[row], step[:, None].astype(np.int32)), axis=1)
        used = used[row] + step * kinds[0].tp
        low, high = low[row] + least[step], high[row] + greatest[step]
        signs = signs[row] + step * kinds[0].tp * kinds[0].sign
    memory = np.maximum(np.maximum(low, -high), 0)
    return Patterns(rows, memory, np.abs(signs) * shape.gpu_memory_bytes)


def _extremes(memory: list[int], most: list[int], steps: int) -> tuple[Ints, Ints]:
    """Least and greatest memory of the 0, 1, ... smallest and largest instances of one bucket."""
    each = np.sort(np.repeat(np.array(memory, dtype=np.int64), most))
    sums = np.concatenate(([0], np.cumsum(each)))[:steps]
    tops = np.concatenate(([0], np.cumsum(each[::-1])))[:steps]
    return sums, tops


def _most(problem: Problem, buckets: Buckets, b: int, shape: Shape) -> int:
    kinds = problem.kinds[buckets.first[b] : buckets.first[b + 1]]
    return min(shape.gpus // kinds[0].tp, sum(problem.most(kind, shape) for kind in kinds))


def _few(problem: Problem, buckets: Buckets, most: int) -> bool:
    return all(_has_few(problem, buckets, shape, most) for shape in problem.shapes)


def _has_few(problem: Problem, buckets: Buckets, shape: Shape, most: int) -> bool:
    """Whether a shape has no more than `most` patterns, by the GPUs that they use; without enumerating them.

    Cost: O(GPUs) a bucket, of as many buckets as have so few.
    """
    ways = [1] + [0] * shape.gpus
    for b in range(len(buckets)):
        tp, room = problem.kinds[buckets.first[b]].tp, _most(problem, buckets, b, shape)
        found = list(ways)
        for used in range(tp, shape.gpus + 1):  # sums of 0 to `room` instances, each from the one before
            found[used] += found[used - tp]
            if (beyond := used - (room + 1) * tp) >= 0:
                found[used] -= ways[beyond]
        ways = found
        if sum(ways) > most:
            return False
    return True
