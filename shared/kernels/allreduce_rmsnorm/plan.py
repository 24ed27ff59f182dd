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
    """How run() treats `num_tokens` rows: a function of the number alone, the same on all ranks and for all layers.

    Rows [start, stop) are this rank's: after run() with a scattered residual only those rows of it are the sum. With
    ONE_SHOT every rank owns all rows, so that the residual is whole everywhere. A residual must be carried from layer
    to layer under one plan: one num_tokens, one provider.
    """

    algorithm: Algorithm
    num_tokens: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Times:
    """Measured us of each algorithm at ascending sizes, one world size and dtype size; what was not run is absent.

    ways: ascending sizes, and the fastest way of a two-shot sum that may have every SM; () where that was not measured.
    one_shot_ways: the same of one-shot sums.
    few_sms: with how many SMs a sum is as fast as with any that leave most of the GPU to others; 0: not measured.
    """

    sizes_bytes: tuple[int, ...]
    times_us: Mapping[Algorithm, tuple[float, ...]]
    ways: tuple[tuple[int, Way], ...] = ()
    few_sms: int = 0
    one_shot_ways: tuple[tuple[int, Way], ...] = ()

    def way(self, algorithm: Algorithm, num_bytes: int) -> Way | None:
        """Of the nearest measured size, in the logarithms. None where nothing was measured."""
        measured = {Algorithm.ONE_SHOT: self.one_shot_ways, Algorithm.TWO_SHOT: self.ways}.get(algorithm)
        if not measured:
            return None
        return min(measured, key=lambda row: abs(log(row[0] / num_bytes)))[1]

    def at(self, algorithm: Algorithm, num_bytes: int) -> float:
        """Between measured sizes straight in the logarithms, beyond them by the nearest one's rate."""
        sizes, times = self.sizes_bytes, self.times_us[algorithm]
        if num_bytes <= sizes[0]:
            return times[0]
        if num_bytes >= sizes[-1]:
            return times[-1] * num_bytes / sizes[-1]
        above = next(i for i, size in enumerate(sizes) if size > num_bytes)
        share = log(num_bytes / sizes[above - 1]) / log(sizes[above] / sizes[above - 1])
        return times[above - 1] ** (1 - share) * times[above] ** share


# Where nothing was measured: one-shot while reading (n-1) inputs costs less than a second meeting of all ranks.
DEFAULT_ONE_SHOT_BYTES = {2: 1 << 20, 3: 512 << 10, 4: 512 << 10}
FEW_ONE_SHOT_BYTES = 256 << 10  # more than four ranks


def pick(num_bytes: int, world: int, times: Times | None = None, *, multicast: bool = False) -> Algorithm:
    """The way to sum `num_bytes` per rank. TWO_SHOT where two are as fast: it spares the link.

    MULTIMEM only when the caller found multicast, and then for everything that is not ONE_SHOT's.
    """
    if world == 1:
        return Algorithm.ONE_SHOT
    large = Algorithm.MULTIMEM if multicast else Algorithm.TWO_SHOT
    if times is not None and {Algorithm.ONE_SHOT, large} <= set(times.times_us):
        faster = times.at(Algorithm.ONE_SHOT, num_bytes) < times.at(large, num_bytes)
        return Algorithm.ONE_SHOT if faster else large
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
    rows: Sequence[tuple[int, Mapping[Algorithm, float]]],
    ways: Sequence[tuple[int, Mapping[Way, float]]] = (),
    one_shot_ways: Sequence[tuple[int, Mapping[Way, float]]] = (),
) -> Times:
    """Rows of (bytes, us by algorithm), any order; algorithms that miss a size are left out.

    Args:
        ways: (bytes, us by way) of two-shot sums, any order.
        one_shot_ways: the same of one-shot sums.
    """

    def fastest(measured: Sequence[tuple[int, Mapping[Way, float]]]) -> tuple[tuple[int, Way], ...]:
        return tuple((size, fastest_way(us)) for size, us in sorted(measured, key=lambda row: row[0]))

    ordered = sorted(rows, key=lambda row: row[0])
    common = set.intersection(*(set(row[1]) for row in ordered))
    return Times(
        tuple(row[0] for row in ordered),
        {one: tuple(row[1][one] for row in ordered) for one in sorted(common)},
        fastest(ways),
        fewest_sms([us for _, us in ways]),
        fastest(one_shot_ways),
    )
