"""Makes and unmakes this process's mappings of spaces, on the mover's background thread: the slow part, once a space.

Every GPU of the mempool gets a context here when its first space comes; then each GPU is let into every window that it
can reach, host memory is page-locked if that is wanted, and each new pair of GPUs shows what it can do.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.mempool.mover_engines import PinnedRanges
from services.mempool.mover_gpu import Gpu, OpenGpu, SlabWindow
from services.mempool.mover_regions import HostMapping, HostRegion, RankRegion, SlabRegion, region_name
from services.mempool.mover_self_test import PairTests
from shared.errors import ClusterError
from shared.kernels.copy_pages.copies import CopyFailed
from shared.observe.log import get_logger
from shared.transfer.interface import Region, RegionKind
from shared.transfer.reslice import KvEnd
from shared.vmm.errors import VmmError

log = get_logger("mempool.mover")


@dataclass(slots=True, eq=False)
class MappedRegion:
    """One rank's pages, mapped here."""

    region: Region
    memory: HostMapping | SlabWindow
    gpu: Gpu | None = None  # None: host memory
    readers: set[str] = field(default_factory=set)  # other GPUs that may read it

    def boundaries(self) -> Sequence[int]:
        """Addresses that no copy may cross."""
        if isinstance(self.memory, SlabWindow):
            return self.memory.boundaries()
        return (self.memory.base, self.memory.base + self.memory.num_bytes)


@dataclass(slots=True, eq=False)
class MappedSpace:
    """All ranks of one space. `end`: how its engine cuts a block over its ranks; None: never between unequal ends."""

    number: int
    ranks: list[MappedRegion]
    end: KvEnd | None = None


class Mapper:
    """One per mover; its methods on one thread, but for stop()."""

    def __init__(self, open_gpu: OpenGpu, *, pin_host: bool, floor_gb_per_s: float) -> None:
        """See Mover."""
        self._open_gpu = open_gpu
        self._pin_host = pin_host
        self._stopping = threading.Event()
        self._gpus: dict[str, Gpu] = {}
        self._spaces: dict[int, MappedSpace] = {}
        self.pinned = PinnedRanges()
        self.pairs = PairTests(floor_gb_per_s)

    def map(self, number: int, regions: Sequence[RankRegion], end: KvEnd | None) -> MappedSpace:
        """Raises: PathUnavailable, LinkTooSlow; nothing of the space is mapped then."""
        space = MappedSpace(number, [], end)
        try:
            for rank, where in enumerate(regions):
                space.ranks.append(self._map(number, rank, where))
            for mapped in space.ranks:
                for gpu in self._gpus.values():
                    self._let_in(mapped, gpu)
            self._spaces[number] = space
            self._pin_all()
            self.pairs.test(self._reachable(space))
        except ClusterError:
            self._spaces.pop(number, None)
            self._drop(space)
            raise
        return space

    def unmap(self, space: MappedSpace) -> None:
        """Nothing may be copying any more."""
        del self._spaces[space.number]
        self._drop(space)

    def stop(self) -> None:
        """Give up a mapping under way. Any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Unmap all that is left; nothing may be copying any more."""
        for space in list(self._spaces.values()):
            self.unmap(space)
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus = {}

    def is_pinned(self, number: int) -> bool:
        """Whether copy engines have the addresses of its memory: then no page of it may be punched."""
        space = self._spaces.get(number)
        return space is not None and any(self._has_pinned(mapped) for mapped in space.ranks)

    def _map(self, number: int, rank: int, where: RankRegion) -> MappedRegion:
        if isinstance(where, HostRegion):
            host = HostMapping(where)
            return MappedRegion(_region(number, rank, where, host.address), host)
        gpu = self._gpu(where.device)
        window = SlabWindow(gpu, where, self._stopping.is_set)
        return MappedRegion(_region(number, rank, where, window.address, gpu), window, gpu)

    def _gpu(self, device: str) -> Gpu:
        if device not in self._gpus:
            gpu = self._gpus[device] = self._open_gpu(device)
            for space in self._spaces.values():
                for mapped in space.ranks:
                    self._let_in(mapped, gpu)
        return self._gpus[device]

    def _let_in(self, mapped: MappedRegion, gpu: Gpu) -> None:
        if mapped.gpu is None or mapped.gpu is gpu or gpu.device in mapped.readers:
            return
        assert isinstance(mapped.memory, SlabWindow)
        try:
            mapped.memory.allow(gpu)
            mapped.readers.add(gpu.device)
        except VmmError as error:
            log.warning(
                "gpus_apart", reader=gpu.device, region=mapped.region.name, reason=error.message
            )  # copies go through host memory

    def _reachable(self, space: MappedSpace) -> list[tuple[Gpu, Gpu]]:
        """Pairs (source, target) that this space has part in."""
        mine = {mapped.gpu.device: mapped for mapped in space.ranks if mapped.gpu is not None}
        found: dict[tuple[str, str], tuple[Gpu, Gpu]] = {}
        for other in self._spaces.values():
            for mapped in other.ranks:
                for own in mine.values():
                    for source, target in ((mapped, own), (own, mapped)):
                        if (
                            source.gpu is not None
                            and target.gpu is not None
                            and target.gpu.device in source.readers
                        ):
                            found[source.gpu.device, target.gpu.device] = (source.gpu, target.gpu)
        return list(found.values())

    def _pin_all(self) -> None:
        """Host memory of every space, once there is a GPU that copies."""
        gpu = next(iter(self._gpus.values()), None)
        if gpu is None or not self._pin_host:
            return
        for mapped in [mapped for space in self._spaces.values() for mapped in space.ranks]:
            host = mapped.memory
            if not isinstance(host, HostMapping) or self._has_pinned(mapped):
                continue
            try:
                gpu.copy.make_current()
                gpu.copy.register_host(host.base, host.num_bytes)
            except CopyFailed as error:  # copies go through pinned slots
                log.warning("not_page_locked", region=mapped.region.name, reason=error.message)
                continue
            self.pinned.add(host.base, host.num_bytes)

    def _has_pinned(self, mapped: MappedRegion) -> bool:
        host = mapped.memory
        return isinstance(host, HostMapping) and self.pinned.cover(host.base, host.base + host.num_bytes)

    def _drop(self, space: MappedSpace) -> None:
        for mapped in space.ranks:
            if self._has_pinned(mapped):
                assert isinstance(mapped.memory, HostMapping)
                gpu = next(iter(self._gpus.values()))
                gpu.copy.make_current()
                gpu.copy.unregister_host(mapped.memory.base)
                self.pinned.remove(mapped.memory.base)
            mapped.memory.close()


def _region(number: int, rank: int, where: RankRegion, address: int, gpu: Gpu | None = None) -> Region:
    return Region(
        name=region_name(number, rank),
        kind=RegionKind.CUDA_PAGES if isinstance(where, SlabRegion) else RegionKind.HOST,
        address=address,
        page_bytes=where.page_bytes,
        num_pages=where.num_pages,
        memory_key=f"space {region_name(number, rank)}",
        device=-1 if gpu is None else gpu.ordinal,
        device_uuid="" if gpu is None else gpu.device,
    )
