"""What each way of copying costs on this machine, by direction and size, and the choice that follows. Pure.

A line is `fixed_us + sum(each_us(size))` over the runs of a set: two figures that a measurement at start gives
for a few sizes (calibrate.py). Between measured sizes the cost of a run is interpolated, beyond them it grows as
the bytes do. Staging costs the longer of the CPU's and the copy engine's part, plus filling the first slot.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shared.errors import SettingsError
from shared.kernels.copy_pages.copies import U64, Direction
from shared.kernels.copy_pages.plan import Choice, Limits, Method

FORMAT = 3
MOST_CHOSEN = 1024
MEAN_SPREAD = 8  # sizes within this factor count as their mean: telling them apart costs more than it says
FIRST_SLOT_BYTES = 4 << 20  # of a staged copy, moved before the copy engine can start
LANE_SHARE = 0.02  # what one more lane must gain at least: measurements differ by that much
KERNEL_SHARE = 0.25  # what a kernel must gain at least: its multiprocessors are taken from those who compute
Way: TypeAlias = tuple[Direction, Method, int]  # direction, method, lanes


Tally: TypeAlias = Sequence[tuple[int, int]]  # (bytes of a run, how many)


def tally(sizes: U64) -> Tally:
    """What a cost asks of a set of runs: close sizes as their mean, since a cost is nearly linear between them."""
    if sizes.size == 0:
        return ()
    if int(sizes.max()) <= MEAN_SPREAD * int(sizes.min()):  # KV blocks, some of them neighbours
        return ((int(sizes.sum()) // sizes.size, sizes.size),)
    values, counts = np.unique(sizes, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Line:
    """Cost of one way: `fixed_us` a set and `each_us[i]` a run of `sizes[i]` bytes (ascending).

    `held_us[i]` of it the submitting thread is held, a run; empty: not measured.
    """

    fixed_us: float
    sizes: tuple[int, ...]
    each_us: tuple[float, ...]
    held_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.sizes), len(self.each_us), len(self.held_us or self.sizes)}
        if not self.sizes or len(lengths) > 1 or min(self.each_us) <= 0 or min(self.held_us, default=0) < 0:
            raise SettingsError(f"a cost line needs a positive cost for each size: {self}")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise SettingsError(f"sizes of a cost line ascend: {self.sizes}")

    def run_us(self, size: int) -> float:
        """Expected time of one more run of this size, us."""
        last = self.sizes[-1]
        return self.each_us[-1] * size / last if size > last else self._between(self.each_us, size)

    def _between(self, values: tuple[float, ...], size: int) -> float:
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        if right == 0 or size >= self.sizes[right]:
            return values[right]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return values[right - 1] * (1 - share) + values[right] * share

    def cost_us(self, runs: Tally) -> float:
        """Expected time of a set of runs, us. Cost: about 1 us for each different size."""
        if not runs:
            return 0.0
        return self.fixed_us + sum(self.run_us(size) * count for size, count in runs)

    def hold_us(self, runs: Tally) -> float:
        """How long submitting a set holds the thread, us, as far as it grows with the set."""
        return sum(self._between(self.held_us, size) * count for size, count in runs) if self.held_us else 0.0

    def gb_per_s(self, size: int) -> float:
        """Rate of many runs of one size, GB/s (1e9)."""
        return size / self.run_us(size) / 1e3


@dataclass(frozen=True, slots=True)
class CostTable:
    """Lines of one machine; `key` names the machine and driver they were measured on."""

    key: str
    lines: Mapping[Way, Line]
    cpu_move: Line | None = None  # the CPU's part of a staged copy: pieces between host pages and a slot
    has_batch: bool = True
    max_descriptors: int = (
        Limits().max_descriptors
    )  # of one batch call: fewer let the copy engine start earlier
    _chosen: dict[tuple[Direction, bool, int, int], Choice] = field(
        default_factory=dict, compare=False, repr=False
    )  # for sets of one size, since the same ones come again and again

    def limits(self) -> Limits:
        """The default bounds with the measured number of descriptors a call."""
        return Limits(max_descriptors=self.max_descriptors)

    def choose(
        self,
        direction: Direction,
        runs: U64,
        pieces: U64 | None,
        staged_runs: U64 | None,
        *,
        kernels: bool = False,
    ) -> Choice:
        """The cheapest method whose cost is known; a batch, or a loop without one, where none is.

        A cost is the time until the bytes are there and, once more, the part of it in which the caller is held.
        """
        fallback = Choice(Method.BATCH if self.has_batch else Method.LOOP)
        if runs.size <= 1 and pieces is None:
            return fallback
        asked = tally(runs)
        if pieces is not None or len(asked) != 1:
            return self._cheapest(direction, asked, pieces, staged_runs, kernels=kernels)
        key = (direction, kernels, *asked[0])
        if (known := self._chosen.get(key)) is not None:
            return known
        if len(self._chosen) >= MOST_CHOSEN:  # any thread
            self._chosen.clear()
        found = self._chosen[key] = self._cheapest(direction, asked, None, None, kernels=kernels)
        return found

    def _cheapest(
        self,
        direction: Direction,
        asked: Tally,
        pieces: U64 | None,
        staged_runs: U64 | None,
        *,
        kernels: bool,
    ) -> Choice:
        fallback = Choice(Method.BATCH if self.has_batch else Method.LOOP)
        best, best_price = (fallback.method, fallback.lanes, 0.0), float("inf")
        for (way, method, lanes), line in self.lines.items():
            refused = (method is Method.BATCH and not self.has_batch) or (
                method is Method.KERNEL and not kernels
            )
            if way is direction and not refused:
                cost = line.cost_us(asked)
                price = _price_us(method, lanes, cost) + line.hold_us(asked)
                if price < best_price:
                    best, best_price = (method, lanes, cost), price
        batch = self.lines.get((direction, fallback.method, 1))
        if pieces is not None and staged_runs is not None and self.cpu_move is not None and batch is not None:
            moving = self.cpu_move.cost_us(tally(pieces))
            first = moving * min(1.0, float(FIRST_SLOT_BYTES) / max(1.0, float(pieces.sum())))
            cost = max(moving, batch.cost_us(tally(staged_runs))) + first
            if _price_us(Method.STAGED, 1, cost) < best_price:
                best = Method.STAGED, 1, cost
        return Choice(*best)

    def to_json(self) -> str:
        """For a cache file; `from_json` reads it."""
        rows = [
            {"direction": way[0], "method": way[1], "lanes": way[2], **_line_fields(line)}
            for way, line in self.lines.items()
        ]
        move = _line_fields(self.cpu_move) if self.cpu_move else None
        whole = {
            "format": FORMAT,
            "key": self.key,
            "has_batch": self.has_batch,
            "cpu_move": move,
            "lines": rows,
            "max_descriptors": self.max_descriptors,
        }
        return json.dumps(whole, indent=1)

    def render(self, sizes: Iterable[int] = ()) -> str:
        """What was measured and what follows, as text: GB/s by direction and size, the choice marked with *."""
        rows = []
        for direction in sorted({way[0] for way in self.lines}):
            ways = [way for way in self.lines if way[0] is direction]
            rows.append(f"{direction:17}" + "".join(f"{_label(way):>10}" for way in ways) + "   (GB/s)")
            for size in sizes or self.lines[ways[0]].sizes:
                count = max(2, (16 << 20) // size)
                sized = np.full(count, size, np.uint64)
                chosen = self.choose(direction, sized, None, None, kernels=True)
                cells = [
                    f"{self.lines[way].gb_per_s(size):9.1f}{'*' if way[1:] == (chosen.method, chosen.lanes) else ' '}"
                    for way in ways
                ]
                rows.append(f"{_size(size):>17}" + "".join(cells))
        if self.cpu_move is not None:
            cells = [f"{_size(size)} {self.cpu_move.gb_per_s(size):.1f}" for size in self.cpu_move.sizes]
            rows.append("CPU gather, GB/s: " + ", ".join(cells))
        return "\n".join(
            [f"copy costs of {self.key}, {self.max_descriptors} descriptors a batch call", *rows]
        )


def from_json(text: str, *, key: str) -> CostTable | None:
    """A table from a cache file; None when it is of another machine, driver or format, or damaged."""
    try:
        whole: dict[str, Any] = json.loads(text)
        if whole["format"] != FORMAT or whole["key"] != key:
            return None
        lines = {
            (Direction(row["direction"]), Method(row["method"]), int(row["lanes"])): _line(row)
            for row in whole["lines"]
        }
        move = _line(whole["cpu_move"]) if whole["cpu_move"] else None
        return CostTable(key, lines, move, bool(whole["has_batch"]), int(whole["max_descriptors"]))
    except (KeyError, TypeError, ValueError, SettingsError):
        return None


def _price_us(method: Method, lanes: int, cost_us: float) -> float:
    return cost_us * (1 + LANE_SHARE * lanes + KERNEL_SHARE * (method is Method.KERNEL))


def _line(row: dict[str, Any]) -> Line:
    each, held = (tuple(map(float, row[name])) for name in ("each_us", "held_us"))
    return Line(float(row["fixed_us"]), tuple(map(int, row["sizes"])), each, held)


def _line_fields(line: Line) -> dict[str, Any]:
    return {
        "fixed_us": line.fixed_us, "sizes": line.sizes, "each_us": line.each_us, "held_us": line.held_us
    }  # fmt: skip


def _label(way: Way) -> str:
    return way[1] if way[2] == 1 else f"{way[1]} x{way[2]}"


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
