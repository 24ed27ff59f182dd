"""The pool's memory as a process that computes for an engine gets it: descriptors of this rank's pages.

The connection stays open as long as the process: the pool learns from it which processes may still touch an
engine's pages.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from shared.errors import ClusterError, ResourceError
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription, num_slabs
from shared.kv.page_table import TableHeader
from shared.kv.words import u32_bytes, u32_list, u64_list
from shared.mempool.slab_unmaps import SlabUnmaps, Unmapper
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.vital_thread import end_process, start_vital
from shared.wire import mempool as wire
from shared.wire.mempool_far import FarMapped, MapFar, UnmapFar

ATTACH_TIMEOUT_MS = 30_000  # the first one makes the pool create its memory
SLABS_PER_CALL = 128
RETRY_S = 0.05
REFUSED_RETRY_S = 0.5
PASSING_REFUSALS = frozenset({"descriptors.exhausted", "pages.exhausted", "peer.credentials"})
CONTEXT_BYTES = 640 << 20  # of the mempool's own CUDA context, which an engine's share of its GPU has to hold
_NO_EPOCH = Epoch(0)

logger = logging.getLogger(__name__)


def pages_bytes(found_bytes: int) -> int:
    """Of what a rank may use on its GPU, what pages may take. Raises: ResourceError: nothing; says what to set."""
    if found_bytes <= CONTEXT_BYTES:
        raise ResourceError(
            f"{found_bytes} bytes for the KV cache are no more than the {CONTEXT_BYTES} that the mempool's own CUDA "
            "context takes of them: set a larger kv_cache_bytes, or a larger gpu_memory_utilization"
        )
    return found_bytes - CONTEXT_BYTES


def passes(reply: object) -> bool:
    """Whether this answer to Attach is a refusal for want of what may be there in a moment: attach again."""
    return isinstance(reply, wire.AttachRefused) and reply.code in PASSING_REFUSALS


class SlabUser(Unmapper, Protocol):
    """Whoever maps the slabs of a rank; raises ClusterError or OSError. One call at a time, but not on one thread."""

    def map(self, slabs: Sequence[int], fds: Sequence[int]) -> None:
        """These have memory again; the descriptors stay the caller's."""
        ...


class PageSlabs(NamedTuple):
    """The slab that each of several pages is a part of; as in wire.MapFar."""

    memory_id: int
    numbers: list[int]
    slab_bytes: int
    life: int = 0  # which mempool's numbers they are: its successor's may mean other memory


class FarUser(Protocol):
    """Whoever maps pages from elsewhere, read-only; raises ClusterError, OSError or ValueError with nothing changed."""

    def map(
        self,
        places: Sequence[int],
        fds: Sequence[int],
        offsets: Sequence[int],
        slabs: PageSlabs | None = None,
    ) -> None:
        """Nothing is mapped there. With offsets, all lie in one descriptor of host memory, or, with `slabs`, of those
        on a GPU; they stay the caller's."""
        ...

    def unmap(self, places: Sequence[int]) -> None:
        """No step reads these, begun or to come. Those that are not mapped are left out."""
        ...


