"""What goes from a page of one space to a page of another, when that is not simply the page: arithmetic.

Both hold the same block from their first byte on, but a page is a multiple of its medium's granularity, so the ends may
be padded differently; and a page may lie in several allocations (layer-major), which no copy may cross.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TypeAlias

from shared.transfer.interface import MAX_PIECES, Link, Moved
from shared.transfer.pieces import Pieces
from shared.transfer.reslice import RankPieces

PagesOrPieces: TypeAlias = (
    tuple[Sequence[int], Sequence[int]] | Pieces
)  # source and target pages, or parts of them


def start_pull(link: Link, source: str, target: str, what: PagesOrPieces, timeout_ms: int) -> "Future[Moved]":
    """Between these regions; as Link.pull() and pull_pieces(). Raises: ClusterError; nothing was started."""
    if isinstance(what, Pieces):
        return link.pull_pieces(source, target, what, timeout_ms=timeout_ms)
    return link.pull(source, what[0], target, what[1], timeout_ms=timeout_ms)


@lru_cache(maxsize=256)
def within_page(
    source_bytes: int, source_unit: int, target_bytes: int, target_unit: int
) -> RankPieces | None:
    """A template over pages; None when whole pages can be copied.

    Args: source_bytes, target_bytes: of a page; source_unit, target_unit: of an allocation, or a page if that is less.
    """
    size = min(source_bytes, target_bytes)
    if source_bytes == target_bytes and source_unit >= size and target_unit >= size:
        return None
    edges = sorted({size, *range(0, size, source_unit), *range(0, size, target_unit)})
    offsets = edges[:-1]
    sizes = [end - begin for begin, end in zip(offsets, edges[1:], strict=True)]
    return RankPieces(0, 0, Pieces.of_columns(offsets, offsets, sizes))


def laid_over(
    template: RankPieces,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    source_bytes: int,
    target_bytes: int,
) -> Iterator[Pieces]:
    """The template over these pages, in portions that one transfer takes."""
    step = max(1, MAX_PIECES // max(1, len(template.pieces)))
    for first in range(0, len(source_pages), step):
        part = slice(first, first + step)
        yield template.over(source_pages[part], target_pages[part], source_bytes, target_bytes)
