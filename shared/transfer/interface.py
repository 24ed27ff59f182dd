"""One interface for every way of moving pages between two processes.

    Transport   one per process and path: register() regions once, describe() them, connect() to a peer's description
    Link        one per peer: pull() the peer's pages into mine, push() mine into pages granted for it
    Channel     carries the few control messages that some paths need; the owner's ZeroMQ link, a pipe in tests

Who may do what: the puller names source pages (leased to it) and target pages (its own, granted for this transfer).
From pull() until the future ends, the target pages belong to the link; if it ends with an error, those named in
`quarantined` still do, until on_settled reports them (ARCHITECTURE.md, rules 4 to 6).

Transfers are MemServe's `transfer` (section 4.3); pull instead of push, because the reader can check epochs after the
last byte and a page that nobody reads any more needs no revocation.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from shared.transfer.pieces import Pieces

MAX_IN_FLIGHT = 256  # transfers of one link
MAX_PIECES = 1 << 17  # of one transfer: 4,096 pages of 32 layers
MAX_MESSAGE_BYTES = 4 << 20  # on a Channel: MAX_PIECES of three 8-byte columns, and the header


class PathName(StrEnum):
    """How bytes travel; a label of metrics."""

    ALIAS = "alias"  # the same memory: nothing travels
    SHM = "shm"  # host memory of one host, by fd and memcpy
    IMPORTED = "imported"  # pages of one host's GPUs and memory, mapped here, by copy engine
    NCCL = "nccl"  # GPU to GPU in a fixed pair
    NIXL = "nixl"  # any two processes, by UCX
    STAGED = "staged"  # through host memory that both ends map
    UCXX = "ucxx"  # UCX without one-sided operations; optional


class RegionKind(StrEnum):
    """What kind of memory a region is; decides which paths can reach it."""

    HOST = "host"  # a mapping of a memfd
    CUDA_PAGES = "cuda_pages"  # cuMemCreate pages mapped side by side, each exportable as an fd
    CUDA_SLAB = "cuda_slab"  # one cudaMalloc allocation: what UCX can register


@dataclass(frozen=True, slots=True)
class Region:
    """Pages side by side in this process: page p is at address + p * page_bytes. The memory stays the caller's.

    `memory_key` names the physical memory in the whole cluster: two regions of equal key are the same bytes.
    """

    name: str
    kind: RegionKind
    address: int
    page_bytes: int
    num_pages: int
    memory_key: str
    device: int = -1  # CUDA ordinal in this process; -1 for host memory
    device_uuid: str = ""  # names the GPU on its host, whatever its ordinal here
    fd: int = -1  # of a host region: its memfd, which stays the caller's
    fd_offset_bytes: int = 0  # where page 0 is in that memfd

    @property
    def num_bytes(self) -> int:
        """Length of the region."""
        return self.page_bytes * self.num_pages


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer that ended well. `stale`: positions in the list of source pages whose epoch had changed.

    The target pages of stale positions hold garbage and are the caller's again: a miss, never other bytes.
    """

    path: PathName
    num_bytes: int  # that travelled: 0 for an alias
    elapsed_us: int
    stale: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages of the peer that it set aside for one push; it keeps them quarantined if the push fails."""

    grant_id: int
    region: str
    pages: frozenset[int]


# Called on the link's thread when the copy is done on the host: which positions are stale. See epochs.py.
PageCheck: TypeAlias = Callable[[], Sequence[int]]
OnSettled: TypeAlias = Callable[
    [str, tuple[int, ...]], None
]  # target region, pages that nobody can write now
OnPeerLost: TypeAlias = Callable[[str, str], None]  # peer instance, reason


class Channel(Protocol):
    """Control messages to one peer, in order. The receiver's owner hands each to Link.on_message."""

    def send(self, message: bytes) -> None:
        """Never blocks; from any thread. Raises: PeerGone."""
        ...


@dataclass(frozen=True, slots=True)
class MappedPages:
    """A peer's pages as mapped in this process: page p at address + p * page_bytes.

    `present`: the pages mapped so far; None means all. Pages that are not present go by the staged path.
    """

    address: int
    device: int = -1  # ordinal of the GPU that they are on; -1 for host memory
    present: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """What link-up has brought from one peer. Descriptors are the transport's from now on."""

    description: bytes
    fds: Mapping[str, int] = field(default_factory=dict)  # host region -> memfd, received by SCM_RIGHTS
    mapped: Mapping[str, MappedPages] = field(default_factory=dict)  # CUDA region -> where it is mapped here
    channel: Channel | None = None
    on_settled: OnSettled | None = None  # runs on the link's thread


class Link(Protocol):
    """One peer by one path. Every method may be called from any thread."""

    path: PathName
    reason: str  # why this path, in words, for logs and metrics
    peer: str  # the peer's instance

    def pull(
        self,
        source: str,
        source_pages: Sequence[int],
        target: str,
        target_pages: Sequence[int],
        *,
        timeout_ms: int,
        check: PageCheck | None = None,
    ) -> "Future[Moved]":
        """Copy the peer's pages into mine, position by position.

        The future ends with Moved, or with TransferTimeout, PeerLost or TransferFailed, by the deadline.
        Raises: TransferRefused, TransferQueueFull, PeerLost; nothing was started.
        """
        ...

    def pull_pieces(
        self, source: str, target: str, pieces: Pieces, *, timeout_ms: int, check: PageCheck | None = None
    ) -> "Future[Moved]":
        """As pull(), for parts of pages: reslice.py makes them."""
        ...

    def push(
        self,
        source: str,
        source_pages: Sequence[int],
        grant: Grant,
        target_pages: Sequence[int],
        *,
        timeout_ms: int,
    ) -> "Future[Moved]":
        """Copy my pages into the peer's granted ones. As pull(); `quarantined` names pages of the peer.

        Raises: TransferRefused for a page outside the grant.
        """
        ...

    def on_message(self, message: bytes) -> None:
        """A control message of the peer. Raises: PeerProtocolError when it is none."""
        ...

    def quarantined(self) -> Mapping[str, frozenset[int]]:
        """Target pages, by region, that a failed transfer may still write."""
        ...

    def peer_lost(self, reason: str) -> None:
        """The peer does not answer (heartbeat): fail what is in flight. It may still live: quarantine stays."""
        ...

    def peer_dead(self) -> None:
        """The peer is proven dead (pidfd, or its host is fenced): fail what is in flight, settle everything."""
        ...

    def close(self) -> None:
        """End the link. What is in flight fails with PeerLost."""
        ...


class Transport(Protocol):
    """One path of one process."""

    path: PathName

    def register(self, region: Region) -> None:
        """Once per region, never per page. Raises: PathUnavailable, SettingsError for a second of that name."""
        ...

    def describe(self) -> bytes:
        """Everything a peer needs to connect; describe.py decodes it."""
        ...

    def connect(self, peer: Peer) -> Link:
        """Raises: PathUnavailable, PeerProtocolError on a malformed description."""
        ...

    def on_peer_lost(self, callback: OnPeerLost) -> None:
        """Called once per lost link, on the link's thread."""
        ...

    def close(self) -> None:
        """Close every link, deregister, end the thread."""
        ...
