"""One space of the mempool as a caller of the nine calls maps it, to copy by itself (direct.py).

    attached -> mapped -> used -> leave(): no copy runs -> unmapped -> Detach -> Detached

A caller that leaves says so, to the mempool that knows it or to that one's successor: until then, or until this process
is dead, the mempool keeps every page that the caller could still write. Descriptors are closed as they are mapped.
"""

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import ClusterError, PeerProtocolError, ResourceError
from shared.ids import InstanceId, SpaceId
from shared.kv.page_table import HEADER_WORDS, TableHeader, read_header, table_bytes
from shared.kv.words import u32_bytes, u32_list
from shared.mempool.rank_memory import passes
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from shared.wire.mempool_callers import AttachCaller, CallerAttached, Detached

CALL_TIMEOUT_MS = 30_000
SLABS_PER_CALL = 128  # descriptors that are open at once
RETRY_S = 0.2
RETRY_MOST_S = 2.0

logger = logging.getLogger(__name__)
Link = BlockingUnixLink[wire.ToMempool, wire.FromMempool]


class Window(Protocol):
    """Slabs of a GPU, mapped side by side; direct_cuda.py. Any thread. Raises: ClusterError, OSError."""

    address: int

    def map(self, slabs: Sequence[int], fds: Sequence[int]) -> None:
        """The descriptors stay the caller's."""
        ...

    def unmap(self, slabs: Sequence[int]) -> None:
        """No copy touches these. Those that are not mapped are left out."""
        ...

    def close(self) -> None:
        """No copy touches any."""
        ...


# (device as in wire.Attach, slabs, bytes of one) -> a window without anything mapped
MakeWindow = Callable[[str, int, int], Window]


class HostPages:
    """Pages in host memory. Takes over the descriptor. Raises: PeerProtocolError, OSError."""

    def __init__(self, fd: int, num_bytes: int, *, writes: bool) -> None:
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise PeerProtocolError("the pages' memory could shrink under this process")
            if os.fstat(fd).st_size < num_bytes:
                raise PeerProtocolError(f"the pages' memory is shorter than {num_bytes} bytes")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
            self._map = mmap.mmap(fd, num_bytes, prot=protection)
        finally:
            os.close(fd)
        # a forked child must not be able to write here once this process is proven dead
        self._map.madvise(mmap.MADV_DONTFORK)
        self._view: np.ndarray | None = np.frombuffer(self._map, np.uint8)
        self.address = int(self._view.ctypes.data)

    def close(self) -> None:
        """No copy touches any."""
        self._view = None
        self._map.close()


