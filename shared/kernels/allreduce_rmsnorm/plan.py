"""Which rows are whose, and which way a sum is made: numbers in, numbers out; no torch, no CUDA.

A way is picked by measured times (`Times`, made by calibrate.py) for this world size. Every rank must pick the same, so
rank 0's times are everybody's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log

from shared.errors import InvalidRequest

MIN_HIDDEN, MAX_HIDDEN = 1024, 16_384
VECTOR_ELEMENTS = 8  # one 16-byte load of bf16 or fp16
ELEMENT_BYTES = 2
MAX_TOKENS = 65_536
MAX_WORLD = 8
MAX_BUDGET_SMS = 32


class Algorithm(StrEnum):
    """How a sum over ranks is made."""

    ONE_SHOT = "one_shot"  # every rank reads all of every input: few tokens
    TWO_SHOT = "two_shot"  # every rank reduces and normalises the rows it owns and sends them to all
    MULTIMEM = (
        "multimem"  # two-shot through the switch (TokenWeave, Listing 1); only where multicast is reported
    )


class Engine(StrEnum):
    """Who reads and sends inside an SM."""

    PLAIN = "plain"  # threads, through registers: any GPU
    PUSH = (
        "push"  # threads send rows into slots of every rank and poll their own: one-shot of few rows, any GPU
    )
    BULK = "bulk"  # the SM's copy engine, through shared memory: sm_90
    MULTIMEM = "multimem"  # the switch: sm_90 with multicast


@dataclass(frozen=True, slots=True)
class Way:
    """How a sum of a given algorithm that may have every SM is made. `num_sms`: CTAs; 0: one an SM."""

    engine: Engine
    num_sms: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How run() treats `num_tokens` rows: a function of the number and the budget, the same on all ranks and layers.

    Rows [start, stop) are this rank's: after run() with a scattered residual only those rows of it are the sum. With
    ONE_SHOT every rank owns all rows, so that the residual is whole everywhere. A residual must be carried from layer
    to layer under one plan: one num_tokens, one budget, one provider.
    """

    algorithm: Algorithm
    num_tokens: int
    start: int
    stop: int


Curve = tuple[tuple[int, float], ...]  # (bytes, us), ascending in bytes


@dataclass(frozen=True, slots=True)
class Times:
    """Measured us of sums, a curve a way; one world size and dtype size. What was not run is absent.

    Ways are kept apart because not every one exists at every size: PUSH ends where slots do, and a time between that of
    a pushed size and of one that is read would be nobody's. A way without a budget may have every SM.
    few_sms: with how many SMs a sum is as fast as with any that leave most of the GPU to others; 0: not measured.
    """

    curves: Mapping[tuple[Algorithm, Way], Curve]
    few_sms: int = 0

    def us(self, algorithm: Algorithm, way: Way, num_bytes: int) -> float | None:
        """Between measured sizes straight in the logarithms, above them by the nearest one's rate, below as there.

        Of the nearest measured budget where `way` has one; None where nothing like it was measured.
        """
        curve = self.curves.get((algorithm, way))
        if curve is None and way.num_sms:
            budgets = [
                one.num_sms
                for of, one in self.curves
                if of is algorithm and one.engine is way.engine and one.num_sms
            ]
            if budgets:
                nearest = min(budgets, key=lambda one: abs(log(one / way.num_sms)))
                curve = self.curves[algorithm, Way(way.engine, nearest)]
        return None if curve is None else _on_curve(curve, num_bytes)

    def way(
        self, algorithm: Algorithm, num_bytes: int, engines: Sequence[Engine], num_sms: int = 0
    ) -> Way | None:
        """The fastest at this size; None where none was measured.

        Args: engines: that can make this sum; num_sms: the budget that it must keep, 0: it may have every SM.
        """
        if num_sms:
            asked = [Way(engine, num_sms) for engine in engines]
        else:
            asked = [way for of, way in self.curves if of is algorithm and way.engine in engines]
        found = {way: us for way in asked if (us := self.us(algorithm, way, num_bytes)) is not None}
        if num_sms:
            return min(found, key=lambda way: found[way]) if found else None
        return fastest_way(found) if any(not way.num_sms for way in found) else None


def _on_curve(curve: Curve, num_bytes: int) -> float:
    (first, first_us), (last, last_us) = curve[0], curve[-1]
    if num_bytes <= first:
        return first_us
    if num_bytes >= last:
        return last_us * num_bytes / last
    above = next(i for i, (size, _) in enumerate(curve) if size > num_bytes)
    (size, us), (next_size, next_us) = curve[above - 1], curve[above]
    share = log(num_bytes / size) / log(next_size / size)
    return us ** (1 - share) * next_us**share


