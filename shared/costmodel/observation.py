"""What a profile measures, and which points it measures (the calibration plan). No I/O: the runner is the engine's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.costmodel.model import CostModel

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


def predict(model: CostModel, seen: Observation) -> float:
    """What the model says about what was measured."""
    if seen.kind == "prefill":
        return model.prefill_ms(*seen.prompts[0])
    if seen.kind == "decode":
        return model.decode_step_ms(seen.num_decodes, seen.context_tokens)
    return model.batch_ms(seen.prompts)


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
        found.append(longest // limits.block_tokens * limits.block_tokens)
    return found


def grid(limits: ProfileLimits) -> list[Point]:
    """Points by worth for their cost: lengths, cached ratios of the longer ones, batches, decodes."""
    sizes, block = lengths(limits), limits.block_tokens
    if not sizes:
        return []
    points = [Point(((sizes[0], 0),), output_tokens=6)]
    points += [Point(((size, 0),), output_tokens=6) for size in sizes[1:6]]
    points += _decodes(limits, context=min(64, sizes[-1]))
    middle = sizes[min(len(sizes) - 1, 5)]
    for eighths in (4, 7):
        cached = middle * eighths // 8 // block * block
        if 0 < cached < middle:
            points.append(Point(((middle, cached),)))
    points += _batches(limits, middle // 4)
    for size in sizes[6:]:
        points.append(Point(((size, 0),), output_tokens=6))
        points += [
            Point(((size, cached),)) for e in (4, 7) if 0 < (cached := size * e // 8 // block * block) < size
        ]
    points += _decodes(limits, context=middle)
    return points


def _decodes(limits: ProfileLimits, *, context: int) -> Iterator[Point]:
    size = 4
    while size <= min(limits.max_running, 64) and size * (context + 16) <= limits.kv_tokens // 2:
        yield Point(((context, 0),) * size, output_tokens=8, behind=True)
        size *= 4


def _batches(limits: ProfileLimits, length: int) -> Sequence[Point]:
    if length < 16 or limits.max_running < 4 or 4 * length > limits.kv_tokens // 2:
        return ()
    return (Point(((length, 0),) * 4, behind=True),)
