"""Which driver calls move a set of copies: merge, cut, choose, share out. Pure: no driver, no clock.

A KV page that lies beside another page at both ends is one longer copy; what is left goes out as one plain copy,
as `cuMemcpyBatchAsync` calls of a capped number of descriptors (vLLM PR 38460), as a loop of plain copies, through a
pinned staging buffer, or by a kernel (pieces.cu). The cost table (costs.py), measured at start, says which.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.kernels.copy_pages.copies import (
    NO_ADDRESSES,
    U64,
    Copies,
    Direction,
    InvalidCopies,
    check,
    ordered,
)

FIRST_CALL_RUNS = 16  # of a batch: a descriptor takes 0.4 us, in which the copy engine stands still at first
KERNEL_CTAS = 8  # thread blocks, and so multiprocessors, that one lane of a kernel takes
KERNEL_CTA_WARPS = 16
KERNEL_ROW_BYTES = 16 << 10  # a warp's piece of work is no longer, or
ROWS_PER_WARP = 8  # so many are a warp's share
KERNEL_ALIGNMENT = 16  # of every address and size that a kernel copies


class Method(StrEnum):
    """How a set of runs goes out."""

    ONE = "one"  # a single run: one plain copy
    LOOP = "loop"  # a plain copy for each run
    BATCH = "batch"  # cuMemcpyBatchAsync, the runs shared out over `lanes` streams
    STAGED = "staged"  # the host side is gathered or scattered by the CPU in pinned slots
    KERNEL = "kernel"  # pieces.cu on KERNEL_CTAS multiprocessors a lane


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, over how many streams, and what the cost table expects of it (0 when it was not measured)."""

    method: Method
    lanes: int = 1
    expected_us: float = 0.0


