"""Eqs 1 to 6 over patterns: how many servers hold what. The linear relaxation is nearly always the optimum itself.

For an imbalance of at most `level` and a memory of at most `limit`, only patterns below both count; whether servers can
be filled with those, fractions allowed, is a linear program whose columns are found as they are needed (HiGHS solves,
numpy prices every pattern at once). The least limit that passes, by bisection, bounds eq 6 from below; servers in whole
numbers at the same limit, or the next one, are the placement.
"""

from collections.abc import Callable

import numpy as np

from shared.placer.highs import Floats, Program, solve_integer, solve_linear
from shared.placer.patterns import Buckets, Patterns, enumerate_patterns, exact
from shared.placer.problem import Ints, Problem

NEW_COLUMNS = 12  # of each shape that a round of pricing adds
MOST_ROUNDS = 200
INTEGER_COLUMNS = (300, 4000)  # of each shape: tried first, and at most
MOST_NODES = 2000
SMALL = 1e-6


class Configuration:
    """The programs of one problem; columns that were found once serve all later ones."""

    def __init__(self, problem: Problem, buckets: Buckets) -> None:
        self.problem = problem
        self.exact = exact(buckets)
        self.sets: list[Patterns] = [enumerate_patterns(problem, buckets, shape) for shape in problem.shapes]
        bucket_of = np.array(buckets.of_kind())
        self.need = np.bincount(bucket_of, weights=problem.counts, minlength=len(buckets)).astype(np.float64)
        self.tp = np.array([problem.kinds[first].tp for first in buckets.first[:-1]], dtype=np.float64)
        self.servers = np.array([shape.count for shape in problem.shapes], dtype=np.float64)
        self.known = [np.zeros(1, dtype=np.int64) for _ in self.sets]  # pattern 0 is the empty server
        self.duals = np.zeros(len(buckets))

    def limits(self, level: int, low: int, high: int) -> Ints:
        """Memory values of patterns within `level`, from `low` up to below `high`, ascending."""
        if low >= high:
            return np.zeros(0, dtype=np.int64)
        found = np.concatenate([p.memory[p.imbalance <= level] for p in self.sets])
        return np.unique(np.maximum(found[found < high], low))

    def possible(self, level: int, limit: int, stop: Callable[[], bool]) -> bool:
        """Whether fractions of servers within both bounds can hold everything.

        "Yes" may be wrong (MOST_ROUNDS, `stop`), "no" never is: it is a certificate, computed anew from the duals.
        """
        allowed = [np.flatnonzero((p.imbalance <= level) & (p.memory <= limit)) for p in self.sets]
        if not all(len(rows) for rows in allowed):
            return False
        self.duals = self.tp.copy()
        self._price(allowed, -np.ones(len(self.sets)) * np.inf)
        for _ in range(MOST_ROUNDS):
            if stop():
                break
            columns = [
                k[(p.imbalance[k] <= level) & (p.memory[k] <= limit)]
                for k, p in zip(self.known, self.sets, strict=True)
            ]
            answer = solve_linear(self._program(columns))
            self.duals = np.minimum(
                answer.duals[: len(self.need)], self.tp
            )  # feasible, so that "no" is proven
            if answer.cost < SMALL:
                return True
            best = self._price(allowed, answer.duals[len(self.need) :])
            if self.duals @ self.need - best @ self.servers > SMALL:
                return False
        return True

    def _price(self, allowed: list[Ints], prices: Floats) -> Floats:
        """Add patterns that would help; the greatest worth of a server's contents, per shape."""
        best = np.zeros(len(self.sets))
        for number, (patterns, rows) in enumerate(zip(self.sets, allowed, strict=True)):
            worth = patterns.contents[rows] @ self.duals
            best[number] = max(worth.max(), 0.0)
            top = np.argsort(-worth, kind="stable")[:NEW_COLUMNS]
            top = top[worth[top] > -prices[number] + SMALL]
            self.known[number] = np.union1d(self.known[number], rows[top])
        return best

    def _program(self, columns: list[Ints]) -> Program:
        """Rows: instances of each bucket, then servers of each shape. Columns: patterns, then what stays unplaced."""
        num_buckets, num_shapes = len(self.need), len(self.sets)
        total = sum(len(rows) for rows in columns)
        matrix = np.zeros((num_buckets + num_shapes, total + num_buckets))
        begin = 0
        for number, rows in enumerate(columns):
            end = begin + len(rows)
            matrix[:num_buckets, begin:end] = self.sets[number].contents[rows].T
            matrix[num_buckets + number, begin:end] = 1.0
            begin = end
        matrix[:num_buckets, total:] = np.eye(num_buckets)
        return Program(
            cost=np.concatenate((np.zeros(total), self.tp)),
            high=np.full(total + num_buckets, np.inf),
            matrix=matrix,
            row_low=np.concatenate((self.need, np.zeros(num_shapes))),
            row_high=np.concatenate((self.need, self.servers)),
        )

    def fill(self, level: int, limit: int, time_limit_s: float) -> tuple[Ints | None, bool]:
        """Whole servers within both bounds: (placement [num_servers, num_kinds] or None, whether none can exist).

        Few columns, the most promising ones, nearly always suffice; only all of them prove that there is nothing.
        """
        for most in INTEGER_COLUMNS:
            columns = [
                self._promising(p, k, level, limit, most) for p, k in zip(self.sets, self.known, strict=True)
            ]
            program = self._program(columns)
            total = program.matrix.shape[1] - len(self.need)
            program = Program(  # nothing stays unplaced
                np.zeros(total),
                program.high[:total],
                program.matrix[:, :total],
                program.row_low,
                program.row_high,
            )
            answer = solve_integer(program, time_limit_s=time_limit_s, max_nodes=MOST_NODES)
            if answer.values is not None:
                return self._servers(columns, answer.values.astype(np.int64)), False
            if all(len(rows) < most for rows in columns):
                return None, answer.infeasible
        return None, False

    def _promising(self, patterns: Patterns, known: Ints, level: int, limit: int, most: int) -> Ints:
        """Those that priced best in the last linear program; all where they are fewer than `most`."""
        rows = np.flatnonzero((patterns.imbalance <= level) & (patterns.memory <= limit))
        if len(rows) < most:
            return rows
        worth = patterns.contents[rows] @ self.duals
        top = rows[np.argsort(-worth, kind="stable")[:most]]
        return np.union1d(np.intersect1d(rows, known), top)

    def _servers(self, columns: list[Ints], counts: Ints) -> Ints:
        """Contents of each server, from how many servers have each pattern."""
        placed, begin = [], 0
        for shape, patterns, rows in zip(self.problem.shapes, self.sets, columns, strict=True):
            used = counts[begin : begin + len(rows)]
            begin += len(rows)
            held = np.repeat(patterns.contents[rows], used, axis=0).astype(np.int64)
            placed += [held, np.zeros((shape.count - len(held), held.shape[1]), dtype=np.int64)]
        return np.concatenate(placed)


def lower_limit(
    configuration: Configuration, level: int, low: int, high: int, stop: Callable[[], bool]
) -> int | None:
    """The least memory, of `low` and more, below which fractions of servers cannot hold everything at this level.

    None: no memory below `high` is enough. When `stop()` says so the bisection ends with what it proved so far.
    """
    limits = configuration.limits(level, low, high)
    if not len(limits):
        return None
    if configuration.possible(level, int(limits[0]), stop):
        return int(limits[0])
    if not configuration.possible(level, int(limits[-1]), stop):
        return None
    first, last = 1, len(limits) - 1  # the answer is between the two
    while first < last and not stop():
        middle = (first + last) // 2
        if configuration.possible(level, int(limits[middle]), stop):
            last = middle
        else:
            first = middle + 1
    return int(limits[first])
