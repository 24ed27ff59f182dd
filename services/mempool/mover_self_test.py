"""What each pair of GPUs can do, measured before anything depends on it: scratch pages, never those of a space."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from services.mempool.mover_engines import CopyEngine, PinnedRanges
from services.mempool.mover_gpu import Gpu, SlabWindow
from services.mempool.mover_regions import SlabRegion
from shared.errors import ClusterError, OutOfPages
from shared.observe.log import get_logger
from shared.transfer.describe import EndDescription, describe_region, encode, this_boot_id
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import MappedPages, Peer, Region, RegionKind
from shared.transfer.self_test import SelfTest, measure, require
from shared.vmm.cuda_pages import CudaPages

NUM_PAGES = 32
MIN_PAGE_BYTES = 2 << 20
TIMEOUT_MS = 5_000
MEASUREMENTS = 2  # of a pair under the floor
# of the fastest pair's rate: a pair under it has another way than the others, or a neighbour in it
SLOW_SHARE = 0.25

log = get_logger("mempool.mover")


class PairTests:
    """The results, by (source, target) device."""

    def __init__(self, floor_gb_per_s: float) -> None:
        """`floor_gb_per_s` 0: measured, never failing."""
        self._floor_gb_per_s = floor_gb_per_s
        self.found: dict[tuple[str, str], SelfTest] = {}
        self._said: set[tuple[str, str]] = set()

    def test(self, pairs: Iterable[tuple[Gpu, Gpu]]) -> None:
        """Measure those pairs that have not shown yet that they reach the floor; one that does not, twice, since
        somebody else may have used the link. Cost: 20 ms a measurement, 64 MiB on both GPUs meanwhile.

        Raises: LinkTooSlow; ClusterError when pages do not arrive.
        """
        for source, target in pairs:
            key = (source.device, target.device)
            try:
                for _ in range(MEASUREMENTS):
                    if key in self.found and self._is_fast(self.found[key]):
                        break
                    found = self.found[key] = measure_pair(source, target)
                    log.info("pair_measured", source=key[0], target=key[1], gb_per_s=found.gb_per_s)
            except OutOfPages as error:  # both GPUs are full, as after a restart: nothing to measure with
                log.warning("pair_not_measured", source=key[0], target=key[1], reason=error.message)
            if key in self.found:
                require(self.found[key], self._floor_gb_per_s)
        self._say_slow()

    def _say_slow(self) -> None:
        """A pair far slower than the others costs its copies their time, whatever the floor: once, loudly."""
        between = {key: found.gb_per_s for key, found in self.found.items() if key[0] != key[1]}
        best = max(between.values(), default=0.0)
        for key, rate in between.items():
            if rate < SLOW_SHARE * best and key not in self._said:
                self._said.add(key)
                log.warning(
                    "pair_slow", source=key[0], target=key[1], gb_per_s=round(rate, 2), best_gb_per_s=round(best, 2),
                    hint="no direct link between these GPUs? mempool.mover_floor_gb_per_s refuses such a pair",
                )  # fmt: skip

    def _is_fast(self, found: SelfTest) -> bool:
        return not found.num_bytes or found.gb_per_s >= self._floor_gb_per_s


class _Scratch:
    """One allocation of NUM_PAGES pages, mapped. Raises: OutOfPages, PathUnavailable."""

    def __init__(self, gpu: Gpu) -> None:
        gpu.vmm.make_current()
        page_bytes = max(MIN_PAGE_BYTES, gpu.vmm.granularity_bytes)
        self._pages = CudaPages(gpu.vmm, 1, page_bytes * NUM_PAGES)
        try:
            where = SlabRegion(gpu.device, self, page_bytes, NUM_PAGES, NUM_PAGES)
            self.window = SlabWindow(gpu, where, lambda: False)
        except ClusterError:
            self._pages.close()
            raise
        self.region = Region(
            "source", RegionKind.CUDA_PAGES, self.window.address, page_bytes, NUM_PAGES, "scratch",
            gpu.ordinal, gpu.device,
        )  # fmt: skip

    def export(self, slab: int) -> int:
        """See mover_regions.Slabs."""
        return self._pages.export_fd(slab)

    def is_present(self, slab: int) -> bool:
        """See mover_regions.Slabs."""
        return self._pages.is_present(slab)

    def close(self) -> None:
        self.window.close()
        self._pages.close()


def measure_pair(source: Gpu, target: Gpu) -> SelfTest:
    """Pull NUM_PAGES pages between scratch memory. Raises: OutOfPages; ClusterError when they do not arrive."""
    with contextlib.ExitStack() as stack:
        theirs = _Scratch(source)
        stack.callback(theirs.close)
        mine = _Scratch(target)
        stack.callback(mine.close)
        theirs.window.allow(target)
        engine = CopyEngine(target, PinnedRanges())
        stack.callback(engine.close)
        transport = ImportedTransport(
            "self-test", lambda _source, _target: (engine, engine.into), page_stream=engine.page_stream
        )
        stack.callback(transport.close)
        transport.register(replace(mine.region, name="target"))
        end = EndDescription(
            instance="scratch", boot_id=this_boot_id(), regions=(describe_region(theirs.region),)
        )
        mapped = {"source": MappedPages(theirs.region.address, device=source.ordinal)}
        link = transport.connect(Peer(encode(end), mapped=mapped))
        pages = range(NUM_PAGES)
        return measure(link, "source", pages, "target", pages[::-1], TIMEOUT_MS)
