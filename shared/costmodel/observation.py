"""What a profile measures, and which points it measures (the calibration plan). No I/O: the runner is the engine's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.costmodel.model import CostModel, StepShape, pack_prefills

LEAST_GAPS = 3  # between outputs while every request of a point decodes
SPARE_TOKENS = 8  # of the longest sequence, for outputs


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured time.

    prefill: `prompts` has one (tokens, cached tokens); from its arrival at an idle engine to its first token.
    batch: prompts that waited together while another ran; from that one's output to their last first token.
    decode: a step of `num_decodes` requests with `context_tokens` together.
    """

    kind: Literal["prefill", "batch", "decode"]
    ms: float
    prompts: tuple[tuple[int, int], ...] = ()
    num_decodes: int = 0
    context_tokens: int = 0
    waited_ratio: float = 0.0  # share of the time that the engine was ready to run and something else ran


def predict(model: CostModel, seen: Observation) -> float:
    """What the model says about what was measured."""
    if seen.kind == "prefill":
        return model.prefill_ms(*seen.prompts[0])
    if seen.kind == "decode":
        return model.decode_step_ms(seen.num_decodes, seen.context_tokens)
    return model.batch_ms(seen.prompts)


def steps_of(seen: Observation, max_batched_tokens: int) -> list[StepShape]:
    """The engine's steps that were measured."""
    if seen.kind == "decode":
        return [StepShape((), seen.num_decodes, seen.context_tokens)]
    return pack_prefills(seen.prompts, max_batched_tokens)


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to run: prompts that arrive together, each with so many outputs.

    cached_tokens of each prompt repeat a prompt that was run before (a multiple of the block size, less than its
    length). With `behind` another prompt is run first, so that all of them are waiting when it ends.
    """

    prompts: tuple[tuple[int, int], ...]
    output_tokens: int = 1
    behind: bool = False

    @property
    def num_tokens(self) -> int:
        """To be computed, outputs included."""
        return sum(n - cached + self.output_tokens for n, cached in self.prompts)


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """Of the engine, and how long the profile may take."""

    max_model_len: int
    max_batched_tokens: int
    max_running: int
    kv_tokens: int  # that the cache holds
    block_tokens: int
    budget_ms: float


@dataclass(slots=True)
class CalibrationPlan:
    """Which points, in which order: first short and cheap ones, then what the budget allows, twice if it does.

    Use: for point in plan: run it, then plan.took(point, ms).
    """

    limits: ProfileLimits
    spent_ms: float = 0.0
    num_skipped: int = 0
    _token_ms: float = 0.0
    _point_ms: float = 0.0

    def __iter__(self) -> Iterator[Point]:
        for _ in range(2):
            for point in grid(self.limits):
                if self._affordable(point):
                    yield point
                else:
                    self.num_skipped += 1

    def took(self, point: Point, ms: float) -> None:
        """A point was run: later ones are judged by the slowest rate seen of the longer points."""
        self.spent_ms += ms
        if point.num_tokens >= 64:
            self._token_ms = max(0.7 * self._token_ms, ms / point.num_tokens)
        else:
            self._point_ms = ms

    def _affordable(self, point: Point) -> bool:
        estimate = self._point_ms + self._token_ms * point.num_tokens
        return self.spent_ms + estimate <= self.limits.budget_ms


def lengths(limits: ProfileLimits) -> list[int]:
    """Powers of two and what lies between them, up to what one sequence and half the cache hold."""
    longest = min(limits.max_model_len - SPARE_TOKENS, limits.kv_tokens // 2)
    found, size = [], 16
    while size <= longest:
        found.append(size)
        size *= 2
    if found and longest > 1.4 * found[-1]:
        whole = longest // limits.block_tokens * limits.block_tokens
        if whole > found[-1]:  # not where a block is about as long as the context
            found.append(whole)
    return found


def grid(limits: ProfileLimits) -> list[Point]:
    """Points by worth for their cost: lengths, decodes, batches, cached ratios, then the same of the longest."""
    sizes = lengths(limits)
    if not sizes:
        return []
    middle = sizes[min(len(sizes) - 1, 5)]
    points = [Point(((size, 0),), output_tokens=6) for size in sizes[:6]]
    points += _decodes(limits, min(64, sizes[-1]), (4, 16))
    points += _batches(limits, ((middle * 3 // 4, middle // 2, middle // 4, middle // 8),))
    points += _cached(limits, middle)
    for size in sizes[6:]:
        points += [Point(((size, 0),), output_tokens=6), *_cached(limits, size)]
    points += _batches(limits, ((middle // 2,) * 8, (middle // 8,) * 16))
    points += _decodes(limits, middle, (6, 24))
    points += _decodes(limits, min(64, sizes[-1]), (64,))
    return points


def _cached(limits: ProfileLimits, size: int) -> list[Point]:
    """Half of it and seven eighths: of a prompt that was run before."""
    block = limits.block_tokens
    found = [size * eighths // 8 // block * block for eighths in (4, 7)]
    return [Point(((size, cached),)) for cached in found if 0 < cached < size]


def _fits(limits: ProfileLimits, sizes: Sequence[int]) -> bool:
    return len(sizes) <= limits.max_running and min(sizes) >= 16 and sum(sizes) <= limits.kv_tokens // 2


def _decodes(limits: ProfileLimits, context: int, numbers: Sequence[int]) -> list[Point]:
    points = [Point(((context, 0),) * number, output_tokens=10) for number in numbers]
    return [point for point in points if _fits(limits, [n + 16 for n, _ in point.prompts])]


def _batches(limits: ProfileLimits, batches: Sequence[Sequence[int]]) -> list[Point]:
    return [
        Point(tuple((size, 0) for size in sizes), behind=True) for sizes in batches if _fits(limits, sizes)
    ]
