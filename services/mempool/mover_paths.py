"""Which transport copies between which ranks of two spaces, in which order. Used by the mover's thread alone.

The "peer" of every link here is this process itself: a link per source space and transport, over the mappings of
mover_regions.py. Pulls run where the target is: host memory by CPU threads (ShmTransport), a GPU by its own copy
engines. The quarantine is one for all, so that a page is in one transfer at a time, whatever its path.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from services.mempool.mover_regions import MappedSpace
from shared.kernels.copy_pages.copier import Copier
from shared.transfer.describe import EndDescription, decode, describe_region, encode, this_boot_id
from shared.transfer.errors import TransferRefused
from shared.transfer.interface import Link, MappedPages, Moved, Peer, Region, RegionKind
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine
from shared.transfer.reslice import reslice
from shared.transfer.shm import ShmTransport

Parts = Sequence[
    tuple[int, Sequence[int]]
]  # (source space, source pages); together as many as the target pages
OnRegionSettled = Callable[[str, tuple[int, ...]], None]  # region, pages; on a transport's thread
INSTANCE = "this mempool"


@dataclass(frozen=True, slots=True)
class Pull:
    """Pages, or pieces of pages, of one rank of one space into one rank of another."""

    link: Link
    source: str
    target: str
    source_pages: Sequence[int]
    target_pages: Sequence[int]
    pieces: Pieces | None = None

    def start(self, timeout_ms: int) -> "Future[Moved]":
        """As Link.pull(). Raises: ClusterError; nothing was started."""
        if self.pieces is not None:
            return self.link.pull_pieces(self.source, self.target, self.pieces, timeout_ms=timeout_ms)
        return self.link.pull(
            self.source, self.source_pages, self.target, self.target_pages, timeout_ms=timeout_ms
        )


Rounds = list[list[Pull]]  # the pulls of a round run side by side, rounds one after another


class OwnHostTransport(ShmTransport):
    """Host memory of spaces that this process has mapped already."""

    def _map(self, peer: Peer) -> tuple[EndDescription, Mapping[str, MappedPages], Callable[[], None]]:
        return decode(peer.description), peer.mapped, _nothing


class Paths:
    """Transports and links of one mempool. Not thread-safe, but for `quarantine`."""

    def __init__(
        self, on_settled: OnRegionSettled, *, threads: int, host_copier: Copier | None = None
    ) -> None:
        """`host_copier` stays the caller's; without it `threads` of the CPU copy."""
        self.quarantine = Quarantine()
        self._on_settled = on_settled
        self._host = OwnHostTransport(
            INSTANCE, quarantine=self.quarantine, threads=threads, copier=host_copier
        )
        self._spaces: dict[int, MappedSpace] = {}
        self._links: dict[tuple[int, BaseTransport], Link] = {}

    def add(self, space: MappedSpace) -> None:
        """From now on it is a source and a target."""
        for rank in space.ranks:
            self._into(rank.region).register(rank.region)
        self._spaces[space.number] = space

    def remove(self, number: int) -> MappedSpace:
        """Nothing of it is in a transfer any more; the mappings are the caller's to close."""
        space = self._spaces.pop(number)
        for key in [key for key in self._links if key[0] == number]:
            link = self._links.pop(key)
            key[1].links.remove(link)  # type: ignore[arg-type]  # it came from there
            link.close()
        for rank in space.ranks:
            del self._into(rank.region).regions[rank.region.name]
        return space

    def rounds(self, target: int, target_pages: Sequence[int], parts: Parts) -> Rounds:
        """The pulls of one copy; part after part fills the target pages in order.

        Raises: TransferRefused for pages that do not fit each other.
        """
        found: Rounds = []
        first = 0
        for source, pages in parts:
            into = target_pages[first : first + len(pages)]
            first += len(pages)
            for number, pulls in enumerate(
                self._part(self._spaces[source], pages, self._spaces[target], into)
            ):
                if number == len(found):
                    found.append([])
                found[number] += pulls
        return found

    def _part(
        self,
        source: MappedSpace,
        source_pages: Sequence[int],
        target: MappedSpace,
        target_pages: Sequence[int],
    ) -> Rounds:
        if source.end is not None and target.end is not None and source.end != target.end:
            return self._resliced(source, source_pages, target, target_pages)
        if len(source.ranks) != len(target.ranks):
            raise TransferRefused(
                f"spaces of {len(source.ranks)} and {len(target.ranks)} ranks: say how they cut a block (KvEnd)"
            )
        return [
            [
                Pull(
                    self._link(source, theirs.region, mine.region),
                    theirs.region.name, mine.region.name, source_pages, target_pages,
                )
                for theirs, mine in zip(source.ranks, target.ranks, strict=True)
            ]
        ]  # fmt: skip

    def _resliced(
        self,
        source: MappedSpace,
        source_pages: Sequence[int],
        target: MappedSpace,
        target_pages: Sequence[int],
    ) -> Rounds:
        """Several ranks write parts of one page, which belongs to one transfer at a time: a round for each."""
        assert source.end is not None
        assert target.end is not None
        found: Rounds = []
        filled = [0] * len(target.ranks)  # how many rounds write to each rank so far
        for both in reslice(source.end, target.end):
            theirs, mine = source.ranks[both.source_rank].region, target.ranks[both.target_rank].region
            pieces = both.over(source_pages, target_pages, theirs.page_bytes, mine.page_bytes)
            number = filled[both.target_rank]
            filled[both.target_rank] += 1
            if number == len(found):
                found.append([])
            link = self._link(source, theirs, mine)
            found[number].append(Pull(link, theirs.name, mine.name, source_pages, target_pages, pieces))
        return found

    def _into(self, target: Region) -> BaseTransport:
        """The transport that copies into this region from host memory."""
        return self._host

    def _link(self, space: MappedSpace, source: Region, target: Region) -> Link:
        transport = self._host
        link = self._links.get((space.number, transport))
        if link is None:
            regions = tuple(describe_region(rank.region) for rank in space.ranks)
            end = EndDescription(instance=f"space {space.number}", boot_id=this_boot_id(), regions=regions)
            mapped = {
                rank.region.name: MappedPages(rank.region.address, device=rank.region.device)
                for rank in space.ranks
            }
            link = transport.connect(Peer(encode(end), mapped=mapped, on_settled=self._on_settled))
            self._links[space.number, transport] = link
        return link

    def close(self) -> None:
        """End the transports; what is in flight fails."""
        self._host.close()


def kind_of(source: Region, target: Region) -> str:
    """For metrics: "host to host", "cuda to host" and so on."""
    names = {RegionKind.HOST: "host"}
    return f"{names.get(source.kind, 'cuda')} to {names.get(target.kind, 'cuda')}"


def _nothing() -> None:
    """Mappings outlive the links."""
