"""AQUA-PLACER's first step: instances to servers, the least eq 6 and a proof of how much less it could be.

An exchange between pairs of servers gives the answer (exchange.py), programs over patterns the bound, and where kinds
are few the optimum itself (configuration.py). Every limit but one is a count, so equal questions get equal answers; the
time limit is the exception, and the answer says when it was the one that ended the search.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.placer.configuration import Configuration, lower_limit
from shared.placer.exchange import Exchange
from shared.placer.patterns import choose_buckets, exact
from shared.placer.problem import Ints, Problem

SEED = 6
ROUNDS = 100  # of exchange at each level of imbalance
MOST_PATTERNS = (40_000, 160_000)  # of a shape: enough at first, and where the proof is not close
FEW_PATTERNS = 5_000  # for a first look at the levels
CLOSE_RATIO = 0.005  # of the objective: near enough where no optimum can be proven
NO_LIMIT = 1 << 62  # bytes
LAST_SHARE = 0.8  # of the time limit: no new program begins after it


@dataclass(frozen=True, slots=True)
class Assignment:
    """Contents of every server [num_servers, num_kinds], and eq 6 of it."""

    placed: Ints
    memory_bytes: int  # max_s |mem_s|
    imbalance_bytes: int  # max_s G_s * |eq_s|
    bound_bytes: int  # no placement's eq 6 is less
    timed_out: bool  # a time limit ended the search: another run may find another answer

    @property
    def objective_bytes(self) -> int:
        """Eq 6."""
        return self.memory_bytes + self.imbalance_bytes

    @property
    def gap_ratio(self) -> float:
        """How much of the objective is not proven necessary."""
        return 1 - self.bound_bytes / self.objective_bytes if self.objective_bytes else 0.0


class Assigner:
    """One search. `clock()` gives seconds since it began."""

    def __init__(
        self, problem: Problem, start: Ints, clock: Callable[[], float], time_limit_s: float
    ) -> None:
        self.problem = problem
        self.clock = clock
        self.time_limit_s = time_limit_s
        self.timed_out = False
        self.exchange = Exchange(problem, start, np.random.default_rng(SEED))
        self.best = start
        self.memory, self.imbalance = problem.objective(start)

    def stop(self) -> bool:
        """Whether the time is up; remembered, because the answer then depends on the machine."""
        self.timed_out = self.timed_out or self.clock() >= LAST_SHARE * self.time_limit_s
        return self.timed_out

    def search(self) -> Assignment:
        """Level by level of imbalance, from the lowest that is possible to the last that could be better.

        First exchanges, so that there is a good answer early; then proofs, which also say where to look again.
        """
        floor = self.problem.memory_floor()
        levels = self._possible_levels()
        for level in levels:
            if level + floor < self.objective():
                self._improve(level, floor)
        proven = min(levels[0] + floor, self.objective()) if levels else self.objective()
        for most in MOST_PATTERNS:
            buckets = choose_buckets(self.problem, most)
            if buckets is None:  # servers too large to enumerate so few
                continue
            enough = self.objective() if exact(buckets) else (1 - CLOSE_RATIO) * self.objective()
            if proven >= enough or self.stop():
                break
            proven = max(proven, self._prove(Configuration(self.problem, buckets), levels, floor))
            if exact(buckets):
                break
        return Assignment(self.best, self.memory, self.imbalance, proven, self.timed_out)

    def _possible_levels(self) -> list[int]:
        """Levels of imbalance, ascending, without those below which the widths and roles alone forbid everything."""
        floor = self.problem.imbalance_floor()
        levels = [level for level in self.problem.levels() if level >= floor]
        buckets = choose_buckets(self.problem, FEW_PATTERNS)
        if buckets is None:
            return levels
        coarse = Configuration(self.problem, buckets)
        while len(levels) > 1 and not coarse.possible(levels[0], NO_LIMIT, self.stop):
            levels.pop(0)
        return levels

    def _prove(self, configuration: Configuration, levels: list[int], floor: int) -> int:
        """A bound of eq 6 by these patterns; better placements, where the programs show that there are some."""
        proven = self.objective()
        for level in levels:
            if level + floor < self.objective():
                proven = min(proven, level + self._at_level(configuration, level, floor))
        return min(proven, self.objective())

    def objective(self) -> int:
        """Eq 6 of the best placement so far, bytes."""
        return self.memory + self.imbalance

    def _at_level(self, configuration: Configuration, level: int, floor: int) -> int:
        """Look for the least memory at this level; returns what is proven of it, bytes.

        A proof that nothing better than the best so far exists here returns a value that makes it the bound.
        """
        if self.stop():
            return floor
        nothing_better = max(floor, self.objective() - level)
        least = lower_limit(configuration, level, floor, nothing_better, self.stop)
        if least is None:
            return nothing_better
        self._improve(level, least)
        return self._fill(configuration, level, least) if configuration.exact else least

    def _improve(self, level: int, floor: int) -> None:
        self.exchange.run(level, floor, ROUNDS, self.stop)
        self._keep(self.exchange.placed)

    def _keep(self, placed: Ints) -> None:
        memory, imbalance = self.problem.objective(placed)
        if memory + imbalance < self.objective():
            self.best, self.memory, self.imbalance = placed.copy(), memory, imbalance

    def _fill(self, configuration: Configuration, level: int, least: int) -> int:
        """Whole servers at the least limits that allow it; returns what is proven of the memory, bytes."""
        before = self.objective() - level
        limits = [int(m) for m in configuration.limits(level, least, before)]
        proven, first, last, at = (
            0,
            0,
            len(limits),
            0,
        )  # limits[:proven] are impossible, limits[last] is reached
        while first < last and not self.stop():
            left_s = self.time_limit_s - self.clock()
            placed, impossible = configuration.fill(level, limits[at], left_s)
            if placed is not None:
                self._keep(placed)
                last = at
            else:
                proven = at + 1 if impossible else proven
                first = at + 1
            at = (first + last) // 2
        return limits[proven] if proven < len(limits) else max(least, before)
