"""Pages of unequal ends: which bytes of which rank's page go where, when TP or PP differ. Pure arithmetic.

A rank's page holds its layers and its KV heads of one block. Physical order inside a page, last axis contiguous:

    HND     [layers, heads, tokens, K and V of one head]   vLLM 0.26's cross-layer blocks, its default on CUDA
    NHD     [layers, tokens, heads, K and V of one head]
    PLANES  [layers, 2, heads, tokens, one head]           K apart from V

Layers split over pipeline ranks, heads over tensor ranks (MemServe section 4.3, "heterogeneous parallelism"). Where
there are more tensor ranks than heads, ranks share a head, as in vLLM, and the first rank that has it is the source.
The pieces within a page are the same for every block: one template per pair of ranks, laid over any list of pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from shared.transfer.errors import TransferRefused
from shared.transfer.pieces import U64, Pieces


class Order(StrEnum):
    """Physical order of the axes of a page."""

    HND = "HND"
    NHD = "NHD"
    PLANES = "PLANES"


_AXES = {  # outermost first
    Order.HND: ("layer", "head", "token", "plane"),
    Order.NHD: ("layer", "token", "head", "plane"),
    Order.PLANES: ("layer", "plane", "head", "token"),
}
_BOX = ("layer", "head", "token", "plane")


@dataclass(frozen=True, slots=True)
class KvEnd:
    """How one engine cuts a block over its ranks. Rank = pp_rank * tp_size + tp_rank."""

    num_layers: int
    num_kv_heads: int  # of the whole model
    block_tokens: int
    row_bytes: int  # K (or V) of one head and token: head_dim * element size
    tp_size: int = 1
    pp_size: int = 1
    order: Order = Order.HND
    layer_split: tuple[
        int, ...
    ] = ()  # layers of each pipeline rank; empty: as even as can be, rest to the last

    def __post_init__(self) -> None:
        counts = (
            self.num_layers,
            self.num_kv_heads,
            self.block_tokens,
            self.row_bytes,
            self.tp_size,
            self.pp_size,
        )
        if min(counts) < 1:
            raise TransferRefused(f"a geometry has no zeros: {self}")
        if self.layer_split and (
            len(self.layer_split) != self.pp_size or sum(self.layer_split) != self.num_layers
        ):
            raise TransferRefused(
                f"layers {self.layer_split} do not make {self.num_layers} on {self.pp_size} ranks"
            )
        if max(self.num_kv_heads, self.tp_size) % min(self.num_kv_heads, self.tp_size):
            raise TransferRefused(
                f"{self.num_kv_heads} KV heads do not divide over {self.tp_size} tensor ranks"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of one instance."""
        return self.tp_size * self.pp_size

    def layers_of(self, rank: int) -> range:
        """Layers of the model that this rank holds."""
        split = self.layer_split or _even(self.num_layers, self.pp_size)
        pp_rank = rank // self.tp_size
        first = sum(split[:pp_rank])
        return range(first, first + split[pp_rank])

    def heads_of(self, rank: int) -> range:
        """KV heads of the model that this rank holds."""
        tp_rank = rank % self.tp_size
        if self.tp_size > self.num_kv_heads:
            head = tp_rank // (self.tp_size // self.num_kv_heads)
            return range(head, head + 1)
        each = self.num_kv_heads // self.tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)

    def block_bytes(self, rank: int) -> int:
        """Bytes of one block of this rank."""
        return len(self.layers_of(rank)) * len(self.heads_of(rank)) * self.block_tokens * 2 * self.row_bytes

    def is_first_holder(self, rank: int) -> bool:
        """Whether no tensor rank below has the same heads."""
        tp_rank = rank % self.tp_size
        return tp_rank == 0 or self.heads_of(rank) != self.heads_of(rank - 1)

    def strides(self, rank: int) -> dict[str, int]:
        """Bytes from one index to the next, by axis."""
        sizes = {
            "layer": len(self.layers_of(rank)),
            "head": len(self.heads_of(rank)),
            "token": self.block_tokens,
            "plane": 2,
        }
        found = {}
        step = self.row_bytes
        for axis in reversed(_AXES[self.order]):
            found[axis] = step
            step *= sizes[axis]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RankPieces:
    """What goes from one rank's page to another rank's page of the same block; offsets within the pages."""

    source_rank: int
    target_rank: int
    pieces: Pieces

    def over(
        self,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        source_page_bytes: int,
        target_page_bytes: int,
    ) -> Pieces:
        """The template over pages: pieces for Link.pull_pieces. Cost: 3 words a piece and page.

        Raises: TransferRefused on lists of unequal length.
        """
        if len(source_pages) != len(target_pages):
            raise TransferRefused(f"{len(source_pages)} source pages for {len(target_pages)} target pages")
        return Pieces(
            _lay(self.pieces.source_offsets, source_pages, source_page_bytes),
            _lay(self.pieces.target_offsets, target_pages, target_page_bytes),
            np.tile(self.pieces.sizes, len(source_pages)),
        )


