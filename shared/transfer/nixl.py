"""Any two processes, by NIXL over UCX: RDMA, TCP, CMA, cuda_ipc. Host memory and cudaMalloc slabs.

Two ways to pull. `read`: one-sided, the peer does nothing; best with RDMA and between processes of one host (CMA).
`write`: the source is asked and writes (served.py); best over TCP, where a read is emulated at a tenth of the speed,
and for GPU memory without NVLink. "auto" reads between host memory of one pid namespace, else asks.

UCX ends the process over an address that it cannot read, so metadata that was damaged on the way, or made by another
version, never gets there (NixlEnd). That is no protection from a peer that means harm.

The source decides what it serves (`may_serve`: the mempool's leases). One-sided accesses cannot be revoked: a peer that
has our metadata can read or write all registered pages until remove_peer, so links are made inside one cluster only.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from shared.errors import PeerProtocolError
from shared.kernels.copy_pages.copies import Copies
from shared.kernels.copy_pages.plan import merge
from shared.transfer.describe import (
    EndDescription,
    RegionDescription,
    decode,
    this_boot_id,
    this_pid_namespace,
)
from shared.transfer.errors import PathUnavailable, PeerLost, TransferError, TransferFailed
from shared.transfer.interface import Channel, PathName, Peer, Region, RegionKind
from shared.transfer.link import BaseLink
from shared.transfer.nixl_agent import NixlAgent, NixlTransfer
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine
from shared.transfer.served_link import MaySend, Sending, ServedLink
from shared.transfer.transfer_job import Attempt
from shared.wire.codec import MALFORMED

ATTEND_CONNECT_S = 2.0
Mode = Literal["auto", "read", "write"]


class NixlEnd(msgspec.Struct, frozen=True):
    """The payload of a description: the agent's metadata, and (address, device or -1) of each region.

    Ends of before `digest` sent neither it nor `library`; they are taken as they are, so that hosts can be brought to
    this version one after the other.
    """

    agent: str
    metadata: bytes
    regions: dict[str, tuple[int, int]]
    library: str = ""  # that made the metadata, and its version; "": not said
    digest: bytes = b""  # of the fields above; b"": not said

    def sealed(self) -> "NixlEnd":
        """With the digest of what it says."""
        return msgspec.structs.replace(self, digest=self._digest())

    def check(self, library: str) -> None:
        """Whether this process, which has `library`, may give the metadata to NIXL.

        Raises: PeerProtocolError when it is not what the peer said; PathUnavailable when another version made it.
        """
        if self.digest and self.digest != self._digest():
            raise PeerProtocolError(f"the NIXL payload of {self.agent} was damaged on its way")
        if self.library and library and self.library != library:
            raise PathUnavailable(f"{self.agent} has {self.library}, this end {library}")

    def _digest(self) -> bytes:
        # These for good: an older end knows no others.
        said = self.agent, self.metadata, self.regions, self.library
        return hashlib.sha256(msgspec.msgpack.encode(said)).digest()


class ReadAttempt:
    """A one-sided read or write of ours; see link.Attempt."""

    def __init__(self, link: "NixlLink", transfer: NixlTransfer) -> None:
        self._link = link
        self._transfer = transfer

    def poll(self) -> bool:
        """See link.Attempt."""
        try:
            return self._transfer.poll()
        except PeerLost as error:
            self._link.peer_lost(error.message)
            raise

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """UCX cannot take a read back: it settles when it ends, or when the connection has been cut."""
        if self._transfer.over:
            return True
        if peer_is_dead:
            return self._transfer.release()
        try:
            return self._transfer.poll()
        except TransferError:
            return self._transfer.over


class NixlLink(ServedLink):
    """One remote agent."""

    path = PathName.NIXL

    def __init__(
        self,
        agent: NixlAgent,
        theirs: NixlEnd,
        *,
        mode: Mode,
        channel: Channel | None,
        may_send: MaySend,
        **common: Any,
    ) -> None:
        super().__init__(channel=channel, may_send=may_send, **common)
        self._agent = agent
        self._end = theirs
        self._mode: Mode = mode

    def _reads(self, source: RegionDescription, target: Region) -> bool:
        if self._mode != "auto":
            return self._mode == "read"
        one_host = self._peer_end.boot_id == this_boot_id() and self._peer_end.pid_ns == this_pid_namespace()
        return one_host and source.kind is RegionKind.HOST and target.kind is RegionKind.HOST

    def _begin(self, source: RegionDescription, target: Region, pieces: Pieces, deadline_s: float) -> Attempt:
        if self._reads(source, target):
            return ReadAttempt(self, self._one_sided(False, target, source.name, pieces.turned()))
        return self.ask(source.name, target.name, pieces, deadline_s)

    def _begin_push(
        self, source: Region, target: RegionDescription, pieces: Pieces, deadline_s: float
    ) -> Attempt:
        return ReadAttempt(self, self._one_sided(True, source, target.name, pieces))

    def _one_sided(self, write: bool, mine: Region, theirs: str, pieces: Pieces) -> NixlTransfer:
        """`pieces` go from mine to theirs, as in a write; a read turns its own around."""
        if theirs not in self._end.regions:
            raise TransferFailed(f"{self.peer} has not registered {theirs!r} with NIXL")
        address, device = self._end.regions[theirs]
        # Neighbours become one descriptor: UCX costs 15 to 30 us a descriptor between GPUs (facts.md).
        runs = merge(
            Copies(
                pieces.source_offsets + np.uint64(mine.address),
                pieces.target_offsets + np.uint64(address),
                pieces.sizes,
            )
        )
        return self._agent.begin(
            write=write,
            local=runs.sources,
            local_device=mine.device,
            remote=runs.targets,
            remote_device=device,
            sizes=runs.sizes,
            peer=self._end.agent,
        )

    def _send_pieces(self, number: int, mine: Region, theirs: RegionDescription, pieces: Pieces) -> Sending:
        return self._one_sided(True, mine, theirs.name, pieces)

    def _disconnect(self) -> None:
        self._agent.remove_peer(self._end.agent)


class NixlTransport(BaseTransport):
    """See interface.Transport. Apply config.apply_ucx_environment before the first one of a process."""

    path = PathName.NIXL

    def __init__(
        self,
        instance: str,
        *,
        quarantine: Quarantine | None = None,
        mode: Mode = "auto",
        may_send: MaySend = lambda region, pages: True,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """`prepare` runs first on the thread: UCX wants a CUDA context there for GPU memory.

        Raises: PathUnavailable without NIXL.
        """
        self._agent: NixlAgent | None = None
        self.is_gone = False  # after close(): whether nothing can arrive here any more
        super().__init__(instance, quarantine=quarantine, progress=self._progress)
        self._mode: Mode = mode
        self._may_send = may_send
        self._handles: list[Any] = []
        try:
            if prepare is not None:
                self._thread.call(prepare).result()
            self._agent = self._thread.call(lambda: NixlAgent(instance)).result()
        except PathUnavailable:
            self._thread.close()
            raise

    @property
    def agent(self) -> NixlAgent:
        """The process's agent; only its thread may use it."""
        assert self._agent is not None
        return self._agent

    def register(self, region: Region) -> None:
        """See interface.Transport. Links made before do not reach it. Cost: pins every byte once."""
        if region.kind is RegionKind.CUDA_PAGES:
            raise PathUnavailable("UCX's wheels cannot export cuMemCreate pages; register a cudaMalloc slab")
        super().register(region)

        def pin() -> None:
            self._handles.append(self.agent.register(region.address, region.num_bytes, region.device))

        try:
            self._thread.call(pin).result()
        except PathUnavailable:
            del self.regions[region.name]
            raise

    def _payload(self) -> bytes | None:
        regions = {region.name: (region.address, region.device) for region in self.regions.values()}
        metadata = self._thread.call(self.agent.metadata).result()
        return msgspec.msgpack.encode(
            NixlEnd(self.agent.name, metadata, regions, self.agent.library).sealed()
        )

    def _open(self, peer: Peer) -> BaseLink:
        end = decode(peer.description)
        theirs = _nixl_end(end)
        theirs.check(self.agent.library)
        name = self._thread.call(lambda: self.agent.add_peer(theirs.metadata)).result()
        if name != theirs.agent:
            raise PeerProtocolError(f"NIXL metadata of {name!r} in the description of {theirs.agent!r}")
        link = NixlLink(
            self.agent,
            theirs,
            mode=self._mode,
            channel=peer.channel,
            may_send=self._may_send,
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="UCX reaches both regions",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
        )
        self._thread.call(lambda: self.agent.connect(theirs.agent)).result()
        self._thread.attend(ATTEND_CONNECT_S)
        return link

    def _progress(self) -> None:
        if self._agent is not None:
            self._agent.progress()

    def _on_error(self, error: Exception) -> None:
        """Without progress nothing ends: the links are lost, as if their peers were, and so is each that comes."""
        self._broken = self._broken or f"an error on this side: {error!r}"
        for link in list(self.links):
            link.peer_lost(self._broken)

    def _release(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            for handle in self._handles:
                agent.deregister(handle)
            self.is_gone = agent.close()


def _nixl_end(end: EndDescription) -> NixlEnd:
    if PathName.NIXL.value not in end.payloads:
        raise PathUnavailable(f"{end.instance} runs without NIXL")
    try:
        found = msgspec.msgpack.decode(end.payloads[PathName.NIXL.value], type=NixlEnd)
    except MALFORMED as error:
        raise PeerProtocolError(f"bad NIXL payload of {end.instance}: {error}") from error
    if any(name not in found.regions or found.regions[name][0] < 0 for name in (r.name for r in end.regions)):
        raise PeerProtocolError(f"{end.instance}: a region without an address for NIXL")
    return found
