"""Which transport copies between which ranks of two spaces, in which order. Used by the mover's thread alone.

The "peer" of every link here is this process itself: a link per source space and transport, over the mappings of
mover_regions.py. Pulls run where the target is: host memory by CPU threads (ShmTransport), a GPU by its own copy
engines. The quarantine is one for all, so that a page is in one transfer at a time, whatever its path.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from services.mempool.mover_bounce import BounceCopier
from services.mempool.mover_engines import CopyEngine, PinnedRanges
from services.mempool.mover_gpu import Gpu
from services.mempool.mover_spaces import MappedRegion, MappedSpace
from shared.kernels.copy_pages.copier import Copier
from shared.transfer.describe import EndDescription, decode, describe_region, encode, this_boot_id
from shared.transfer.errors import TransferRefused
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import Link, MappedPages, Moved, PathName, Peer
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


class BouncedTransport(OwnHostTransport):
    """From a GPU to one that cannot reach it."""

    path = PathName.STAGED

    def __init__(self, instance: str, quarantine: Quarantine, engines: Mapping[int, CopyEngine]) -> None:
        """`engines`: by ordinal; they stay the caller's."""
        super().__init__(instance, quarantine=quarantine, threads=0)
        self._engines = engines
        self._bouncing: dict[tuple[int, int], BounceCopier] = {}

    def _copier_for(self, source_device: int, target_device: int) -> tuple[Copier, int]:
        pair = (source_device, target_device)
        if pair not in self._bouncing:
            self._bouncing[pair] = BounceCopier(self._engines[source_device], self._engines[target_device])
        return self._bouncing[pair], 0

    def _release(self) -> None:
        for copier in self._bouncing.values():
            copier.close()


class Paths:
    """Transports and links of one mempool. Not thread-safe, but for `quarantine`."""

    def __init__(
        self,
        on_settled: OnRegionSettled,
        pinned: PinnedRanges,
        *,
        threads: int,
        host_copier: Copier | None = None,
    ) -> None:
        """`host_copier` stays the caller's; without it `threads` of the CPU copy."""
        self.quarantine = Quarantine()
        self._on_settled = on_settled
        self._pinned = pinned
        self._host = OwnHostTransport(
            INSTANCE, quarantine=self.quarantine, threads=threads, copier=host_copier
        )
        self._engines: dict[int, CopyEngine] = {}  # by ordinal
        self._gpus: dict[int, ImportedTransport] = {}  # by ordinal: into this GPU
        self._out: ImportedTransport | None = None  # from any GPU into host memory
        self._bounced: BouncedTransport | None = None  # between GPUs that cannot reach each other
        self._spaces: dict[int, MappedSpace] = {}
        self.reasons: dict[str, str] = {}  # path -> why it was taken last
        self._links: dict[tuple[int, BaseTransport], Link] = {}

    def add(self, space: MappedSpace) -> None:
        """From now on it is a source and a target. Raises: CopyFailed."""
        for rank in space.ranks:
            if rank.gpu is not None and rank.gpu.ordinal not in self._engines:
                self._open(rank.gpu)
        self._spaces[space.number] = space
        for rank in space.ranks:
            for engine in self._engines.values():
                engine.copier.add_boundaries(rank.boundaries())
            for transport in self._into(rank):
                transport.register(rank.region)

    def remove(self, number: int) -> None:
        """Nothing of it is in a transfer any more; the mappings are the caller's to close."""
        space = self._spaces.pop(number)
        for key in [key for key in self._links if key[0] == number]:
            link = self._links.pop(key)
            key[1].links.remove(link)  # type: ignore[arg-type]  # it came from there
            link.close()
        for rank in space.ranks:
            for transport in self._into(rank):
                del transport.regions[rank.region.name]

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
                    self._link(source, theirs, mine),
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
            theirs, mine = source.ranks[both.source_rank], target.ranks[both.target_rank]
            pieces = both.over(source_pages, target_pages, theirs.region.page_bytes, mine.region.page_bytes)
            number = filled[both.target_rank]
            filled[both.target_rank] += 1
            if number == len(found):
                found.append([])
            link = self._link(source, theirs, mine)
            found[number].append(
                Pull(link, theirs.region.name, mine.region.name, source_pages, target_pages, pieces)
            )
        return found

    def _open(self, gpu: Gpu) -> None:
        """A GPU that is new here."""
        engine = CopyEngine(gpu, self._pinned)
        if self._out is None:
            self._out = ImportedTransport(INSTANCE, self._copier_for, quarantine=self.quarantine)
            for rank in self._ranks():
                if rank.gpu is None:
                    self._out.register(rank.region)
        for rank in self._ranks():
            engine.copier.add_boundaries(rank.boundaries())
        self._engines[gpu.ordinal] = engine
        self._gpus[gpu.ordinal] = ImportedTransport(
            INSTANCE, self._copier_for, quarantine=self.quarantine, page_stream=engine.page_stream
        )

    def _ranks(self) -> list[MappedRegion]:
        return [rank for space in self._spaces.values() for rank in space.ranks]

    def _copier_for(self, source_device: int, target_device: int) -> tuple[Copier, int]:
        """The GPU of the target copies; into host memory that of the source."""
        engine = self._engines[target_device if target_device >= 0 else source_device]
        return engine, engine.into if target_device >= 0 else engine.out

    def _into(self, target: MappedRegion) -> list[BaseTransport]:
        """Transports that copy into this region."""
        if target.gpu is not None:
            bounced = [self._bounced] if self._bounced is not None else []
            return [self._gpus[target.gpu.ordinal], *bounced]
        return [self._host, *([self._out] if self._out is not None else [])]

    def _transport(self, source: MappedRegion, target: MappedRegion) -> tuple[BaseTransport, str]:
        """And why."""
        if target.gpu is None:
            if source.gpu is None or self._out is None:
                return self._host, "host memory, by CPU"
            return self._out, f"from {source.gpu.device} by its copy engines"
        reads = source.gpu is None or source.gpu is target.gpu or target.gpu.device in source.readers
        if reads:
            return self._gpus[target.gpu.ordinal], f"by the copy engines of {target.gpu.device}"
        if self._bounced is None:
            self._bounced = BouncedTransport(INSTANCE, self.quarantine, self._engines)
            for rank in self._ranks():
                if rank.gpu is not None:
                    self._bounced.register(rank.region)
        return (
            self._bounced,
            f"{target.gpu.device} cannot reach {source.region.device_uuid}: through host memory",
        )

    def _link(self, space: MappedSpace, source: MappedRegion, target: MappedRegion) -> Link:
        transport, reason = self._transport(source, target)
        link = self._links.get((space.number, transport))
        if link is None:
            regions = tuple(describe_region(rank.region) for rank in space.ranks)
            end = EndDescription(instance=f"space {space.number}", boot_id=this_boot_id(), regions=regions)
            mapped = {
                rank.region.name: MappedPages(rank.region.address, device=rank.region.device)
                for rank in space.ranks
            }
            link = transport.connect(Peer(encode(end), mapped=mapped, on_settled=self._on_settled))
            link.reason = reason
            self._links[space.number, transport] = link
            self.reasons[transport.path.value] = reason
        return link

    def close(self) -> None:
        """When nothing is in flight: end the transports, then the engines."""
        others = [each for each in (self._out, self._bounced) if each is not None]
        for transport in [self._host, *self._gpus.values(), *others]:
            transport.close()
        for engine in self._engines.values():
            engine.close()


def _nothing() -> None:
    """Mappings outlive the links."""