class CallerMemory:
    """Attached and mapped from construction until leave().

    Args:
        socket: the mempool's for engines and clients.
        instance: of the caller.
        pages_of, space: whose pages, in which space, as addresses say it.
        writes: the mapping is read-only without it.
        make_window: for pages on a GPU.
        quiet: returns when every copy of this process that has begun until then has ended.
        on_down: the mempool is gone, or the connection; on a thread of its own.
    Attributes:
        words: the page table, uint64 [num_pages], read-only; they change under the reader.
        address: of page 0 in this process.
        device: as in wire.Attach.
    Raises: ResourceError when the mempool refuses; ClusterError; OSError.
    Cost: 0.2 ms a slab (a descriptor, an import, a mapping); address space only for host memory.
    """

    def __init__(
        self,
        socket: Path,
        instance: InstanceId,
        pages_of: InstanceId,
        space: SpaceId,
        *,
        writes: bool,
        make_window: MakeWindow,
        quiet: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        self._path = socket
        self._quiet = quiet
        self._on_down = on_down
        self._detached = threading.Event()
        self._down = threading.Event()
        self._leaving = self._listening = False
        self._link = self._new_link()
        self._attach = AttachCaller(instance=instance, pages_of=pages_of, space=space, reads_only=not writes)
        self._pages: HostPages | None = None
        self.window: Window | None = None
        self._link.connect()
        reply, _, fds = self._link.call(self._attach, timeout_ms=CALL_TIMEOUT_MS)
        wanted = 1 if isinstance(reply, CallerAttached) and reply.pages_per_slab else 2
        if not isinstance(reply, CallerAttached) or len(fds) != wanted:
            close_fds(fds)
            self._link.close()
            raise ResourceError(f"the mempool gives no pages of space {space}: {reply}")
        self.writes, self.page_bytes, self.device = writes, reply.page_bytes, reply.device
        self.content_key, self.num_pages = reply.content_key, reply.num_pages
        self._attach = msgspec.structs.replace(self._attach, memory_id=reply.memory_id)
        try:
            self._map(reply, fds, make_window)
        except (ClusterError, OSError, ValueError):
            self._unmap()
            self._say_detach()
            raise
        self._link.start()
        self._listening = True
        if self.window is not None:
            self._link.send(wire.Mapped())

    def _new_link(self) -> Link:
        return BlockingUnixLink(
            self._path, out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=self._on_message,
            on_down=self._went_down,
        )  # fmt: skip

    def _map(self, reply: CallerAttached, fds: list[int], make_window: MakeWindow) -> None:
        waiting = list(fds)
        try:
            self._map_table(
                waiting.pop(), TableHeader(reply.boot_generation, reply.num_pages, reply.page_bytes)
            )
            if not reply.pages_per_slab:
                length = reply.num_pages * reply.page_bytes
                self._pages = HostPages(waiting.pop(), length, writes=self.writes)
                self.address = self._pages.address
                return
        finally:
            close_fds(waiting)
        num_slabs = reply.num_pages // reply.pages_per_slab
        window = make_window(reply.device, num_slabs, reply.pages_per_slab * reply.page_bytes)
        self.window, self.address = window, window.address
        absent = set(u32_list(reply.absent_slabs))
        present = [slab for slab in range(num_slabs) if slab not in absent]
        while present:
            count = 1
            while count < min(SLABS_PER_CALL, len(present)) and present[count] == present[0] + count:
                count += 1
            fds = self._slab_fds(present[0], count)
            try:
                window.map(present[:count], fds)
            finally:
                close_fds(fds)
            del present[:count]

    def _map_table(self, fd: int, header: TableHeader) -> None:
        try:
            self._table = mmap.mmap(fd, table_bytes(header.num_pages), prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with memoryview(self._table) as raw, raw.cast("Q") as words:
            if read_header(words) != header:
                raise ValueError(f"the page table says {read_header(words)}, the mempool says {header}")
        self.words: NDArray[np.uint64] = np.frombuffer(self._table, np.uint64)[HEADER_WORDS:]

    def _slab_fds(self, first: int, count: int) -> list[int]:
        call = wire.SlabsCall(call_id=first, first=first, count=count)
        reply, _, fds = self._link.call(call, timeout_ms=CALL_TIMEOUT_MS)
        if not isinstance(reply, wire.Slabs) or len(fds) != count:
            close_fds(fds)
            raise ResourceError(f"the mempool sent no slabs: {reply}")
        return fds

    # -- while it is mapped -------------------------------------------------------------------------

    def _on_message(self, _seq: int, message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
        """A driver that refuses leaves this process mapped: the mempool waits for its end then."""
        try:
            if isinstance(message, Detached):
                self._detached.set()
            elif isinstance(message, wire.Unmap) and self.window is not None:
                self.window.unmap(u32_list(message.slabs))
                self._link.send(wire.Unmapped(slabs=message.slabs))
            elif isinstance(message, wire.MapSlabs) and self.window is not None:
                self.window.map(u32_list(message.slabs), fds)
                self._link.send(wire.Mapped(slabs=u32_bytes(u32_list(message.slabs))))
        except (ClusterError, OSError) as error:
            logger.error("mempool %s: %s failed: %s", self._path, type(message).__name__, error)
        finally:
            close_fds(fds)

    def _went_down(self, _error: Exception | None) -> None:
        self._down.set()
        if not self._leaving:
            threading.Thread(target=self._on_down, name="quire-caller-down", daemon=True).start()

    # -- its end ------------------------------------------------------------------------------------

    def leave(self) -> None:
        """No copy of this mapping runs, nor ever will: unmap, and have it known. Waits for a mempool as long as there
        is a folder in which its socket could be. Once, on a thread that may wait."""
        self._leaving = True
        try:
            self._unmap()
        except (ClusterError, OSError) as error:  # its pages wait for the end of this process
            logger.error("mempool %s: a space stays mapped: %s", self._path, error)
            return
        self._say_detach()

    def _unmap(self) -> None:
        self.words = np.zeros(0, np.uint64)
        if self.window is not None:
            self.window.close()
        if self._pages is not None:
            self._pages.close()

    def _say_detach(self) -> None:
        wait_s = RETRY_S
        while not self._tell_once():
            self._link.close()
            if not self._path.parent.exists():
                return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MOST_S)
            self._link, self._listening = self._new_link(), False
        self._link.close()

    def _tell_once(self) -> bool:
        """Whether a mempool knows it now, or never will have to."""
        link = self._link
        try:
            if self._listening:
                link.send(wire.Detach())
                while not (self._detached.wait(0.05) or self._down.is_set()):
                    pass
                return self._detached.is_set()
            if not link.up:
                link.connect()
                # A successor listens only when the mempool that copies relied on is dead. To attach says that none of
                # them runs, for all connections of this process: those of others of its calls too.
                self._quiet()
                reply, _, fds = link.call(self._attach, timeout_ms=CALL_TIMEOUT_MS)
                close_fds(fds)
                if isinstance(reply, wire.AttachRefused):
                    return not passes(reply)
            reply, _, fds = link.call(wire.Detach(), timeout_ms=CALL_TIMEOUT_MS)
            close_fds(fds)
            return isinstance(reply, Detached)
        except ClusterError:
            return False
