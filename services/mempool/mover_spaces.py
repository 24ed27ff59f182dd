"""Makes and unmakes this process's mappings of spaces, on the mover's background thread: the slow part, once a space.

Every GPU of the mempool gets a context here when its first space comes; then each GPU is let into every window that it
can reach, and each new pair of GPUs shows what it can do. Page-locking host memory takes longest, so it comes last, in
chunks, when the spaces are in use already.
"""

import mmap
import threading
import time
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
from shared.vmm.huge_pages import make_huge

PIN_CHUNK_BYTES = 256 << 20
REST_MIN_S, REST_MAX_S = 30.0, 300.0  # until host memory that was refused is tried again

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
        chunks = _chunks(self.memory, self.region.page_bytes)
        return [*(first for first, _ in chunks), self.memory.base + self.memory.num_bytes]

    @property
    def unit_bytes(self) -> int:
        """The largest part of a page that lies in one allocation."""
        page_bytes = self.region.page_bytes
        return min(page_bytes, self.memory.slab_bytes) if isinstance(self.memory, SlabWindow) else page_bytes

    @property
    def addresses(self) -> tuple[int, int]:
        """First, and behind the last."""
        return self.region.address, self.region.address + self.region.num_bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """rest_s: how long, until again_s (of time.monotonic), the driver is not asked again."""

    rest_s: float
    again_s: float


@dataclass(slots=True, eq=False)
class MappedSpace:
    """All ranks of one space. `end`: how its engine cuts a block over its ranks; None: never between unequal ends."""

    number: int
    ranks: list[MappedRegion]
    end: KvEnd | None = None