class RankMemory:
    """Attached from construction to close(). In host memory, `fd` holds `header.num_pages` pages, the first at
    `offset_bytes`; on a GPU, `pages_per_slab` is positive and slab_fds() gets descriptors of the slabs. `asked_pages`:
    what capacity_bytes comes to in this mempool; 0: it does not say.

    Args:
        device: as in wire.Attach.
        capacity_bytes: what all ranks' pages together may take; only the first attachment decides it.
        far_places: the most pages from elsewhere that this process maps (stay_attached).
        on_bug: of its threads; see start_vital().
    Raises: ResourceError when the pool refuses; ClusterError when it cannot be reached.
    """

    def __init__(
        self,
        socket: str | Path,
        instance: InstanceId,
        description: EngineDescription,
        rank: int,
        *,
        device: str = "cpu",
        capacity_bytes: int = 0,
        instance_epoch: Epoch = _NO_EPOCH,
        far_places: int = 0,
        on_bug: Callable[[], None] = end_process,
    ) -> None:
        self._path = Path(socket)
        self._on_bug = on_bug
        self._down = threading.Event()
        self._closing = False
        self._changing = threading.Lock()  # held while `_link` is replaced, and closed for good
        self._link = self._new_link()
        self._attach = attach = wire.Attach(
            kind="rank",
            instance=instance,
            instance_epoch=instance_epoch,
            description=description,
            capacity_bytes=capacity_bytes,
            device=device,
            rank=rank,
            far_places=far_places,
        )
        self._link.connect()
        reply, _, fds = self._link.call(attach, timeout_ms=ATTACH_TIMEOUT_MS)
        wanted = 1 if isinstance(reply, wire.Attached) and reply.pages_per_slab else 2
        if not isinstance(reply, wire.Attached) or len(fds) != wanted:
            close_fds(fds)
            self._link.close()
            raise ResourceError(f"mempool {socket} refused rank {rank}: {reply}")
        self.header = TableHeader(reply.boot_generation, reply.num_pages, reply.page_bytes)
        self.pages_per_slab = reply.pages_per_slab
        self.asked_pages = reply.asked_pages
        self._memory_id = reply.memory_id
        self._absent = frozenset(u32_list(reply.absent_slabs))
        self._slabs: SlabUser | None = None
        self._life = 0  # of the mempool: how many were there before
        self._far: FarUser | None = None
        self._unmaps: SlabUnmaps | None = None
        os.close(fds[-1])  # the table's
        self.fd = fds[0] if wanted == 2 else -1
        self.offset_bytes = rank * reply.num_pages * reply.page_bytes

    def _new_link(self) -> BlockingUnixLink[wire.ToMempool, wire.FromMempool]:
        return BlockingUnixLink(
            self._path,
            out=wire.TO_MEMPOOL,
            into=wire.FROM_MEMPOOL,
            on_message=self._on_message,
            on_down=lambda _: self._down.set(),
        )

    def layer_words(self) -> int:
        """A descriptor of this rank's memory for its layer word (shared/kv/layer_words.py), the caller's to close.
        Before stay_attached(); a successor of the mempool does not know it.

        Raises: ResourceError when the pool refuses; ClusterError when it is gone.
        """
        reply, _, fds = self._link.call(wire.LayerWordsCall(call_id=0), timeout_ms=ATTACH_TIMEOUT_MS)
        if not isinstance(reply, wire.LayerWords) or len(fds) != 1:
            close_fds(fds)
            raise ResourceError(f"the mempool sent no layer words: {reply}")
        return fds[0]

    def stay_attached(self, slabs: "SlabUser | None" = None, far: "FarUser | None" = None) -> None:
        """From now on attach to the mempool's successors too, on a thread of its own. After slab_fds().

        Args: slabs: unmaps allocations whose memory shall go (slab_unmaps.py), and maps them again, on the link's
            thread. Without it no memory of this space can be given back to the system.
            far: maps pages from elsewhere, on the same thread; needed with far places.
        """
        self._slabs, self._far = slabs, far
        if slabs is not None:
            self._unmaps = SlabUnmaps(
                slabs, lambda done: self._say(wire.Unmapped(slabs=u32_bytes(done))), on_bug=self._on_bug
            )
        self._link.start()
        self._say_mapped()
        start_vital(
            self._reattach_forever, name="quire-rank", on_bug=self._on_bug,
            loss="a successor of the mempool would never know this rank",
        )  # fmt: skip

    def step_launched(self) -> None:
        """By the thread of the steps, behind each step's last launch: see SlabUnmaps."""
        if self._unmaps is not None:
            self._unmaps.step_launched()

    def _reattach_forever(self) -> None:
        again = msgspec.structs.replace(self._attach, memory_id=self._memory_id)
        while not self._closing:
            self._down.wait()
            self._down.clear()
            while not self._closing:
                link = self._new_link()
                try:
                    link.connect()
                    reply, _, fds = link.call(again, timeout_ms=ATTACH_TIMEOUT_MS)
                except ClusterError:
                    link.close()
                    time.sleep(RETRY_S)
                    continue
                close_fds(fds)
                if not isinstance(reply, wire.Attached):
                    link.close()
                    if passes(reply):
                        time.sleep(REFUSED_RETRY_S)
                        continue
                    logger.error("mempool %s refused this rank, whose engine ends: %s", self._path, reply)
                    return
                if self._begin(link):
                    self._say_mapped()
                break

    def _begin(self, link: BlockingUnixLink[wire.ToMempool, wire.FromMempool]) -> bool:
        """Use it from now on. False, and it is closed: this memory was closed while it attached."""
        with self._changing:
            if not self._closing:
                self._link = link
                self._life += 1
                link.start()
                return True
        link.close()
        return False

    def _say_mapped(self) -> None:
        if self._slabs is not None:
            self._say(wire.Mapped())

    def _say(self, message: wire.Mapped | wire.Unmapped | FarMapped) -> None:
        try:
            self._link.send(message)
        except ClusterError as error:  # the successor asks again
            logger.info("mempool %s: %s not sent: %s", self._path, type(message).__name__, error)

    def _on_message(self, _seq: int, message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
        """A driver that refuses leaves this process mapped: the mempool waits for its end then."""
        try:
            if isinstance(message, MapFar | UnmapFar):
                self._say(FarMapped(number=message.number, is_ok=self._change_far(message, fds)))
                return
            if self._slabs is None or self._unmaps is None:
                return
            if isinstance(message, wire.Unmap):
                self._unmaps.add(u32_list(message.slabs))
            elif isinstance(message, wire.MapSlabs):
                with self._unmaps.lock:
                    self._slabs.map(u32_list(message.slabs), fds)
                self._say(wire.Mapped(slabs=message.slabs))
        except (ClusterError, OSError) as error:
            logger.error("mempool %s: %s failed: %s", self._path, type(message).__name__, error)
        finally:
            close_fds(fds)

    def _change_far(self, message: MapFar | UnmapFar, fds: list[int]) -> bool:
        try:
            if self._far is None:
                return False
            places = u32_list(message.places)
            if isinstance(message, UnmapFar):
                self._far.unmap(places)
            else:
                numbers = u32_list(message.slabs)
                slabs = PageSlabs(message.memory_id, numbers, message.slab_bytes, self._life)
                self._far.map(places, fds, u64_list(message.offsets), slabs if numbers else None)
        except (ClusterError, OSError, ValueError) as error:
            logger.error("mempool %s: %s failed: %s", self._path, type(message).__name__, error)
            return False
        return True

    @property
    def num_slabs(self) -> int:
        """Of this rank, those without memory too."""
        assert self._attach.description is not None
        return num_slabs(self._attach.description, self.header.num_pages, self.pages_per_slab)

    def slab_fds(self) -> Iterator[tuple[int, list[int]]]:
        """(first slab, descriptors) of all slabs that have memory, in order, a batch at a time, the caller's to close.

        Raises: ResourceError when the pool refuses; ClusterError when it is gone.
        """
        first = 0
        while first < self.num_slabs:
            if first in self._absent:
                first += 1
                continue
            end = first
            while end < min(first + SLABS_PER_CALL, self.num_slabs) and end not in self._absent:
                end += 1
            call = wire.SlabsCall(call_id=first, first=first, count=end - first)
            reply, _, fds = self._link.call(call, timeout_ms=ATTACH_TIMEOUT_MS)
            if not isinstance(reply, wire.Slabs) or len(fds) != end - first:
                close_fds(fds)
                raise ResourceError(f"the mempool sent no slabs: {reply}")
            yield first, fds
            first = end

    def close(self) -> None:
        """Ends the connection and closes the descriptor; mappings stay. One that is attaching again is ended, too, as
        soon as its mempool answers.
        """
        with self._changing:
            self._closing = True
        self._down.set()  # its thread ends
        if self._unmaps is not None:
            self._unmaps.close()
        self._link.close()
        if self.fd >= 0:
            os.close(self.fd)
