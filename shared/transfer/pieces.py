"""Which bytes of one region go where in another: three columns. Pages are the common case, parts of pages the other.

Offsets count from the regions' first byte, so the same pieces mean something in both processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.transfer.errors import TransferRefused

U64: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """sizes[i] bytes from source_offsets[i] to target_offsets[i]; uint64 [num_pieces] each."""

    source_offsets: U64
    target_offsets: U64
    sizes: U64

    @classmethod
    def of_pages(cls, source_pages: Sequence[int], target_pages: Sequence[int], page_bytes: int) -> "Pieces":
        """Whole pages. Raises: TransferRefused on lists of unequal length or negative pages."""
        if len(source_pages) != len(target_pages):
            raise TransferRefused(f"{len(source_pages)} source pages for {len(target_pages)} target pages")
        source, target = np.asarray(source_pages, np.int64), np.asarray(target_pages, np.int64)
        if source.size and min(int(source.min()), int(target.min())) < 0:
            raise TransferRefused("page numbers are not negative")
        size = np.uint64(page_bytes)
        return cls(
            source.astype(np.uint64) * size,
            target.astype(np.uint64) * size,
            np.full(source.size, size, np.uint64),
        )

    @classmethod
    def of_columns(cls, source: Sequence[int], target: Sequence[int], sizes: Sequence[int]) -> "Pieces":
        """Raises: TransferRefused on columns of unequal length."""
        if not len(source) == len(target) == len(sizes):
            raise TransferRefused(f"columns of {len(source)}, {len(target)} and {len(sizes)} pieces")
        return cls(np.asarray(source, np.uint64), np.asarray(target, np.uint64), np.asarray(sizes, np.uint64))

    def __len__(self) -> int:
        return self.sizes.size

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return int(self.sizes.sum())

    def target_pages(self, page_bytes: int) -> frozenset[int]:
        """Every page that a piece writes to."""
        return pages_of(self.target_offsets, self.sizes, page_bytes)

    def source_pages(self, page_bytes: int) -> frozenset[int]:
        """Every page that a piece reads from."""
        return pages_of(self.source_offsets, self.sizes, page_bytes)

    def take(self, index: NDArray[np.bool_]) -> "Pieces":
        """Those pieces for which `index` is true."""
        return Pieces(self.source_offsets[index], self.target_offsets[index], self.sizes[index])

    def turned(self) -> "Pieces":
        """The way back: targets become sources."""
        return Pieces(self.target_offsets, self.source_offsets, self.sizes)

    def check(self, source_bytes: int, target_bytes: int) -> None:
        """Refuse what does not lie inside regions of these lengths, and targets that overlap each other.

        Raises: TransferRefused. Cost: one sort.
        """
        if len(self) == 0:
            return
        for name, offsets, limit in (
            ("source", self.source_offsets, source_bytes),
            ("target", self.target_offsets, target_bytes),
        ):
            ends = offsets + self.sizes
            if bool(np.any(ends < offsets)) or int(ends.max()) > limit:
                raise TransferRefused(f"a {name} piece ends beyond its region of {limit} bytes")
        order = np.argsort(self.target_offsets, kind="stable")
        starts = self.target_offsets[order]
        if bool(np.any(starts[:-1] + self.sizes[order][:-1] > starts[1:])):
            raise TransferRefused("two pieces write the same target bytes")


def pages_of(offsets: U64, sizes: U64, page_bytes: int) -> frozenset[int]:
    """Pages touched by ranges. A range of several pages touches each of them.

    Cost: one sort, and each page once, however often ranges that a peer names overlap.
    """
    used = sizes > 0
    first = offsets[used] // np.uint64(page_bytes)
    last = (offsets[used] + sizes[used] - np.uint64(1)) // np.uint64(page_bytes)
    if bool(np.array_equal(first, last)):
        return frozenset(np.unique(first).tolist())
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order])
    begins = np.flatnonzero(
        np.concatenate([[True], first[1:] > last[:-1]])
    )  # shares no page with those before
    ends = np.append(begins[1:], first.size) - 1
    pages: set[int] = set()
    for begin, end in zip(first[begins].tolist(), last[ends].tolist(), strict=True):
        pages.update(range(begin, end + 1))
    return frozenset(pages)