class Chooser(Protocol):
    """What decides between methods: a measured cost table, or `always`."""

    def choose(
        self,
        direction: Direction,
        runs: U64,
        pieces: U64 | None,
        staged_runs: U64 | None,
        *,
        kernels: bool = False,
    ) -> Choice:
        """The cheapest method for runs of these sizes.

        Args:
            runs: bytes of each run.
            pieces: bytes of each piece that the CPU would move for a staged copy; None: staging is not allowed.
            staged_runs: bytes of each run between slot and device, with `pieces`.
            kernels: a kernel may copy them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """The same choice for every set; for measurements and tests."""

    choice: Choice

    def choose(
        self,
        direction: Direction,
        runs: U64,
        pieces: U64 | None,
        staged_runs: U64 | None,
        *,
        kernels: bool = False,
    ) -> Choice:
        """The choice given, or a batch where it is not allowed."""
        refused = (self.choice.method is Method.STAGED and pieces is None) or (
            self.choice.method is Method.KERNEL and not kernels
        )
        return Choice(Method.BATCH) if refused else self.choice


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one driver call."""

    max_descriptors: int = (
        4096  # of one cuMemcpyBatchAsync; bounds how long a call holds the submitting thread
    )
    max_run_bytes: int = 64 << 20  # longer runs are cut, so that other copies get a turn on the copy engine
    max_lanes: int = 4
    slot_bytes: int = 4 << 20  # of one staging slot
    max_kernel_rows: int = 32768  # of one launch; more go out as a batch

    def __post_init__(self) -> None:
        for name in ("max_descriptors", "max_run_bytes", "max_lanes", "slot_bytes", "max_kernel_rows"):
            if getattr(self, name) < 1:
                raise InvalidCopies(f"{name} is at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Call:
    """Runs first..last (last excluded) of the plan, to be submitted on a lane; lane 0 is the caller's stream."""

    first: int
    last: int
    lane: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What goes through one staging slot: the CPU moves pieces, the copy engine moves runs.

    Every byte of the slot up to `num_bytes` belongs to one piece and to one run. Columns are uint64.
    """

    host: U64  # address of each piece
    offsets: U64  # of each piece in the slot
    sizes: U64
    device: U64  # address of each run
    run_offsets: U64
    run_sizes: U64

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot in use."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to submit. Every byte of the set is in exactly one run and that in exactly one call; a staged set has
    groups instead of calls, and what a kernel copies goes out at once."""

    direction: Direction
    choice: Choice
    runs: Copies
    calls: tuple[Call, ...]
    groups: tuple[Group, ...]
    num_copies: int  # as asked for, before merging

    @property
    def lanes(self) -> int:
        """Streams that the calls use."""
        return 1 + max((call.lane for call in self.calls), default=0)


def merge(copies: Copies, *, boundaries: U64 = NO_ADDRESSES) -> Copies:
    """Runs: copies that continue each other at both ends become one.

    Args:
        copies: as `ordered` leaves them; runs come in the same order.
        boundaries: sorted addresses no run may cross: where one allocation or host registration ends and the
            next begins (the driver refuses a copy over two of them).
    """
    used = copies
    if len(used) < 2:
        return used
    source, target, size = used.sources, used.targets, used.sizes
    joined = (source[:-1] + size[:-1] == source[1:]) & (target[:-1] + size[:-1] == target[1:])
    if boundaries.size and joined.any():
        behind = np.flatnonzero(joined) + 1  # few, as a rule
        crossing = _is_in(source[behind], boundaries) | _is_in(target[behind], boundaries)
        joined[behind[crossing] - 1] = False
    if not joined.any():
        return used
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return Copies(source[first], target[first], np.add.reduceat(size, first))


def _is_in(values: U64, ordered: U64) -> NDArray[np.bool_]:
    place = np.minimum(np.searchsorted(ordered, values), ordered.size - 1)
    return ordered[place] == values


def cut(copies: Copies, max_bytes: int) -> Copies:
    """The same bytes in pieces of at most `max_bytes`, in order."""
    if len(copies) == 0 or int(copies.sizes.max()) <= max_bytes:
        return copies
    pieces = -(-copies.sizes.astype(np.int64) // max_bytes)
    owner = np.repeat(np.arange(len(copies)), pieces)
    number = np.arange(owner.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = (number * max_bytes).astype(np.uint64)
    size = np.minimum(copies.sizes[owner] - offset, np.uint64(max_bytes))
    return Copies(copies.sources[owner] + offset, copies.targets[owner] + offset, size)


def share_out(sizes: U64, lanes: int, max_descriptors: int, first: int = 0) -> tuple[Call, ...]:
    """Calls of at most `max_descriptors` runs each; every lane gets about the same bytes.

    The calls of the lanes alternate, so that every lane has work after the first round of calls.

    Args:
        first: the most runs of a lane's first call, each next one may have four times as many: the copies begin when
            a call has returned. 0: no such bound.
    """
    num_runs = sizes.size
    lanes = max(1, min(lanes, num_runs))
    edges = [0, num_runs]
    if lanes > 1:
        behind = np.cumsum(sizes)
        marks = [int(behind[-1]) * lane // lanes for lane in range(1, lanes)]
        inner = (
            np.searchsorted(behind, np.asarray(marks, np.uint64)) + 1
        )  # a run that reaches a mark is before it
        edges[1:1] = inner.tolist()
    rounds: list[tuple[int, Call]] = []
    lane = 0
    for start, last in pairwise(edges):
        if start >= last:
            continue
        number, most = 0, min(first or max_descriptors, max_descriptors)
        while start < last:
            stop = min(start + most, last)
            rounds.append((number, Call(start, stop, lane)))
            number, start, most = number + 1, stop, min(4 * most, max_descriptors)
        lane += 1
    return tuple(call for _, call in sorted(rounds, key=lambda item: (item[0], item[1].lane)))


def stage(
    copies: Copies, direction: Direction, slot_bytes: int, boundaries: U64 = NO_ADDRESSES
) -> tuple[Group, ...]:
    """Slots full of copies, in the order of their device addresses, so that device neighbours become one run.

    Cost: one sort and a few operations a group.
    """
    to_device = direction is Direction.HOST_TO_DEVICE
    pieces = cut(copies.take(copies.sizes > 0), slot_bytes)
    device, host = (pieces.targets, pieces.sources) if to_device else (pieces.sources, pieces.targets)
    order = np.argsort(device)
    device, host, sizes = device[order], host[order], pieces.sizes[order]
    ends = np.cumsum(sizes)
    groups = []
    first = 0
    while first < sizes.size:
        base = ends[first] - sizes[first]
        last = int(np.searchsorted(ends, base + np.uint64(slot_bytes), side="right"))
        groups.append(_group(device[first:last], host[first:last], sizes[first:last], boundaries))
        first = last
    return tuple(groups)


def _group(device: U64, host: U64, sizes: U64, boundaries: U64) -> Group:
    offsets = np.cumsum(sizes) - sizes
    joined = device[:-1] + sizes[:-1] == device[1:]
    if boundaries.size:
        joined &= ~_is_in(device[1:], boundaries)
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return Group(host, offsets, sizes, device[first], offsets[first], np.add.reduceat(sizes, first))


STAGEABLE = (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST)


def plan_copies(
    copies: Copies,
    direction: Direction,
    chooser: Chooser,
    *,
    limits: Limits | None = None,
    boundaries: U64 = NO_ADDRESSES,
    staging: bool = False,
    merging: bool = True,
    kernels: bool = False,
) -> Plan:
    """The calls for one set.

    A single run is one plain copy whatever the choice, except that a staged set stays staged.

    Args:
        staging: the CPU may read host sources at submit and write host targets at wait.
        merging: False leaves neighbours apart; for measurements.
        kernels: a kernel may copy it, if its addresses and sizes are aligned.
    Raises: InvalidCopies when copies of the set depend on each other.
    """
    limits = limits or Limits()
    runs = ordered(copies)
    check(runs)
    runs = cut(merge(runs, boundaries=boundaries) if merging else runs, limits.max_run_bytes)
    groups: tuple[Group, ...] = ()
    pieces = staged_runs = None
    if staging and direction in STAGEABLE and len(runs):
        groups = stage(copies, direction, limits.slot_bytes, boundaries)
        pieces = np.concatenate([group.sizes for group in groups])
        staged_runs = np.concatenate([group.run_sizes for group in groups])
    kernels = kernels and len(runs) > 1 and _is_aligned(runs)
    choice = chooser.choose(direction, runs.sizes, pieces, staged_runs, kernels=kernels)
    if choice.method is Method.KERNEL:
        lanes = min(choice.lanes, limits.max_lanes)
        rows = _kernel_rows(runs, lanes)
        if len(rows) <= limits.max_kernel_rows:
            return Plan(direction, replace(choice, lanes=lanes), rows, (), (), len(copies))
        choice = chooser.choose(direction, runs.sizes, pieces, staged_runs)
    if choice.method is Method.STAGED:
        return Plan(direction, choice, runs, (), groups, len(copies))
    return _plan_runs(runs, direction, choice, limits, len(copies))


def _kernel_rows(runs: Copies, lanes: int) -> Copies:
    """Runs as the warps of a launch take them: long ones are cut, so that all end together, if there is any such."""
    share = runs.num_bytes // (KERNEL_CTAS * KERNEL_CTA_WARPS * lanes * ROWS_PER_WARP)
    return cut(runs, max(KERNEL_ROW_BYTES, share // KERNEL_ALIGNMENT * KERNEL_ALIGNMENT))


def _is_aligned(copies: Copies) -> bool:
    bits = np.bitwise_or.reduce(copies.sources | copies.targets | copies.sizes)
    return int(bits) % KERNEL_ALIGNMENT == 0


def _plan_runs(runs: Copies, direction: Direction, choice: Choice, limits: Limits, num_copies: int) -> Plan:
    if len(runs) == 1:
        one = Choice(Method.ONE, 1, choice.expected_us)
        return Plan(direction, one, runs, (Call(0, 1),), (), num_copies)
    batch = choice.method is Method.BATCH
    lanes = min(choice.lanes, limits.max_lanes) if batch else 1
    cap = limits.max_descriptors if batch else max(1, len(runs))
    calls = share_out(runs.sizes, lanes, cap, FIRST_CALL_RUNS if batch else 0) if len(runs) else ()
    return Plan(direction, choice, runs, calls, (), num_copies)
