"""The memory of every space of this mempool, and what the core asks to be done with it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from services.mempool import copy_spans
from services.mempool.core import actions
from services.mempool.core.actions import CopyPages, CreateMemory, CreateSlabs, ReleaseUnits, RestoreUnits
from services.mempool.descriptors import of_memory
from services.mempool.far_messages import far_in_host, far_in_slabs
from services.mempool.kept import Kept
from services.mempool.kv_ends import kv_end
from services.mempool.memory import PoolMemory
from services.mempool.memory_ready import MemoryReady
from services.mempool.slabs import DeviceSlabs, KeptSlabs
from services.mempool.system_memory import CopyOptions, SystemMemory, punched
from services.mempool.takeover import Adopted, SpaceMeta
from shared.errors import ClusterError, ResourceError
from shared.ids import Epoch, InstanceId, PageId
from shared.kv.layout import EngineDescription, slabs_per_page
from shared.kv.page import PageState, unpack_word
from shared.observe.log import get_logger
from shared.transport.unix_socket import opened, opening
from shared.wire.mempool_far import MapFar

if TYPE_CHECKING:
    from services.mempool.mover import CopyDone, Mover
    from services.mempool.mover_gpu import SlabWindow
    from services.mempool.mover_layers import Feed, Gate, LayerMemory
    from services.mempool.mover_regions import HostRegion, RankRegion

DEFAULT_COPYING = CopyOptions()
LOOK_AGAIN_S = 0.1

log = get_logger("mempool.spaces")


class Spaces:
    """Owns memories, slabs and the mover until close(). One loop.

    Args:
        on_copied: (copy id, failed, pages that may still be written, us or 0): the end of every copy, once.
        on_settled: (space, pages): nothing can write these any more.
        copying: how the mover copies.
    """

    def __init__(
        self,
        kept: Kept,
        boot_generation: Epoch,
        on_copied: Callable[[int, bool, Sequence[int], int], None],
        on_settled: Callable[[int, tuple[int, ...]], None],
        *,
        copying: CopyOptions = DEFAULT_COPYING,
    ) -> None:
        self.kept = kept
        self._copying = copying
        self.memories: dict[int, PoolMemory] = {}
        self.slabs: dict[tuple[int, int], DeviceSlabs | KeptSlabs] = {}  # by space and rank, on GPUs
        self._metas: dict[int, SpaceMeta] = {}
        self._boot_generation = boot_generation
        self.ready = MemoryReady(boot_generation)
        self._on_copied = on_copied
        self._on_settled = on_settled
        self._mover: Mover | None = None  # nothing is copied, nor mapped here, where there is one space
        self._moved: set[int] = set()  # spaces that the mover knows
        self._resting: set[int] = set()  # spaces in host memory that have none, and are not page-locked
        self._system = SystemMemory(self.windows)
        self.layer_words: dict[tuple[int, InstanceId, int], LayerMemory] = {}  # by space, instance, rank
        self._followed: dict[int, tuple[Gate, str]] = {}  # copies on their way by layer, and traceparents
        self._traced: dict[int, tuple[int, CopyPages]] = {}  # copies that traces are told of, and since when

    # -- making and taking over -----------------------------------------------------------------------

    def create(self, action: CreateMemory) -> None:
        """Table, and pages in host memory; those on GPUs follow rank by rank."""
        memory = self.ready.take(action)
        meta = SpaceMeta(
            description=action.description, num_pages=action.num_pages, page_bytes=action.page_bytes,
            num_ranks=action.num_ranks, pages_per_slab=action.pages_per_slab, memory_id=action.memory_id,
            number=action.space, label=action.label,
        )  # fmt: skip
        self._take(memory, meta)
        log.info(
            "memory_created", space=action.space, num_pages=action.num_pages, page_bytes=action.page_bytes,
            num_ranks=action.num_ranks, label=action.label,
        )  # fmt: skip
        self._tell_mover()

    def _take(self, memory: PoolMemory, meta: SpaceMeta) -> None:
        self.memories[meta.number] = memory
        self._metas[meta.number] = meta
        self.kept.space(memory, meta)

    def create_slabs(self, action: CreateSlabs) -> bool:
        """One rank's pages on its GPU, unless they exist. False: that failed."""
        key = (action.space, action.rank)
        if key in self.slabs:
            return True
        try:
            slabs = self.slabs[key] = DeviceSlabs(action.device, action.num_slabs, action.slab_bytes)
        except ResourceError as error:
            log.error("slabs_failed", rank=action.rank, device=action.device, error=error.message)
            return False
        self.kept.slabs(action.space, action.rank, action.device, slabs, action.num_slabs)
        log.info("slabs_created", rank=action.rank, device=action.device, num_slabs=action.num_slabs)
        self._devices_of(action.space)[action.rank] = action.device
        self._tell_mover()
        return True

    def _devices_of(self, number: int) -> list[str]:
        meta = self._metas[number]
        if len(meta.devices) < meta.num_ranks:
            meta.devices.extend([""] * (meta.num_ranks - len(meta.devices)))
        return meta.devices

    def descriptors(self, number: int, reads_only: bool) -> list[int]:
        """Of pages in host memory, and of the table; the caller's to close. Raises: OutOfDescriptors."""
        return of_memory(self.memories[number], table_only=self.has_slabs(number), reads_only=reads_only)

    def export(self, number: int, rank: int, which: Iterable[int]) -> list[int]:
        """Descriptors of one rank's slabs, the caller's to close. Raises: ResourceError."""
        return opened(self.slabs[number, rank].export, which)

    def far_pages(self, action: actions.MapFarPages) -> tuple[MapFar, list[int]]:
        """What a rank is told to map them, and descriptors, the caller's to close. Raises: ResourceError."""
        if self.has_slabs(action.space):
            told, slabs = far_in_slabs(action, self._metas[action.space])
            return told, self.export(action.space, action.rank, slabs)
        with opening():
            return far_in_host(action, self.memories[action.space])

    def adopt(self, found: Adopted) -> None:
        """An earlier mempool's space."""
        meta = found.meta
        memory = found.memory(self._boot_generation)
        self._take(memory, meta)
        if not meta.pages_per_slab and all(unpack_word(w)[1] is PageState.RELEASED for w in found.words):
            self._resting.add(meta.number)
        per_rank = len(found.slab_fds) // meta.num_ranks
        for rank in range(meta.num_ranks if per_rank else 0):
            slab_bytes = meta.page_bytes * meta.num_pages // per_rank
            fds = found.slab_fds[rank * per_rank : (rank + 1) * per_rank]
            slabs = KeptSlabs(fds, meta.devices[rank], slab_bytes)
            self.slabs[meta.number, rank] = slabs
            self.kept.slabs(meta.number, rank, meta.devices[rank], slabs, per_rank)
        self._tell_mover()

    def windows(self, number: int) -> "list[SlabWindow]":
        """Of the ranks of a space on GPUs, as far as the mover has mapped it."""
        return self._mover.windows(number) if self._mover else []

    def end(self, number: int) -> None:
        """The space is over: nobody else maps it, and nothing is copied there. Its memory goes as soon as the mover
        does not map it any more; with close() before that it goes with this process."""
        memory, _ = self.memories.pop(number), self._metas.pop(number)
        slabs = [self.slabs.pop(key) for key in sorted(self.slabs) if key[0] == number]
        for key in [key for key in self.layer_words if key[0] == number]:
            del self.layer_words[key]
        self.kept.end(number)

        def close() -> None:
            self._wake(number)  # whoever is of no use is not told to rest
            for each in slabs:
                each.close()
            memory.close()
            log.info("space_ended", space=number)

        if self._mover is not None and number in self._moved:
            self._moved.discard(number)
            self._mover.remove_space(number, lambda: self._system.behind(close))
        else:
            self._system.behind(close)  # memory of it may be on its way to the system

    # -- copies ---------------------------------------------------------------------------------------

    def copy(self, action: CopyPages) -> None:
        """Answered by on_copied, always."""
        parts, targets = action.by_source()
        self._tell_mover(1)  # the nine calls copy within a space too
        if self._mover is None:  # ranks are on their way: no space is whole
            self._on_copied(action.copy_id, True, (), 0)
            return
        if action.returns or action.readers:
            self._traced[action.copy_id] = time.time_ns(), action
        try:
            feed, ended = self._feed(action, [space for space, _ in parts]), self._ended
            self._mover.copy(
                action.copy_id, action.space, targets, parts, action.timeout_ms, ended, feed, raw=action.raw
            )
        except ClusterError as error:
            log.warning("copy_refused", copy_id=action.copy_id, code=error.code, reason=error.message)
            self._traced.pop(action.copy_id, None)
            self._on_copied(action.copy_id, True, (), 0)

    def _feed(self, action: CopyPages, sources: Iterable[int]) -> "Feed | None":
        """Raises: TransferRefused when no rank says how far it is."""
        cut = action.cut
        if cut is None:
            return None
        from services.mempool.mover_layers import Feed, Gate
        from shared.transfer.errors import TransferRefused

        gate = None
        if cut.step:
            keys = [(s, cut.instance, r) for s in sources for r in range(self._metas[s].num_ranks)]
            words = [self.layer_words[key] for key in keys if key in self.layer_words]
            if len(words) < len(keys):
                raise TransferRefused(f"{len(words)} of {len(keys)} ranks of {cut.instance} have layer words")
            gate = Gate(words, cut.step, cut.is_over)
            self._followed[action.copy_id] = gate, cut.traceparent
        return Feed(cut.num_layers, cut.layer_bytes, gate)

    def make_layer_words(self, space: int, instance: InstanceId, rank: int) -> int:
        """A descriptor of the rank's memory for its layer word, the caller's to close. New memory each time: what an
        earlier process of that rank may still write is not read any more. Raises: OutOfDescriptors."""
        from services.mempool.mover_layers import LayerMemory

        with opening():
            made = self.layer_words[space, instance, rank] = LayerMemory()
        return made.take_fd()

    def step_over(self, copy_id: int) -> None:
        """This copy need not look at layer words any more."""
        if copy_id in self._followed:
            self._followed[copy_id][0].is_over = True

    def _ended(self, done: "CopyDone") -> None:
        _, parent = self._followed.pop(done.copy_id, (None, ""))
        copy_spans.of_layers(done, parent)
        if done.copy_id in self._traced:
            copy_spans.of_copy(done, *self._traced.pop(done.copy_id))
        if not done.ok:
            log.warning("copy_failed", copy_id=done.copy_id, code=done.code, reason=done.reason)
        self._on_copied(done.copy_id, not done.ok, done.quarantined, done.elapsed_us)

    def _tell_mover(self, at_least: int = 2) -> None:
        """Map the spaces here as soon as there are two between which something could be copied."""
        whole = [number for number in self.memories if self._is_whole(number)]
        if len(whole) < at_least:
            return
        if self._mover is None:
            from services.mempool.mover import Mover  # a mempool of one space needs none of it

            how = self._copying
            self._mover = Mover(
                self._on_settled, threads=how.threads, pin_host=how.pin_host,
                floor_gb_per_s=how.floor_gb_per_s, huge_pages=how.huge_pages, background=self._system.thread,
            )  # fmt: skip
            self._mover.pinning.resting |= self._resting
        for number in whole:
            if number not in self._moved:
                self._moved.add(number)
                try:
                    end = kv_end(self._metas[number].description)
                    self._mover.add_space(number, self._regions(number), end)
                except ClusterError as error:  # its blocks are not copied; its engines go on
                    log.error("space_not_copied", space=number, code=error.code, reason=error.message)

    def _is_whole(self, number: int) -> bool:
        meta = self._metas[number]
        return not meta.pages_per_slab or all((number, r) in self.slabs for r in range(meta.num_ranks))

    def _regions(self, number: int) -> "list[RankRegion]":
        from services.mempool.mover_regions import HostRegion, SlabRegion

        meta, memory = self._metas[number], self.memories[number]
        if meta.pages_per_slab:
            return [
                SlabRegion(
                    self._devices_of(number)[rank], self.slabs[number, rank], meta.page_bytes,
                    meta.num_pages, meta.pages_per_slab, slabs_per_page(meta.description),
                )
                for rank in range(meta.num_ranks)
            ]  # fmt: skip
        size = meta.num_pages * meta.page_bytes
        return [
            HostRegion(memory.page_fd, rank * size, meta.page_bytes, meta.num_pages)
            for rank in range(meta.num_ranks)
        ]

    # -- other hosts ----------------------------------------------------------------------------------

    def description_of(self, number: int) -> EngineDescription:
        """What the blocks of this space are."""
        return self._metas[number].description

    def host_regions(self, number: int) -> "list[HostRegion]":
        """Where the pages of every rank are. Raises: PathUnavailable on GPUs, whose pages UCX cannot register."""
        from services.mempool.mover_regions import HostRegion
        from shared.transfer.errors import PathUnavailable

        regions = self._regions(number)
        host = [region for region in regions if isinstance(region, HostRegion)]
        if len(host) < len(regions):
            raise PathUnavailable(f"the pages of space {number} are on GPUs: no path to other hosts yet")
        return host

    # -- the rest -------------------------------------------------------------------------------------

    def has_slabs(self, number: int) -> bool:
        """Whether the pages of this space are on GPUs."""
        return self._metas[number].pages_per_slab > 0

    def punch(self, number: int, pages: list[PageId]) -> None:
        """Give the memory of free pages back, unless copy engines have its addresses."""
        is_pinned = self._mover is not None and self._mover.is_pinned(number)
        if not is_pinned and punched(self.memories[number], number, pages):
            log.info("pages_punched", space=number, num_pages=len(pages))

    def release(self, action: ReleaseUnits, on_done: Callable[[bool], None], *, may_punch: bool) -> None:
        """Give memory back that no other process maps; of GPUs behind copies in doubt. `on_done`: whether it stays."""
        number, memory = action.space, self.memories[action.space]
        if not self.has_slabs(number):
            mover = self._mover
            if action.unlocks and mover is not None and mover.uses.in_doubt(number):
                may_punch = False  # copy engines may still have its addresses
            if may_punch and action.unlocks:
                self._rest(number)
            if not may_punch or (mover is not None and mover.is_pinned(number)):
                on_done(True)
            else:
                self._system.punch(memory, number, action.units, on_done)
        else:
            self._release_slabs(action, on_done)

    def _release_slabs(self, action: ReleaseUnits, on_done: Callable[[bool], None]) -> None:
        number = action.space
        if number not in self.memories:
            return  # they went with the space
        if self._mover is not None and self._mover.uses.in_doubt(number):
            # a copy reads there still, and no rank maps these any more: they cannot stay
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._release_slabs, action, on_done)
            return

        def released(failed: bool) -> None:
            self.kept.slabs_changed(number, action.units, has_memory=False)
            on_done(failed)

        self._system.release(self._slabs_of(number), number, action.units, released)

    def restore(self, action: RestoreUnits, on_done: Callable[[int], None]) -> None:
        """Take memory again. `on_done`: for how many of the units, from the first on."""
        number = action.space
        if not self.has_slabs(number):
            self._wake(number)
            # host memory comes when it is written; an answer within the call would go as deep as there are pages
            asyncio.get_running_loop().call_soon(on_done, len(action.units))
            return

        def restored(num_made: int) -> None:
            self.kept.slabs_changed(number, action.units[:num_made], has_memory=True)
            on_done(num_made)

        self._system.restore(self._slabs_of(number), number, action.units, restored)

    def _rest(self, number: int) -> None:
        """What is done on the thread of memory next finds nothing of the space page-locked."""
        self._resting.add(number)
        if self._mover is not None:
            self._mover.pinning.rest(number)

    def _wake(self, number: int) -> None:
        self._resting.discard(number)
        if self._mover is not None:
            self._mover.pinning.wake(number)

    def _slabs_of(self, number: int) -> list[DeviceSlabs | KeptSlabs]:
        return [slabs for (space, _), slabs in sorted(self.slabs.items()) if space == number]

    def resident_bytes(self) -> int:
        """Memory that pages in host memory really use now."""
        return sum(memory.resident_bytes() for memory in self.memories.values())

    def status(self) -> dict[str, Any]:
        """Of copies, for /status."""
        return {} if self._mover is None else self._mover.status()

    def pair_rates(self) -> dict[tuple[str, str], float]:
        """GB/s between two GPUs, as far as that was measured, by (source, target) device."""
        return {} if self._mover is None else self._mover.pair_rates()

    def close(self) -> None:
        """Copies end first. Peers keep the memory that they mapped."""
        if self._mover is not None:
            if not self._mover.close():
                log.warning(
                    "copies_left_behind", reason="a copy engine stands still; it ends with this process"
                )
            self._mover = None
        self._system.close()
        for slabs in self.slabs.values():
            slabs.close()
        self.slabs = {}
        for memory in self.memories.values():
            memory.close()
        self.memories = {}
