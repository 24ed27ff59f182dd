"""The pool's memory as a process that computes for an engine gets it: descriptors of this rank's pages.

The connection stays open as long as the process: the pool learns from it which processes may still touch an
engine's pages.
"""

import os
from pathlib import Path

from shared.errors import ResourceError
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.kv.page_table import TableHeader
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire

ATTACH_TIMEOUT_MS = 30_000  # the first one makes the pool create its memory
_NO_EPOCH = Epoch(0)


class RankMemory:
    """Attached from construction to close(). `fd` holds `header.num_pages` pages, the first at `offset_bytes`.

    Args: capacity_bytes: what all ranks' pages together may take; only the first attachment decides it.
    Raises: ResourceError when the pool refuses; ClusterError when it cannot be reached.
    """

    def __init__(
        self,
        socket: str | Path,
        instance: InstanceId,
        description: EngineDescription,
        rank: int,
        *,
        capacity_bytes: int = 0,
        instance_epoch: Epoch = _NO_EPOCH,
    ) -> None:
        self._link: BlockingUnixLink[wire.ToMempool, wire.FromMempool] = BlockingUnixLink(
            Path(socket), out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=_ignore
        )
        attach = wire.Attach(
            kind="rank",
            instance=instance,
            instance_epoch=instance_epoch,
            description=description,
            capacity_bytes=capacity_bytes,
        )
        self._link.connect()
        reply, _, fds = self._link.call(attach, timeout_ms=ATTACH_TIMEOUT_MS)
        if not isinstance(reply, wire.Attached) or len(fds) != 2:
            close_fds(fds)
            self._link.close()
            raise ResourceError(f"mempool {socket} refused rank {rank}: {reply}")
        self.header = TableHeader(reply.boot_generation, reply.num_pages, reply.page_bytes)
        self.fd, table_fd = fds
        os.close(table_fd)
        self.offset_bytes = rank * reply.num_pages * reply.page_bytes

    def close(self) -> None:
        """Ends the connection and closes the descriptor; mappings of it stay."""
        self._link.close()
        os.close(self.fd)


def _ignore(_seq: int, _message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
    close_fds(fds)