@lru_cache(maxsize=64)
def reslice(source: KvEnd, target: KvEnd) -> tuple[RankPieces, ...]:
    """Every (source rank, target rank) pair that has bytes in common. Together they fill every target page once.

    Raises: TransferRefused when the ends do not hold the same model in blocks of the same length.
    Cost: 0.1 us a row (layer x head x token) of the model's block, once for a pair of ends.
    """
    same = ("num_layers", "num_kv_heads", "block_tokens", "row_bytes")
    unequal = [name for name in same if getattr(source, name) != getattr(target, name)]
    if unequal:
        raise TransferRefused(f"the ends differ in {', '.join(unequal)}: {source} and {target}")
    found = []
    for target_rank in range(target.num_ranks):
        for source_rank in range(source.num_ranks):
            if not source.is_first_holder(source_rank):
                continue
            pieces = _common(source, source_rank, target, target_rank)
            if pieces is not None:
                found.append(RankPieces(source_rank, target_rank, pieces))
    return tuple(found)


def reslice_rounds(source: KvEnd, target: KvEnd) -> list[list[RankPieces]]:
    """reslice(), in rounds to be done one after another: several ranks write parts of one target page, which belongs to
    one transfer at a time. Raises: as reslice()."""
    rounds: list[list[RankPieces]] = []
    filled = [0] * target.num_ranks  # how many rounds write to each rank so far
    for both in reslice(source, target):
        number = filled[both.target_rank]
        filled[both.target_rank] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(both)
    return rounds


def _common(source: KvEnd, source_rank: int, target: KvEnd, target_rank: int) -> Pieces | None:
    layers = _overlap(source.layers_of(source_rank), target.layers_of(target_rank))
    heads = _overlap(source.heads_of(source_rank), target.heads_of(target_rank))
    if not layers or not heads:
        return None
    indexes = {"layer": layers, "head": heads, "token": range(source.block_tokens), "plane": range(2)}
    rows = [
        _offsets(end, rank, indexes).ravel() for end, rank in ((source, source_rank), (target, target_rank))
    ]
    return _runs(rows[0], rows[1], source.row_bytes)


def _offsets(end: KvEnd, rank: int, indexes: dict[str, range]) -> U64:
    """Where each row is in the rank's page: uint64 [layers, heads, tokens, 2]."""
    strides = end.strides(rank)
    firsts = {"layer": end.layers_of(rank).start, "head": end.heads_of(rank).start, "token": 0, "plane": 0}
    total = np.zeros((1,) * len(_BOX), np.uint64)
    for place, axis in enumerate(_BOX):
        steps = (np.asarray(indexes[axis], np.uint64) - np.uint64(firsts[axis])) * np.uint64(strides[axis])
        shape = [1] * len(_BOX)
        shape[place] = steps.size
        total = total + steps.reshape(shape)
    return total


def _runs(source: U64, target: U64, row_bytes: int) -> Pieces:
    """Rows that continue each other at both ends become one piece; in the order of target offsets."""
    order = np.argsort(target, kind="stable")
    source, target = source[order], target[order]
    size = np.uint64(row_bytes)
    joined = (source[:-1] + size == source[1:]) & (target[:-1] + size == target[1:])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    counts = np.diff(np.append(first, source.size)).astype(np.uint64)
    return Pieces(source[first], target[first], counts * size)


def _lay(offsets: U64, pages: Sequence[int], page_bytes: int) -> U64:
    starts = np.asarray(pages, np.uint64) * np.uint64(page_bytes)
    return (starts[:, None] + offsets[None, :]).ravel()


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _even(total: int, parts: int) -> tuple[int, ...]:
    each = total // parts
    return (*(each for _ in range(parts - 1)), total - each * (parts - 1))