class Mapper:
    """One per mover; its methods on one thread, but for stop()."""

    def __init__(
        self, open_gpu: OpenGpu, *, pin_host: bool, floor_gb_per_s: float, huge_pages: bool = False
    ) -> None:
        """See Mover."""
        self._open_gpu = open_gpu
        self._pin_host = pin_host
        self._makes_huge = huge_pages
        self._stopping = threading.Event()
        self._gpus: dict[str, Gpu] = {}
        self._spaces: dict[int, MappedSpace] = {}
        self._huge: dict[int, int] = {}  # bytes in huge pages, by the first of what was locked at once
        self._refused: dict[int, Refused] = {}  # by base of host memory that the driver would not page-lock
        self._stuck: set[int] = set()  # first addresses of what it would not let go, page-locked still
        self.pinned = PinnedRanges()
        self.resting: set[int] = set()  # spaces that are not to be page-locked now; changed on the loop
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
            self.pairs.test(self._reachable(space))
        except BaseException:
            self._spaces.pop(number, None)
            self._drop(space)
            raise
        return space

    def unmap(self, space: MappedSpace) -> None:
        """Nothing may be copying any more. What a driver does not let go stays mapped, and is said."""
        del self._spaces[space.number]
        self._drop(space)

    def windows(self, number: int) -> list[SlabWindow]:
        """Of the ranks of a space on GPUs; none when it is not mapped. In the background, as everything here."""
        space = self._spaces.get(number)
        return [r.memory for r in space.ranks if isinstance(r.memory, SlabWindow)] if space else []

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

    def pin_some(self) -> float | None:
        """Page-lock the next PIN_CHUNK_BYTES of host memory, once there is a GPU that copies. Returns the seconds until
        there is more to lock (0.0: there may be now; else the driver refused some, and is asked again); None: nothing.

        Meanwhile copies of that memory go through pinned slots. Cost: 0.1 s or more, and that memory until the space
        rests or is removed.
        """
        gpu = next(iter(self._gpus.values()), None)
        if gpu is None or not self._pin_host or self._stopping.is_set():
            return None
        now_s, waits_s = time.monotonic(), list[float]()
        spaces = [space for space in self._spaces.values() if space.number not in self.resting]
        for mapped in [mapped for space in spaces for mapped in space.ranks]:
            host = mapped.memory
            if not isinstance(host, HostMapping):
                continue
            left = [
                each
                for each in _chunks(host, mapped.region.page_bytes)
                if not self._is_pinned(*each)
                and each[0] not in self._stuck  # else the driver may know other pages
            ]
            if not left:
                continue
            if host.base in self._refused and (wait_s := self._refused[host.base].again_s - now_s) > 0:
                waits_s.append(wait_s)
            elif self._pin(gpu, mapped, host, *left[0]):
                return 0.0
            else:
                waits_s.append(self._refused[host.base].again_s - now_s)
        return min(waits_s, default=None)

    def _pin(self, gpu: Gpu, mapped: MappedRegion, host: HostMapping, first: int, num_bytes: int) -> bool:
        if self._makes_huge:  # all of it is taken now in any case; the driver has less to do then
            self._huge[first] = make_huge(first, num_bytes)
        try:
            gpu.copy.make_current()
            gpu.copy.register_host(first, num_bytes)
        except CopyFailed as error:
            self._huge.pop(first, None)
            before = self._refused.get(host.base)
            rest_s = min(REST_MAX_S, 2 * before.rest_s) if before is not None else REST_MIN_S
            self._refused[host.base] = Refused(rest_s, time.monotonic() + rest_s)
            log.warning(
                "not_page_locked", region=mapped.region.name, reason=error.message, again_s=rest_s,
                locked_bytes=self.pinned.num_bytes, so="copies of the rest go through pinned slots, at a fifth "
                "of the rate: give mempool.dram_bytes what the machine can spare, or set pin_host = false",
            )  # fmt: skip
            return False
        self._refused.pop(host.base, None)
        self.pinned.add(first, num_bytes)
        return True

    @property
    def huge_bytes(self) -> int:
        """Of what is page-locked, what lies in huge pages. Any thread."""
        return sum(list(self._huge.values()))

    def _is_pinned(self, first: int, num_bytes: int) -> bool:
        return self.pinned.cover(first, first + num_bytes)

    def unpin(self, number: int) -> None:
        """End the page-locking of a space that no copy reads or writes now."""
        for mapped in self._spaces[number].ranks if number in self._spaces else ():
            if isinstance(mapped.memory, HostMapping):
                try:
                    self._unlock(mapped.memory, mapped.region.page_bytes)
                except CopyFailed as error:  # a part stays locked; copies go through pinned slots
                    log.error("not_unlocked", region=mapped.region.name, reason=error.message)

    def _unlock(self, host: HostMapping, page_bytes: int) -> None:
        """Raises: CopyFailed, the first of all; what was not refused is page-locked no more."""
        locked = [
            first
            for first, num_bytes in _chunks(host, page_bytes)
            if self._is_pinned(first, num_bytes) or first in self._stuck
        ]
        self.pinned.remove(host.base, host.num_bytes)
        self._refused.pop(host.base, None)
        refused: CopyFailed | None = None
        for first in locked:
            self._huge.pop(first, None)
            gpu = next(iter(self._gpus.values()))
            try:
                gpu.copy.make_current()
                gpu.copy.unregister_host(first)
                self._stuck.discard(first)
            except CopyFailed as error:
                self._stuck.add(first)
                refused = refused or error
        if refused is not None:
            raise refused

    def _drop(self, space: MappedSpace) -> None:
        """Every rank. Addresses that a driver does not let go stay mapped: it would copy from the old memory, or to it,
        whatever is mapped there later."""
        for mapped in space.ranks:
            try:
                if isinstance(mapped.memory, HostMapping):
                    self._unlock(mapped.memory, mapped.region.page_bytes)
                mapped.memory.close()
            except (ClusterError, OSError) as error:
                log.error(
                    "not_unmapped", region=mapped.region.name, reason=str(error), kept_bytes=mapped.region.num_bytes,
                    so="that much memory stays with the mempool until it is started again",
                )  # fmt: skip


def _chunks(host: HostMapping, page_bytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of what is page-locked at once: whole pages, of ours and of the kernel's."""
    if host.base != host.address or page_bytes % mmap.PAGESIZE:
        return [(host.base, host.num_bytes)]
    step = max(1, PIN_CHUNK_BYTES // page_bytes) * page_bytes
    return [
        (host.base + first, min(step, host.num_bytes - first)) for first in range(0, host.num_bytes, step)
    ]


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
