"""A first placement, or why there is none."""

import math
from dataclasses import dataclass

import numpy as np

from shared.placer.highs import Program, solve_integer
from shared.placer.problem import Ints, Kind, Problem

MOST_NODES = 5000


@dataclass(frozen=True, slots=True)
class Packing:
    """As much as was placed within eqs 1 to 3 [num_servers, num_kinds]."""

    placed: Ints
    left: Ints  # instances of each kind that stay outside
    proven: bool  # that no placement uses more GPUs


def pack(problem: Problem, time_limit_s: float) -> Packing:
    """A placement of everything, widest first, to the emptiest server; where that fails HiGHS places what it can."""
    placed = np.zeros((problem.num_servers, len(problem.kinds)), dtype=np.int64)
    free = [problem.shapes[s].gpus for s in problem.shape_of]
    for number, kind in enumerate(problem.kinds):
        for _ in range(kind.count):
            fitting = [
                s for s in range(problem.num_servers) if kind.tp <= free[s] and _allowed(problem, kind, s)
            ]
            if not fitting:
                return _most_placed(problem, time_limit_s)
            server = max(fitting, key=lambda s: (free[s], -s))
            free[server] -= kind.tp
            placed[server, number] += 1
    return Packing(placed, np.zeros_like(problem.counts), proven=True)


def reasons(problem: Problem) -> list[str]:
    """Which constraint each impossible thing breaks, most telling first; [] when no single one explains it."""
    found = []
    largest = max(shape.gpus for shape in problem.shapes)
    roomiest = max(shape.gpu_memory_bytes for shape in problem.shapes)
    wide = sorted({kind.tp for kind in problem.kinds if kind.tp > largest}, reverse=True)
    for tp in wide:
        count = sum(kind.count for kind in problem.kinds if kind.tp == tp)
        found.append(
            f"tensor parallelism {tp} needs {tp} GPUs in one server, and the largest has {largest} (eq 2): "
            f"{count} instance(s)"
        )
    found += [
        f"a producer lends {kind.bytes_per_gpu} bytes of a GPU, and no GPU has more than {roomiest}"
        for kind in problem.kinds
        if kind.bytes_per_gpu > roomiest
    ]
    found += [
        f"tensor parallelism {kind.tp} with {kind.bytes_per_gpu} bytes to lend of each GPU: no server has both as many "
        f"GPUs and as much memory in each: {kind.count} instance(s)"
        for kind in problem.kinds
        if kind.tp <= largest and kind.bytes_per_gpu <= roomiest and not _fits_anywhere(problem, kind)
    ]
    needed = int(problem.counts @ problem.tp)
    there = sum(shape.gpus * shape.count for shape in problem.shapes)
    if needed > there:
        found.append(f"{needed} GPUs are needed and the servers have {there} (eq 3)")
    for tp in sorted({kind.tp for kind in problem.kinds if 1 < kind.tp <= largest}, reverse=True):
        groups = sum(kind.count for kind in problem.kinds if kind.tp >= tp)
        room = sum(shape.gpus // tp * shape.count for shape in problem.shapes)
        if groups > room:
            found.append(
                f"{groups} instances of {tp} GPUs or more, and the servers have room for {room} of them, "
                "because all shards of an instance are on one server (eqs 2 and 3)"
            )
            break
    return found


def _fits_anywhere(problem: Problem, kind: Kind) -> bool:
    """Alone."""
    return any(problem.most(kind, shape) for shape in problem.shapes)


def _allowed(problem: Problem, kind: Kind, server: int) -> bool:
    return problem.most(kind, problem.shapes[problem.shape_of[server]]) > 0


def _most_placed(problem: Problem, time_limit_s: float) -> Packing:
    """The placement that uses most GPUs, of everything that fits anywhere.

    Kinds of one width that fit the same shapes are one group here: what memory they need does not matter.
    """
    shapes = [problem.shapes[s] for s in problem.shape_of]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, kind in enumerate(problem.kinds):
        fits = tuple(int(problem.most(kind, shape) > 0) for shape in problem.shapes)
        groups.setdefault((kind.tp, *fits), []).append(number)
    members = list(groups.values())
    tp = [problem.kinds[numbers[0]].tp for numbers in members]
    counts = [sum(problem.kinds[k].count for k in numbers) for numbers in members]
    num_servers, num_groups = len(shapes), len(members)
    high = np.zeros((num_servers, num_groups))
    matrix = np.zeros((num_groups + num_servers, num_servers * num_groups))
    for s, shape in enumerate(shapes):
        for g in range(num_groups):
            fits = any(problem.most(problem.kinds[k], shape) for k in members[g])
            high[s, g] = min(counts[g], shape.gpus // tp[g]) if fits else 0
            matrix[g, s * num_groups + g] = 1.0
            matrix[num_groups + s, s * num_groups + g] = tp[g]
    answer = solve_integer(
        Program(
            cost=np.tile(-np.array(tp, dtype=np.float64), num_servers),
            high=high.ravel(),
            matrix=matrix,
            row_low=np.full(num_groups + num_servers, -math.inf),
            row_high=np.array([*counts, *(shape.gpus for shape in shapes)], dtype=np.float64),
        ),
        time_limit_s=time_limit_s,
        max_nodes=MOST_NODES,
    )
    placed = np.zeros((num_servers, len(problem.kinds)), dtype=np.int64)
    if answer.values is None:
        return Packing(placed, problem.counts, proven=False)
    left = {k: problem.kinds[k].count for k in range(len(problem.kinds))}
    for s, row in enumerate(answer.values.reshape(num_servers, num_groups)):
        for g, number in enumerate(row):
            for _ in range(int(number)):
                kind = next(k for k in members[g] if left[k])
                left[kind] -= 1
                placed[s, kind] += 1
    return Packing(placed, problem.counts - placed.sum(axis=0), answer.optimal)
