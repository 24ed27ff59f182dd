"""The placer's question in numbers: kinds of instances, shapes of servers, and what a server's contents cost.

Instances that look alike (same GPUs, same bytes, same role) are one kind with a count, and servers that look alike one
shape: the program then chooses how many of each kind a server holds (eqs 1 and 2 in one integer) instead of a binary
for each shard and server, which takes all symmetry between equals away. Source: AQUA 5, eqs 1-6; decision 0015.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """Instances alike. `bytes_per_gpu` is R_m of each shard: above 0 lent, below 0 needed, 0 neither."""

    tp: int  # GPUs of one instance, all on one server (eq 2)
    bytes_per_gpu: int
    count: int = 1

    @property
    def sign(self) -> int:
        """t of eq 5, with 0 for R_m = 0, where the paper's quotient has no value."""
        return (self.bytes_per_gpu > 0) - (self.bytes_per_gpu < 0)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Servers alike."""

    gpus: int
    gpu_memory_bytes: int
    count: int = 1


class Problem:
    """Kinds and shapes as columns of numbers. Server s of `num_servers` has shape `shape_of[s]`.

    A server's contents are a row of counts, one for each kind; `memory` and `imbalance` of it are eqs 4 and 5.
    """

    def __init__(self, kinds: Sequence[Kind], shapes: Sequence[Shape]) -> None:
        self.kinds = tuple(sorted(kinds, key=lambda kind: (-kind.tp, kind.bytes_per_gpu)))
        self.shapes = tuple(sorted(shapes, reverse=True))
        self.tp = _column(kind.tp for kind in self.kinds)
        self.memory_bytes = _column(kind.tp * kind.bytes_per_gpu for kind in self.kinds)
        self.signs = _column(kind.tp * kind.sign for kind in self.kinds)
        self.counts = _column(kind.count for kind in self.kinds)
        self.shape_of = [number for number, shape in enumerate(self.shapes) for _ in range(shape.count)]
        self.num_servers = len(self.shape_of)

    def most(self, kind: Kind, shape: Shape) -> int:
        """Instances of a kind that one server of a shape can hold: 0 where a producer lends more than a GPU has."""
        if kind.bytes_per_gpu > shape.gpu_memory_bytes:
            return 0
        return min(kind.count, shape.gpus // kind.tp)

    def memory(self, contents: Ints) -> Ints:
        """|mem_s| (eq 4), bytes, of one row of contents or of many."""
        return np.abs(contents @ self.memory_bytes)

    def imbalance(self, contents: Ints, shape: Shape) -> Ints:
        """G_s * |eq_s| (eqs 5 and 6), bytes."""
        return np.abs(contents @ self.signs) * shape.gpu_memory_bytes

    def objective(self, placed: Ints) -> tuple[int, int]:
        """The two largest of eq 6 (memory, imbalance) of a placement [num_servers, num_kinds]; they are added."""
        weights = [
            int(self.imbalance(row, self.shapes[s])) for row, s in zip(placed, self.shape_of, strict=True)
        ]
        return int(self.memory(placed).max(initial=0)), max(weights, default=0)

    def levels(self) -> list[int]:
        """Every value that the imbalance of a server can take, ascending."""
        found = {n * shape.gpu_memory_bytes for shape in self.shapes for n in range(shape.gpus + 1)}
        return sorted(found)

    def memory_floor(self) -> int:
        """No placement's largest memory is below this: the total spread evenly, rounded up."""
        return -(-abs(int(self.counts @ self.memory_bytes)) // self.num_servers)

    def imbalance_floor(self) -> int:
        """No placement's largest imbalance is below this: the surplus of one role has to go somewhere."""
        surplus = abs(int(self.counts @ self.signs))
        for level in self.levels():
            room = sum(min(s.gpus, level // s.gpu_memory_bytes) * s.count for s in self.shapes)
            if room >= surplus:
                return level
        return 0  # more shards than GPUs: no placement at all


def _column(values) -> Ints:  # noqa: ANN001
    return np.array(list(values), dtype=np.int64)
