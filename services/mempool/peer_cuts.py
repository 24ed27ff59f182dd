"""Pages of another host's space into pages of one here: whole, or in pieces where they are cut over other ranks.

The source says with the path how its spaces of another content key are cut (SpaceCut). What goes where follows from
that and from the reader's own cut (shared/transfer/reslice.py); the source writes pieces as it writes pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.mempool.mover_pieces import PagesOrPieces, laid_over
from services.mempool.mover_regions import MAX_RANKS, HostRegion, region_name
from shared.errors import ClusterError, PeerProtocolError
from shared.transfer.errors import TransferRefused
from shared.transfer.reslice import KvEnd, Order, reslice_rounds
from shared.wire.mempool_peer import SpaceCut

MAX_CUTS = 1_024  # spaces of one path
MAX_AT_ONCE = 32  # pulls: long prompts in small pieces are more than a path takes at once


@dataclass(frozen=True, slots=True)
class HostSpace:
    """A space in host memory, as one end of a path. The descriptors of its ranks stay the caller's."""

    content_key: str
    family_key: str
    end: KvEnd | None  # None: its blocks are never cut anew
    ranks: Sequence[HostRegion]


@dataclass(frozen=True, slots=True)
class RankPull:
    """What one pull of a path moves: pages of one rank into pages of one rank, position by position, or pieces."""

    source: str  # region
    target: str
    target_rank: int
    what: PagesOrPieces


def told(space: int, end: KvEnd) -> SpaceCut:
    """For PathOpened."""
    return SpaceCut(
        space=space, num_layers=end.num_layers, num_kv_heads=end.num_kv_heads, block_tokens=end.block_tokens,
        row_bytes=end.row_bytes, tp_size=end.tp_size, pp_size=end.pp_size, order=end.order.value,
    )  # fmt: skip


def heard(cuts: Sequence[SpaceCut]) -> dict[int, KvEnd]:
    """Of PathOpened, by space. Raises: PeerProtocolError on what is no cut."""
    if len(cuts) > MAX_CUTS:
        raise PeerProtocolError(f"{len(cuts)} cuts of one path")
    found = {}
    for cut in cuts:
        if not 0 < cut.tp_size * cut.pp_size <= MAX_RANKS:
            raise PeerProtocolError(f"a cut over {cut.tp_size} x {cut.pp_size} ranks")
        try:
            found[cut.space] = KvEnd(
                cut.num_layers, cut.num_kv_heads, cut.block_tokens, cut.row_bytes, tp_size=cut.tp_size,
                pp_size=cut.pp_size, order=Order(cut.order),
            )  # fmt: skip
        except (ClusterError, ValueError) as error:
            raise PeerProtocolError(f"no cut: {error}") from error
    return found


def whole_pages(
    space: int, num_ranks: int, pages: Sequence[int], target_space: int, targets: Sequence[int]
) -> list[list[RankPull]]:
    """Both ends are cut alike: every rank's pages at once."""
    return [
        [
            RankPull(region_name(space, rank), region_name(target_space, rank), rank, (pages, targets))
            for rank in range(num_ranks)
        ]
    ]


def cut_anew(
    source: tuple[int, KvEnd, Sequence[int]],
    target: tuple[int, KvEnd, Sequence[int]],
    source_bytes: Mapping[str, int],
    target_bytes: Mapping[str, int],
) -> list[list[RankPull]]:
    """Rounds of pulls, to be done one after another, the pulls of a round side by side.

    Args: source, target: number of the space, its cut, its pages; ..._bytes: page bytes of the regions there, whose
    names may be the same at both ends.
    Raises: TransferRefused where the ends hold different models, or a region is not there.
    """
    (from_space, from_end, pages), (into_space, into_end, targets) = source, target
    rounds: list[list[RankPull]] = []
    for templates in reslice_rounds(from_end, into_end):
        rounds.append([])
        for template in templates:
            theirs = region_name(from_space, template.source_rank)
            mine = region_name(into_space, template.target_rank)
            if theirs not in source_bytes or mine not in target_bytes:
                raise TransferRefused(f"no pages {theirs} or {mine} at the ends of this path")
            sizes = source_bytes[theirs], target_bytes[mine]
            if sizes[0] < from_end.block_bytes(template.source_rank):
                raise TransferRefused(f"pages of {sizes[0]} bytes hold no block of {theirs}")
            rounds[-1] += [
                RankPull(theirs, mine, template.target_rank, pieces)
                for pieces in laid_over(template, pages, targets, *sizes)
            ]
    return [
        pulls[first : first + MAX_AT_ONCE] for pulls in rounds for first in range(0, len(pulls), MAX_AT_ONCE)
    ]


def mine_of(regions: Sequence[HostRegion], space: int) -> dict[str, int]:
    """Page bytes by region, of a space here."""
    return {region_name(space, rank): where.page_bytes for rank, where in enumerate(regions)}
