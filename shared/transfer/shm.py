"""Host memory of one host: the peer's memfd, mapped here, and memcpy by one or two threads (12 GB/s with two).

The fd comes with SCM_RIGHTS over the mempool's unix socket (shared/transport/unix_*). A memfd that can shrink is
refused: its owner could otherwise kill this process with SIGBUS.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Mapping

import numpy as np

from shared.errors import PeerProtocolError
from shared.kernels.copy_pages.copier import Copier
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.transfer.describe import EndDescription, RegionDescription, decode
from shared.transfer.errors import PathUnavailable
from shared.transfer.interface import MappedPages, PathName, Peer, RegionKind
from shared.transfer.link import BaseLink
from shared.transfer.mapped import MappedLink
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine

DEFAULT_THREADS = 2


class HostMapping:
    """A peer's region, mapped here until close(). Takes over the fd."""

    def __init__(self, region: RegionDescription, fd: int, offset_bytes: int, *, writable: bool) -> None:
        """Raises: PeerProtocolError when the memory is not what the peer described, OSError."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise PeerProtocolError(
                    f"region {region.name!r} could shrink: its memfd is not sealed against it"
                )
            if os.fstat(fd).st_size < offset_bytes + region.num_bytes:
                raise PeerProtocolError(f"region {region.name!r} is longer than its memfd")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, region.num_bytes, prot=protection, offset=offset_bytes)
        except (OSError, ValueError) as error:  # an empty one cannot be mapped
            raise PeerProtocolError(f"region {region.name!r} is no memfd of pages: {error}") from error
        finally:
            os.close(fd)
        self._view: np.ndarray | None = np.frombuffer(self._map, np.uint8)
        self.address = int(self._view.ctypes.data)

    def close(self) -> None:
        """Unmap; nothing may be copying any more."""
        self._view = None
        self._map.close()


class ShmTransport(BaseTransport):
    """See interface.Transport. Regions begin at Region.fd_offset_bytes of the fd that the peer sends."""

    path = PathName.SHM

    def __init__(
        self,
        instance: str,
        *,
        quarantine: Quarantine | None = None,
        threads: int = DEFAULT_THREADS,
        copier: Copier | None = None,
        push: bool = False,
    ) -> None:
        """`push`: map peers' memory writable, so that push() can reach granted pages. `copier` stays the caller's."""
        super().__init__(instance, quarantine=quarantine)
        self._owned = CpuCopier(threads=threads) if copier is None else None
        self._copier: Copier = copier or self._owned  # type: ignore[assignment]  # one of them is there
        self._writable = push
        self._next_stream = 0

    def _payload(self) -> bytes | None:
        """Where each region begins in its memfd."""
        rows = [f"{region.name}\0{region.fd_offset_bytes}" for region in self.regions.values()]
        return "\n".join(rows).encode()

    def _open(self, peer: Peer) -> BaseLink:
        end, mapped, close = self._map(peer)
        return MappedLink(
            self.path,
            mapped,
            self._copier_for,
            unmap=close,
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="host memory of one host, mapped by fd",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
        )

    def _map(self, peer: Peer) -> tuple[EndDescription, Mapping[str, MappedPages], Callable[[], None]]:
        """The peer, its host regions as mapped here, and what unmaps them. Every fd is closed, whatever happens.

        Raises: PeerProtocolError, PathUnavailable.
        """
        mappings: dict[str, HostMapping] = {}
        waiting = dict(peer.fds)
        try:
            end = decode(peer.description)
            offsets = _offsets(end, self.path)
            for region in end.regions:
                if region.kind is RegionKind.HOST and region.name in waiting:
                    fd = waiting.pop(region.name)
                    offset = offsets.get(region.name, 0)
                    mappings[region.name] = HostMapping(region, fd, offset, writable=self._writable)
        except PeerProtocolError:
            _close_all(mappings)
            raise
        finally:
            for fd in waiting.values():
                os.close(fd)
        if not mappings:
            raise PathUnavailable(f"no descriptor of a host region of {end.instance} came along")
        mapped = {name: MappedPages(mapping.address) for name, mapping in mappings.items()}
        return end, mapped, lambda: _close_all(mappings)

    def _copier_for(self, source_device: int, target_device: int) -> tuple[Copier, int]:
        """Sets of one stream wait for each other, transfers need not: each has a number of its own."""
        self._next_stream += 1
        return self._copier, self._next_stream

    def _release(self) -> None:
        if self._owned is not None:
            self._owned.close()


def _offsets(end: EndDescription, path: PathName) -> dict[str, int]:
    raw = end.payloads.get(path.value, b"")
    found = {}
    try:
        for row in raw.decode().splitlines():
            name, _, offset = row.partition("\0")
            found[name] = int(offset)
    except ValueError as error:
        raise PeerProtocolError(f"bad shm payload of {end.instance}: {error}") from error
    if any(offset < 0 or offset % mmap.ALLOCATIONGRANULARITY for offset in found.values()):
        raise PeerProtocolError(f"{end.instance}: a region begins inside a page of the kernel's")
    return found


def _close_all(mappings: Mapping[str, HostMapping]) -> None:
    for mapping in mappings.values():
        mapping.close()
