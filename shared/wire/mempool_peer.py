"""mempool <-> mempool of another host: blocks that a reader here wants and a prefill worker there has made.

The *reader's* mempool connects (DEALER) to the address of the *source's* (ROUTER) that came with the handoff.

    reader                                   source
    PeerHello ------------------------------> PeerWelcome (or PeerRefused)
    OpenPath(my regions) -------------------> PathOpened(its regions)       one NIXL agent at each end, for this path
    RemoteAcquire(hashes, handoff) ---------> RemoteAcquired(pages, epochs), pinned under a lease
        PathBytes: the transfer library's own questions and answers, both ways, beside the bytes themselves
    CheckEpochs(pages, epochs), after DONE -> EpochsChecked(stale)
    RemoteRelease --------------------------> the pins end
    BlocksCompleted ------------------------> reads them in turn, as a reader      of PD-Caching-3 (core/returns.py)
    WhoIsHere ------------------------------> Here(instances)                of the nine calls (core/api_peers.py)
    PeerCall(alloc_mem, transfer, ...) -----> PeerReply

A lease ends by its release, at its time, or when the link is lost (heartbeats: within 2 s). Ending it early is safe:
the reader asks for the epochs after its last byte, and takes nothing whose page is not sealed under the same one.
When the link is lost both ends destroy their agent of every path of it: then nothing can arrive any more.
Page lists travel as in wire/mempool.py.
"""

from msgspec import Struct

from shared.ids import Epoch, HandoffId, InstanceId, LeaseId
from shared.wire.codec import Channel
from shared.wire.mempool_api import AllocMem, ApiReply, FreeMem, PullPages

VERSION = 1


class PeerHello(Struct, frozen=True, kw_only=True, tag="peer_hello"):
    """reader -> source: first message of every connection."""

    instance: str
    boot_generation: Epoch
    version: int = VERSION


class PeerWelcome(Struct, frozen=True, kw_only=True, tag="peer_welcome"):
    """source -> reader: go on. takes_back: BlocksCompleted is welcome; an earlier version does not know it."""

    instance: str
    boot_generation: Epoch
    version: int = VERSION
    takes_back: bool = False


class PeerRefused(Struct, frozen=True, kw_only=True, tag="peer_refused"):
    """source -> reader: this connection is of no use. `code`: peer.version, peer.too_many."""

    code: str
    reason: str


class OpenPath(Struct, frozen=True, kw_only=True, tag="open_path"):
    """reader -> source: an end for blocks of this content, however they are cut over ranks where the reader says of
    what family they are. `description`: shared/transfer/describe.py."""

    path_id: int
    content_key: str
    description: bytes
    family_key: str = ""  # an earlier version has none


class SpaceCut(Struct, frozen=True, kw_only=True):
    """How a space of the source, of another content key, cuts a block over its ranks: shared/transfer/reslice.KvEnd."""

    space: int
    num_layers: int  # of the whole model, as num_kv_heads
    num_kv_heads: int
    block_tokens: int
    row_bytes: int
    tp_size: int
    pp_size: int
    order: str


class PathOpened(Struct, frozen=True, kw_only=True, tag="path_opened"):
    """source -> reader: the other end. Region "2.0": pages of rank 0 in space 2. Spaces without a cut are cut as the
    reader's."""

    path_id: int
    description: bytes
    cuts: list[SpaceCut] = []


class PathFailed(Struct, frozen=True, kw_only=True, tag="path_failed"):
    """source -> reader: no such path. `code`: transfer.path_unavailable, transfer.refused, transfer.failed."""

    path_id: int
    code: str
    reason: str


class ClosePath(Struct, frozen=True, kw_only=True, tag="close_path"):
    """reader -> source: done with it. A path of a lost connection is closed without it."""

    path_id: int


class PathBytes(Struct, frozen=True, kw_only=True, tag="path_bytes"):
    """Both ways: a message of the path's link (shared/transfer/served.py)."""

    path_id: int
    data: bytes


