"""Copies that go layer by layer: which layers go next, when, and what each of them took.

A Feed belongs to one copy. It hands out spans of layers in order: without a gate one layer after the other
(by-request), with one all that are written and not handed out yet (by-layer): a copy that keeps up sends one layer at a
time while the next one is computed, one that is behind catches up in fewer, longer pieces.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from shared.kv.layer_words import ALL_LAYERS, MEMORY_BYTES, layers_written
from shared.transfer.pieces import Pieces
from shared.transfer.reslice import RankPieces
from shared.vmm.words import Words


class LayerMemory:
    """One rank's layer word, for as long as somebody refers to this object."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("quire-layers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, MEMORY_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._words = Words(mmap.mmap(self._fd, MEMORY_BYTES), 1)
        except BaseException:  # a mapping has a descriptor of its own, which may be the one too many
            os.close(self._fd)
            raise

    def take_fd(self) -> int:
        """The descriptor, the caller's from now on. Once."""
        fd, self._fd = self._fd, -1
        return fd

    def written(self, step: int) -> int:
        """Leading layers of that step that are in the pages. Any thread. Cost: below 1 us."""
        return layers_written(self._words.load(0), step)


@dataclass(slots=True)
class Gate:
    """Layers of one step, on every rank of one engine. `is_over`: the engine core says that the step has ended."""

    ranks: Sequence[LayerMemory]
    step: int
    is_over: bool = False

    def num_written(self) -> int:
        """Leading layers that every rank has written."""
        return ALL_LAYERS if self.is_over else min(rank.written(self.step) for rank in self.ranks)


@dataclass(slots=True)
class Sent:
    """Layers first .. last - 1 on their way: when they were found written, and when they had arrived. Unix ns."""

    first: int
    last: int
    begin_ns: int
    end_ns: int = 0


@dataclass(slots=True)
class Feed:
    """What is left of one copy, and what was sent."""

    num_layers: int
    layer_bytes: int
    gate: Gate | None = None
    next_layer: int = 0
    sent: list[Sent] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Every layer was handed out."""
        return self.next_layer >= self.num_layers

    def is_ready(self) -> bool:
        """Whether take() has something."""
        return self.gate is None or self.gate.num_written() > self.next_layer

    def take(self) -> tuple[int, int]:
        """The next layers, first and last + 1. Call when is_ready() and not is_done."""
        written = self.next_layer + 1 if self.gate is None else self.gate.num_written()
        first, self.next_layer = self.next_layer, min(written, self.num_layers)
        assert self.next_layer > first, "nothing is written yet"
        self.sent.append(Sent(first, self.next_layer, time.time_ns()))
        return first, self.next_layer

    def arrived(self) -> None:
        """What take() handed out last is in place."""
        if self.sent:
            self.sent[-1].end_ns = time.time_ns()


@lru_cache(maxsize=4096)
def span_template(begin: int, end: int, source_unit: int, target_unit: int) -> RankPieces:
    """Bytes begin .. end - 1 of a page, cut where allocations end.

    Args: source_unit, target_unit: bytes of a page that lie in one allocation.
    """
    inner = {
        edge for unit in (source_unit, target_unit) for edge in range(-(-begin // unit) * unit, end, unit)
    }
    edges = sorted({begin, end} | inner)
    sizes = [b - a for a, b in pairwise(edges)]
    return RankPieces(0, 0, Pieces.of_columns(edges[:-1], edges[:-1], sizes))
