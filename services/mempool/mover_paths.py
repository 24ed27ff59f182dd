"""Which transport copies between which ranks of two spaces, in which order. Used by the mover's thread alone.

The "peer" of every link here is this process itself: a link per source space and transport, over the mappings of
mover_regions.py. Pulls run where the target is: host memory by CPU threads (ShmTransport), a GPU by its own copy
engines. The quarantine is one for all, so that a page is in one transfer at a time, whatever its path.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from services.mempool.mover_engines import CopyEngine, PinnedRanges
from services.mempool.mover_gpu import Gpu
from services.mempool.mover_layers import span_template
from services.mempool.mover_pieces import PagesOrPieces, laid_over, start_pull, within_page
from services.mempool.mover_spaces import MappedRegion, MappedSpace
from services.mempool.mover_transports import INSTANCE, OwnHostTransport, StagedTransport, engine_for
from shared.kernels.copy_pages.copier import Copier
from shared.transfer.describe import EndDescription, describe_region, encode, this_boot_id
from shared.transfer.errors import TransferRefused
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import Link, MappedPages, Moved, Peer
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine
from shared.transfer.reslice import RankPieces, reslice_rounds

Parts = Sequence[
    tuple[int, Sequence[int]]
]  # (source space, source pages); together as many as the target pages
OnRegionSettled = Callable[[str, tuple[int, ...]], None]  # region, pages; on a transport's thread


@dataclass(frozen=True, slots=True)
class Pull:
    """Pages, or pieces of pages, of one rank of one space into one rank of another."""

    link: Link
    source: str
    target: str
    what: PagesOrPieces

    def start(self, timeout_ms: int) -> "Future[Moved]":
        """As Link.pull(). Raises: ClusterError; nothing was started."""
        return start_pull(self.link, self.source, self.target, self.what, timeout_ms)


Rounds = list[list[Pull]]  # the pulls of a round run side by side, rounds one after another


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
        self._staged: StagedTransport | None = None  # where a copy engine cannot go directly
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

    def rounds(self, target: int, target_pages: Sequence[int], parts: Parts, *, raw: bool = False) -> Rounds:
        """The pulls of one copy; part after part fills the target pages in order. `raw`: see Mover.copy.

        Raises: TransferRefused for pages that do not fit each other.
        """
        found: Rounds = []
        first = 0
        for source, pages in parts:
            into = target_pages[first : first + len(pages)]
            first += len(pages)
            for number, pulls in enumerate(
                self._part(self._spaces[source], pages, self._spaces[target], into, raw=raw)
            ):
                if number == len(found):
                    found.append([])
                found[number] += pulls
        return found

    def layer_round(
        self, target: int, target_pages: Sequence[int], parts: Parts, layer_bytes: int, span: tuple[int, int]
    ) -> list[Pull]:
        """The pulls of some layers of one copy, between spaces whose pages are alike. Raises: as rounds()."""
        begin, end = span[0] * layer_bytes, span[1] * layer_bytes
        found: list[Pull] = []
        at = 0
        into = self._spaces[target]
        for number, pages in parts:
            source, these = self._spaces[number], target_pages[at : at + len(pages)]
            at += len(pages)
            for theirs, mine in zip(source.ranks, into.ranks, strict=True):
                template = span_template(begin, end, theirs.unit_bytes, mine.unit_bytes)
                found += self._pulls(source, theirs, pages, mine, these, template)
        return found

    def _part(
        self,
        source: MappedSpace,
        source_pages: Sequence[int],
        target: MappedSpace,
        target_pages: Sequence[int],
        *,
        raw: bool,
    ) -> Rounds:
        if not raw and source.end is not None and target.end is not None and source.end != target.end:
            return self._resliced(source, source_pages, target, target_pages)
        if len(source.ranks) != len(target.ranks):
            raise TransferRefused(
                f"spaces of {len(source.ranks)} and {len(target.ranks)} ranks: say how they cut a block (KvEnd)"
            )
        found: list[Pull] = []
        for theirs, mine in zip(source.ranks, target.ranks, strict=True):
            template = within_page(
                theirs.region.page_bytes, theirs.unit_bytes, mine.region.page_bytes, mine.unit_bytes
            )
            found += self._pulls(source, theirs, source_pages, mine, target_pages, template)
        return [found]

    def _pulls(
        self,
        space: MappedSpace,
        source: MappedRegion,
        source_pages: Sequence[int],
        target: MappedRegion,
        target_pages: Sequence[int],
        template: RankPieces | None,
    ) -> list[Pull]:
        link, names = self._link(space, source, target), (source.region.name, target.region.name)
        if template is None:
            return [Pull(link, *names, (source_pages, target_pages))]
        sizes = source.region.page_bytes, target.region.page_bytes
        laid = laid_over(template, source_pages, target_pages, *sizes)
        return [Pull(link, *names, pieces) for pieces in laid]

    def _resliced(
        self,
        source: MappedSpace,
        source_pages: Sequence[int],
        target: MappedSpace,
        target_pages: Sequence[int],
    ) -> Rounds:
        assert source.end is not None
        assert target.end is not None
        found: Rounds = []
        for templates in reslice_rounds(source.end, target.end):
            found.append([])
            for both in templates:
                theirs, mine = source.ranks[both.source_rank], target.ranks[both.target_rank]
                found[-1] += self._pulls(source, theirs, source_pages, mine, target_pages, both)
        return found

    def _open(self, gpu: Gpu) -> None:
        """A GPU that is new here."""
        engine = CopyEngine(gpu, self._pinned)
        for rank in self._ranks():
            engine.copier.add_boundaries(rank.boundaries())
        copier_for = partial(engine_for, self._engines)
        if self._out is None:
            self._out = ImportedTransport(
                INSTANCE, copier_for, quarantine=self.quarantine, callers_drive=True
            )
            self._staged = StagedTransport(self.quarantine, self._engines)
            for rank in self._ranks():  # in host memory: this is the first GPU
                self._out.register(rank.region)
                self._staged.register(rank.region)
        self._engines[gpu.ordinal] = engine
        self._gpus[gpu.ordinal] = ImportedTransport(
            INSTANCE,
            copier_for,
            quarantine=self.quarantine,
            page_stream=engine.page_stream,
            callers_drive=True,
        )

    def _ranks(self) -> list[MappedRegion]:
        return [rank for space in self._spaces.values() for rank in space.ranks]

    def _into(self, target: MappedRegion) -> list[BaseTransport]:
        """Transports that copy into this region."""
        direct = [self._host, self._out] if target.gpu is None else [self._gpus[target.gpu.ordinal]]
        return [transport for transport in (*direct, self._staged) if transport is not None]

    def _transport(self, source: MappedRegion, target: MappedRegion) -> tuple[BaseTransport, str]:
        """And why."""
        if source.gpu is None and target.gpu is None:
            return self._host, "host memory, by CPU"
        assert self._out is not None
        assert self._staged is not None
        host = next((rank for rank in (source, target) if rank.gpu is None), None)
        if host is not None and not self._pinned.cover(*host.addresses):
            return self._staged, "host memory that is not page-locked"
        if target.gpu is None:
            return self._out, f"by the copy engines of {source.region.device_uuid}"
        if source.gpu in (None, target.gpu) or target.gpu.device in source.readers:
            return self._gpus[target.gpu.ordinal], f"by the copy engines of {target.gpu.device}"
        return self._staged, f"{target.gpu.device} cannot reach {source.region.device_uuid}"

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
        others = [each for each in (self._out, self._staged) if each is not None]
        for transport in [self._host, *self._gpus.values(), *others]:
            transport.close()
        for engine in self._engines.values():
            engine.close()