class RemoteAcquire(Struct, frozen=True, kw_only=True, tag="remote_acquire"):
    """reader -> source: pin the longest prefix of `hashes` that you have. With a handoff, wait for it up to wait_ms.

    No hashes: nobody wants the handoff; end its hold. Answered by RemoteAcquired or CallRefused. With a family key
    they may be cut over other ranks than the reader's.
    """

    call_id: int
    content_key: str
    hashes: bytes  # 32 B each
    handoff_id: HandoffId = HandoffId("")
    wait_ms: int = 0
    ttl_ms: int = 30_000
    family_key: str = ""  # an earlier version has none


class RemoteAcquired(Struct, frozen=True, kw_only=True, tag="remote_acquired"):
    """source -> reader: the first num_blocks are pinned under the lease. 0 blocks: no lease."""

    call_id: int
    lease_id: LeaseId = LeaseId("")
    space: int = 0
    num_blocks: int = 0
    pages: bytes = b""  # u32 each
    epochs: bytes = b""  # u64 each
    parents: bytes = b""  # hash of the block before, 32 B each
    valid_tokens: bytes = b""  # u32 each
    checksums: bytes = b""  # u32 each, all 0: they come with EpochsChecked
    is_recut: bool = False  # the space is of another content key: its cut comes with PathOpened


class CheckEpochs(Struct, frozen=True, kw_only=True, tag="check_epochs"):
    """reader -> source, after the last byte: are these pages still sealed under these epochs?

    held: of pages that callers of the nine calls hold, perhaps not sealed yet: under the same epochs will do, if the
        transfer `order` (PullPages.call_id) is still under way: else their holder may have written into them since.
    order: 0 from an earlier version, whose transfer may be any that names the pages.
    """

    call_id: int
    space: int
    pages: bytes
    epochs: bytes
    held: bool = False
    order: int = 0


class EpochsChecked(Struct, frozen=True, kw_only=True, tag="epochs_checked"):
    """source -> reader: positions of those that are not; u32 each.

    checksums: of some of the others, position and sum (XXH3, 32 bits) in turn, u32 each. An earlier version has none.
    """

    call_id: int
    stale: bytes = b""
    checksums: bytes = b""


class RemoteRelease(Struct, frozen=True, kw_only=True, tag="remote_release"):
    """reader -> source: end a lease. No answer; twice is harmless."""

    lease_id: LeaseId


class BlocksCompleted(Struct, frozen=True, kw_only=True, tag="blocks_completed"):
    """reader -> source: behind a hand-off of yours these consecutive blocks are complete here. No answer.

    At most 64; the source may bring them back from the mempool at `address`, the reader's own.
    """

    handoff_id: HandoffId
    address: str  # 256 characters at most
    parent: bytes  # hash of the block before the first one; the chain's seed for a first block
    hashes: bytes  # 32 B each
    traceparent: str = ""  # of the request; 64 characters at most


class CallRefused(Struct, frozen=True, kw_only=True, tag="call_refused"):
    """source -> reader: the call was understood and refused. `code`: overloaded, peer.protocol_error."""

    call_id: int
    code: str
    reason: str


class WhoIsHere(Struct, frozen=True, kw_only=True, tag="who_is_here"):
    """Which instances may be named in a PeerCall to you? Answered by Here."""


class Here(Struct, frozen=True, kw_only=True, tag="here"):
    """Answer to WhoIsHere: instances whose pages are in this mempool."""

    instances: list[InstanceId]


CallOfPeer = AllocMem | FreeMem | PullPages


class PeerCall(Struct, frozen=True, kw_only=True, tag="peer_call"):
    """One of the nine calls about an instance there, for callers of this mempool. Answered by PeerReply."""

    call: CallOfPeer


class PeerReply(Struct, frozen=True, kw_only=True, tag="peer_reply"):
    """Answer to PeerCall."""

    reply: ApiReply


ToSource = (
    PeerHello
    | OpenPath
    | ClosePath
    | PathBytes
    | RemoteAcquire
    | CheckEpochs
    | RemoteRelease
    | BlocksCompleted
    | WhoIsHere
    | PeerCall
)
ToReader = (
    PeerWelcome
    | PeerRefused
    | PathOpened
    | PathFailed
    | PathBytes
    | RemoteAcquired
    | EpochsChecked
    | CallRefused
    | Here
    | PeerReply
)

TO_SOURCE: Channel[ToSource] = Channel(b"quire.mempool-peer/1", ToSource)
TO_READER: Channel[ToReader] = Channel(b"quire.mempool-peer-reply/1", ToReader)
