"""The pool's memory as a process that computes for an engine gets it: descriptors of this rank's pages.

The connection stays open as long as the process: the pool learns from it which processes may still touch an
engine's pages.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.errors import ClusterError, ResourceError
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription, num_slabs
from shared.kv.page_table import TableHeader
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire

ATTACH_TIMEOUT_MS = 30_000  # the first one makes the pool create its memory
SLABS_PER_CALL = 128
RETRY_S = 0.05
_NO_EPOCH = Epoch(0)


class RankMemory:
    """Attached from construction to close(). In host memory, `fd` holds `header.num_pages` pages, the first at
    `offset_bytes`; on a GPU, `pages_per_slab` is positive and slab_fds() gets descriptors of the slabs.

    Args:
        device: as in wire.Attach.
        capacity_bytes: what all ranks' pages together may take; only the first attachment decides it.
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
    ) -> None:
        self._path = Path(socket)
        self._down = threading.Event()
        self._closing = False
        self._link = self._new_link()
        self._attach = attach = wire.Attach(
            kind="rank",
            instance=instance,
            instance_epoch=instance_epoch,
            description=description,
            capacity_bytes=capacity_bytes,
            device=device,
            rank=rank,
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
        self._memory_id = reply.memory_id
        os.close(fds[-1])  # the table's
        self.fd = fds[0] if wanted == 2 else -1
        self.offset_bytes = rank * reply.num_pages * reply.page_bytes

    def _new_link(self) -> BlockingUnixLink[wire.ToMempool, wire.FromMempool]:
        return BlockingUnixLink(
            self._path,
            out=wire.TO_MEMPOOL,
            into=wire.FROM_MEMPOOL,
            on_message=_ignore,
            on_down=lambda _: self._down.set(),
        )

    def stay_attached(self) -> None:
        """From now on attach to the mempool's successors too, on a thread of its own. After slab_fds()."""
        self._link.start()
        threading.Thread(target=self._reattach_forever, name="quire-rank", daemon=True).start()

    def _reattach_forever(self) -> None:
        again = msgspec.structs.replace(self._attach, memory_id=self._memory_id)
        while True:
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
                if not isinstance(reply, wire.Attached):  # the engine learns of it too, and ends
                    link.close()
                    return
                self._link = link
                link.start()
                break

    def slab_fds(self) -> Iterator[list[int]]:
        """Descriptors of all slabs, in order, a batch at a time, the caller's to close.

        Raises: ResourceError when the pool refuses; ClusterError when it is gone.
        """
        assert self._attach.description is not None
        total = num_slabs(self._attach.description, self.header.num_pages, self.pages_per_slab)
        for first in range(0, total, SLABS_PER_CALL):
            count = min(SLABS_PER_CALL, total - first)
            call = wire.SlabsCall(call_id=first, first=first, count=count)
            reply, _, fds = self._link.call(call, timeout_ms=ATTACH_TIMEOUT_MS)
            if not isinstance(reply, wire.Slabs) or len(fds) != count:
                close_fds(fds)
                raise ResourceError(f"the mempool sent no slabs: {reply}")
            yield fds

    def close(self) -> None:
        """Ends the connection and closes the descriptor; mappings stay."""
        self._closing = True
        self._link.close()
        if self.fd >= 0:
            os.close(self.fd)


def _ignore(_seq: int, _message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
    close_fds(fds)