# Where nothing was measured: one-shot while reading (n-1) inputs costs less than a second meeting of all ranks.
DEFAULT_ONE_SHOT_BYTES = {2: 1 << 20, 3: 512 << 10, 4: 512 << 10}
FEW_ONE_SHOT_BYTES = 256 << 10  # more than four ranks


# That can make a sum, first the one that does where nothing was measured. PUSH and BULK not always (CudaFused says).
ENGINES: Mapping[Algorithm, Sequence[Engine]] = {
    Algorithm.ONE_SHOT: (Engine.PUSH, Engine.PLAIN),
    Algorithm.TWO_SHOT: (Engine.BULK, Engine.PLAIN),
    Algorithm.MULTIMEM: (Engine.MULTIMEM,),
}


def way_of(
    algorithm: Algorithm, num_bytes: int, engines: Sequence[Engine], times: Times | None, num_sms: int = 0
) -> Way:
    """How a sum of `num_bytes` a rank is made. Args: as Times.way()."""
    measured = times.way(algorithm, num_bytes, engines, num_sms) if times is not None else None
    return measured or Way(engines[0], num_sms)


def _us_of(
    algorithm: Algorithm, num_bytes: int, engines: Sequence[Engine], times: Times | None, num_sms: int
) -> float | None:
    way = way_of(algorithm, num_bytes, engines, times, num_sms)
    return None if times is None else times.us(algorithm, way, num_bytes)


def pick(
    num_bytes: int,
    world: int,
    times: Times | None = None,
    engines: Mapping[Algorithm, Sequence[Engine]] = ENGINES,
    num_sms: int = 0,
    *,
    multicast: bool = False,
) -> Algorithm:
    """The way to sum `num_bytes` per rank. TWO_SHOT where two are as fast: it spares the link.

    Compared are the ways that would be taken at this size and with this budget (way_of); where nothing was measured
    with a budget, those with every SM. Args: engines: that can make a sum of this size, by algorithm.
    MULTIMEM only when the caller found multicast, and then for everything that is not ONE_SHOT's.
    """
    if world == 1:
        return Algorithm.ONE_SHOT
    large = Algorithm.MULTIMEM if multicast else Algorithm.TWO_SHOT
    for budget in (num_sms, 0):
        few_us, many_us = (
            _us_of(one, num_bytes, engines[one], times, budget) for one in (Algorithm.ONE_SHOT, large)
        )
        if few_us is not None and many_us is not None:
            return Algorithm.ONE_SHOT if few_us < many_us else large
    limit = DEFAULT_ONE_SHOT_BYTES.get(world, FEW_ONE_SHOT_BYTES)
    return Algorithm.ONE_SHOT if num_bytes <= limit else large


def owned_rows(num_tokens: int, world: int, rank: int) -> tuple[int, int]:
    """[start, stop) of a rank's rows of a two-shot sum: contiguous, in rank order, none more than one longer."""
    return num_tokens * rank // world, num_tokens * (rank + 1) // world


def make_plan(algorithm: Algorithm, num_tokens: int, world: int, rank: int) -> Plan:
    """The plan of one rank."""
    if algorithm is Algorithm.ONE_SHOT:
        return Plan(algorithm, num_tokens, 0, num_tokens)
    return Plan(algorithm, num_tokens, *owned_rows(num_tokens, world, rank))


def num_ctas(algorithm: Algorithm, num_tokens: int, world: int, most: int) -> int:
    """CTAs of a launch: the same on every rank, because CTA c meets CTA c of the others.

    CTA c takes every num_ctas-th row from its rank's c-th on; on ranks with a row fewer the last CTA only meets.
    """
    rows = num_tokens if algorithm is Algorithm.ONE_SHOT else -(-num_tokens // world)
    return max(1, min(most, rows))


def check_shape(world: int, rank: int, hidden: int, max_tokens: int) -> None:
    """Raises: InvalidRequest for what the kernel cannot do."""
    if not 1 <= world <= MAX_WORLD or not 0 <= rank < world:
        raise InvalidRequest(f"rank {rank} of {world}: 1 to {MAX_WORLD} ranks")
    if not MIN_HIDDEN <= hidden <= MAX_HIDDEN or hidden % VECTOR_ELEMENTS:
        raise InvalidRequest(
            f"hidden {hidden}: {MIN_HIDDEN} to {MAX_HIDDEN}, a multiple of {VECTOR_ELEMENTS}"
        )
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise InvalidRequest(f"{max_tokens} tokens: 1 to {MAX_TOKENS}")


def check_call(num_tokens: int, max_tokens: int, lane: int, num_lanes: int, num_sms: int) -> None:
    """Raises: InvalidRequest."""
    if not 1 <= num_tokens <= max_tokens:
        raise InvalidRequest(f"{num_tokens} tokens: this group's buffers hold 1 to {max_tokens}")
    if not 0 <= lane < num_lanes:
        raise InvalidRequest(f"lane {lane} of {num_lanes}")
    if not 0 <= num_sms <= MAX_BUDGET_SMS:
        raise InvalidRequest(f"a budget of {num_sms} SMs: 1 to {MAX_BUDGET_SMS}, or 0 for as many as help")


def two_shot_limit_us(num_bytes: int, world: int, link_gb_per_s: float) -> float:
    """What the link alone takes: 2(n-1)/n * bytes, in and out at once. The bound that a bench states beside times."""
    return 2 * (world - 1) / world * num_bytes / (link_gb_per_s * 1e3)


# Fewer CTAs than SMs must win by so much to be taken: repeated times of one way differ by about 1%.
FEWER_MARGIN_RATIO = 0.02
FEW_SLACK_RATIO = 0.05  # what a sum under other work may take longer for SMs that the other work then has


def fastest_way(times_us: Mapping[Way, float]) -> Way:
    """Of one size. Every SM, unless fewer win by FEWER_MARGIN_RATIO; registers where both engines are as fast.

    Raises: ValueError where no way has every SM.
    """
    order = list(Engine)

    def best(ways: list[Way]) -> Way:
        return min(ways, key=lambda way: (times_us[way], order.index(way.engine), way.num_sms))

    whole = best([way for way in times_us if not way.num_sms])
    fewer = [way for way in times_us if times_us[way] <= (1.0 - FEWER_MARGIN_RATIO) * times_us[whole]]
    return best(fewer) if fewer else whole


def fewest_sms(rows: Sequence[Mapping[Way, float]]) -> int:
    """The least budget that is at each size within FEW_SLACK_RATIO of the best budget there; 0 where none was measured.

    Args: rows: us by way, one mapping a size; ways without a budget do not count.
    """
    budgets: list[dict[int, float]] = []
    for row in rows:
        found: dict[int, float] = {}
        for way, us in row.items():
            if way.num_sms:
                found[way.num_sms] = min(us, found.get(way.num_sms, us))
        if found:
            budgets.append(found)
    if not budgets:
        return 0
    common = sorted(set.intersection(*(set(found) for found in budgets)))
    enough = [
        sms
        for sms in common
        if all(found[sms] <= (1.0 + FEW_SLACK_RATIO) * min(found.values()) for found in budgets)
    ]
    return enough[0] if enough else common[-1] if common else 0


def times_from_rows(
    rows: Sequence[tuple[int, Mapping[Algorithm, float]]] = (),
    ways: Sequence[tuple[int, Mapping[Way, float]]] = (),
    one_shot_ways: Sequence[tuple[int, Mapping[Way, float]]] = (),
    *,
    few_sms_from_bytes: int = 0,
) -> Times:
    """Times of rows in any order.

    Args:
        rows: (bytes, us by algorithm) of registers and every SM.
        ways: (bytes, us by way) of two-shot sums.
        one_shot_ways: the same of one-shot sums.
        few_sms_from_bytes: smaller two-shot sums have no say in how many SMs are enough.
    """
    points: dict[tuple[Algorithm, Way], dict[int, float]] = {}

    def put(algorithm: Algorithm, size: int, us_by_way: Mapping[Way, float]) -> None:
        for way, us in us_by_way.items():
            points.setdefault((algorithm, way), {})[size] = us

    for size, us_by_algorithm in rows:
        for algorithm, us in us_by_algorithm.items():
            put(algorithm, size, {Way(Engine.PLAIN): us})
    for size, us_by_way in ways:
        put(Algorithm.TWO_SHOT, size, us_by_way)
    for size, us_by_way in one_shot_ways:
        put(Algorithm.ONE_SHOT, size, us_by_way)
    few_sms = fewest_sms([us for size, us in ways if size >= few_sms_from_bytes])
    return Times({key: tuple(sorted(found.items())) for key, found in points.items()}, few_sms)
