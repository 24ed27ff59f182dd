"""worker <-> mempool of the same host, over a unix stream socket (peer credentials are checked).

Three kinds of connection. An *engine* attaches: it gets two fds with Attached, then holds a quota of granted pages,
writes them and sends Sealed. A *rank* is a process that computes for an engine: it gets the same fds and says nothing
more. A *client* (a front, a tool) only calls. Callers of the nine calls that copy by themselves: mempool_callers.py.

An engine either copies (it seals pages that it filled from a cache of its own) or *works in the pages*
(`works_in_pages`: its KV cache is the pool's memory). Of the latter, a page stays pinned from its grant until Unpin,
sealed or not. Page lists travel as raw little-endian u32, epochs as u64, hashes as 32 bytes each, inside `bytes`
fields. Calls carry `call_id` and are answered once, with the same id; what an engine says without one is one-way.
Memory goes back to the system, and comes again, when a client says ReleaseMemory and RegainMemory. On GPUs a rank is
told by Unmap and MapSlabs, and says Unmapped and Mapped; before its first Mapped it is told nothing.
"""

from typing import Literal

from msgspec import Struct

from shared.ids import Epoch, HandoffId, InstanceId, LeaseId
from shared.kv.layout import EngineDescription
from shared.wire.codec import Channel
from shared.wire.mempool_callers import AttachCaller, CallerAttached, Detached
from shared.wire.mempool_layers import LayersSealed, LayerWords, LayerWordsCall, StepLayers
from shared.wire.mempool_lending import FromLending, ToLending
from shared.wire.mempool_reach import HostReach
from shared.wire.mempool_slabs import Mapped, MapSlabs, Unmap, Unmapped
from shared.wire.mempool_swap import FromSwaps, SwapCall


class HeldLease(Struct, frozen=True, kw_only=True):
    """A lease that an engine works in, as it knows it."""

    lease_id: LeaseId
    pages: bytes  # u32 each
    epochs: bytes  # u64 each


class Holding(Struct, frozen=True, kw_only=True):
    """What an engine that works in the pages has when it attaches to the successor of its mempool."""

    pages: bytes = b""  # granted, written or not; u32 each
    epochs: bytes = b""
    num_unwritten: int = 0  # the first so many of these are in stock: no step, begun or to come, writes them
    sealed_pages: bytes = b""
    sealed_epochs: bytes = b""
    sealed_hashes: bytes = b""
    sealed_parents: bytes = b""
    sealed_valid_tokens: bytes = b""
    leases: list[HeldLease] = []


class Attach(Struct, frozen=True, kw_only=True, tag="attach"):
    """First message of every connection. `description` is required of an engine: it fixes the page size."""

    kind: Literal["engine", "client", "rank"]
    instance: InstanceId
    instance_epoch: Epoch = Epoch(0)
    description: EngineDescription | None = None
    quota_pages: int = 0  # how many granted pages an engine wants to hold
    lets_go: bool = False  # this process writes no page that it got by earlier attachments of this instance
    works_in_pages: bool = False  # of an engine: see the module's docstring
    says_answers: bool = False  # of an engine: it answers each Shrink that is not `cached` (GiveBack.answers)
    capacity_bytes: int = 0  # of a rank: what pages may take on all ranks together; 0: the pool's own limit
    # where its pages lie: "cuda:" and the GPU's UUID in hex, no dashes; "cpu", or "cpu:" and a name (of a NUMA node)
    device: str = "cpu"
    rank: int = 0
    # of an engine or a rank that has the memory already: refused ("memory.replaced") by a pool with other memory
    memory_id: Epoch = Epoch(0)
    holding: Holding | None = None
    far_places: int = 0  # of a rank: it can map so many pages from elsewhere (mempool_far.py)


class Attached(Struct, frozen=True, kw_only=True, tag="attached"):
    """For an engine or a rank: two fds come with it (pages read-write, table read-only). Pages on a GPU lie in slabs of
    `pages_per_slab` instead, each an allocation with an fd of its own: then only the table's fd comes, and SlabsCall
    gets the others."""

    boot_generation: Epoch
    attachment: int
    num_pages: int = 0
    page_bytes: int = 0
    pages_per_slab: int = 0  # 0: all pages lie in one memfd
    memory_id: Epoch = Epoch(0)  # of the pool's pages, equal after a restart that kept them; 0: none yet
    absent_slabs: bytes = b""  # for a rank: these have no memory now, or lose it; u32 each
    peer_address: str = ""  # for a client: where mempools of other hosts reach this one; "": they do not
    load_interval_ms: int = 0  # for a client: say ReportLoad so often; 0: nobody wants to hear it
    asked_pages: int = 0  # for a rank: num_pages, were it the first that describes itself; 0: it does not say


class AttachRefused(Struct, frozen=True, kw_only=True, tag="attach_refused"):
    """Code: {layout,device}.mismatch, {pages,descriptors}.exhausted, spaces.full, instance.taken, epoch.stale, ..."""

    code: str
    reason: str


class Granted(Struct, frozen=True, kw_only=True, tag="granted"):
    """These pages are the engine's to write, under these epochs."""

    pages: bytes  # u32 each
    epochs: bytes  # u64 each


class NeedPages(Struct, frozen=True, kw_only=True, tag="need_pages"):
    """Refill my quota by up to this many. Answered by Granted messages as pages become free."""

    count: int


class GiveBack(Struct, frozen=True, kw_only=True, tag="give_back"):
    """Granted pages that the engine never wrote (or no longer needs)."""

    pages: bytes
    epochs: bytes
    answers: int = 0  # pages that Shrink asked for and that are dealt with: given, unpinned, or not there


class Detach(Struct, frozen=True, kw_only=True, tag="detach"):
    """An engine's last message: it writes none of its pages any more, also those that it was just granted. A caller's:
    none of its copies runs, and this connection's mapping is gone."""


class Shrink(Struct, frozen=True, kw_only=True, tag="shrink"):
    """Please GiveBack this many granted pages, or with `cached` Unpin as many sealed ones that no request uses."""

    count: int
    cached: bool = False


class Writing(Struct, frozen=True, kw_only=True, tag="writing"):
    """The next step writes these pages."""

    pages: bytes
    epochs: bytes


class Sealed(Struct, frozen=True, kw_only=True, tag="sealed"):
    """Bytes are complete: index them. One entry per page; stale epochs are dropped."""

    pages: bytes
    epochs: bytes
    hashes: bytes  # 32 B each
    parents: bytes  # hash of the block before, 32 B each; the chain's seed for a first block
    valid_tokens: bytes  # u32 each
    checksums: bytes = b""  # unused


class Unpin(Struct, frozen=True, kw_only=True, tag="unpin"):
    """An engine that works in the pages uses these sealed ones no more."""

    pages: bytes
    epochs: bytes


class HandoffReady(Struct, frozen=True, kw_only=True, tag="handoff_ready"):
    """Hold these blocks for the decode side until it acquires them or ttl_ms passes."""

    handoff_id: HandoffId
    hashes: bytes
    ttl_ms: int


class KeepHandoff(Struct, frozen=True, kw_only=True, tag="keep_handoff"):
    """Its reader waits for room and will come: hold it for ttl_ms from now, if it is held. No answer."""

    handoff_id: HandoffId
    ttl_ms: int


class Acquire(Struct, frozen=True, kw_only=True, tag="acquire"):
    """Pin the longest indexed prefix of `hashes`. With a handoff_id, wait up to wait_ms for HandoffReady.

    What `source_mempool` has of them comes over the network first, within wait_ms.
    """

    call_id: int
    hashes: bytes
    handoff_id: HandoffId = HandoffId("")
    wait_ms: int = 0
    ttl_ms: int = 30_000
    traceparent: str = ""
    until_release: bool = False  # no expiry: an engine of this instance works in the pages and releases them
    source_mempool: str = ""  # where pages are that are not here: of the handoff, or the plan's best holder
    own_space_only: bool = False  # bring nothing from elsewhere: computing it is quicker


class Acquired(Struct, frozen=True, kw_only=True, tag="acquired"):
    """The first num_blocks of the hashes are pinned under the lease; 0 blocks: no lease, lease_id "" ."""

    call_id: int
    lease_id: LeaseId
    fencing_token: Epoch
    num_blocks: int
    pages: bytes = b""
    epochs: bytes = b""
    checksums: bytes = b""  # unused
    blocks_peer: int = 0  # of them brought for this call: from another engine's space
    blocks_dram: int = 0  # from host memory behind the engine's
    blocks_remote: int = 0  # from another host's mempool
    blocks_timed: int = 0  # of the largest copy that the call waited for
    timed_us: int = 0  # of it: what a link does, without the wait for pages or a prompt's end; 0: unknown
    blocks_late: int = 0  # on their way from another host when the time was over; its first reader hears it
    late_us: int = 0  # so long ago their bytes were asked for: they take longer


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """End a lease. No answer; releasing twice is harmless."""

    lease_id: LeaseId


class Match(Struct, frozen=True, kw_only=True, tag="match"):
    """How many leading blocks are indexed? Pins nothing: a hint. Answered by Matched."""

    call_id: int
    hashes: bytes


class Matched(Struct, frozen=True, kw_only=True, tag="matched"):
    """Answer to Match."""

    call_id: int
    num_blocks: int


class Delete(Struct, frozen=True, kw_only=True, tag="delete"):
    """Drop blocks from the index; with no hashes, all that are not pinned. Answered by Deleted."""

    call_id: int
    hashes: bytes = b""


class Deleted(Struct, frozen=True, kw_only=True, tag="deleted"):
    """Answer to Delete."""

    call_id: int
    num_blocks: int


class StatusCall(Struct, frozen=True, kw_only=True, tag="status"):
    """Answered by PoolStatus."""

    call_id: int


class SpaceStatus(Struct, frozen=True, kw_only=True):
    """Pages of one kind: of one GPU (of one per rank), or of a part of host memory."""

    number: int
    content_key: str
    devices: list[str]  # of each rank; as in Attach
    num_pages: int
    page_bytes: int
    pages_by_state: dict[str, int]
    num_indexed: int
    num_pinned: int
    engines: list[str]
    num_ahead: int = 0  # of num_pinned: only until their reader comes, whoever needs them first gets them


class PoolStatus(Struct, frozen=True, kw_only=True, tag="pool_status"):
    """Counts by state sum to num_pages at every moment (invariant 4)."""

    call_id: int
    boot_generation: Epoch
    num_pages: int
    page_bytes: int
    pages_by_state: dict[str, int]
    num_indexed: int
    num_pinned: int
    num_leases: int
    num_handoffs: int
    attachments: list[str]
    counters: dict[str, int]
    num_kept: int = 0  # indexed pages that attached engines work in: pinned by them
    spaces: list[SpaceStatus] = []  # each by itself; the counts above are of all


class SlabsCall(Struct, frozen=True, kw_only=True, tag="slabs_call"):
    """From a rank: descriptors of `count` slabs of its device, please. Answered by Slabs."""

    call_id: int
    first: int
    count: int


class Slabs(Struct, frozen=True, kw_only=True, tag="slabs"):
    """`count` fds come with it: slabs first, first + 1, ..."""

    call_id: int
    first: int
    count: int


class ReleaseMemory(Struct, frozen=True, kw_only=True, tag="release_memory"):
    """Give this much memory of a space back to the system: free pages first, then those used longest ago. Answered by
    MemoryChanged, once it is back, or nothing more of it can be, or wait_ms have passed; what is on its way then still
    goes. CallFailed "release.unsupported": a process maps the pages and cannot unmap them."""

    call_id: int
    num_bytes: int
    wait_ms: int = 5_000
    space: int = -1  # SpaceStatus.number; -1: that of the caller's instance


class RegainMemory(Struct, frozen=True, kw_only=True, tag="regain_memory"):
    """Take memory from the system for pages that have none, as much as is there. Answered by MemoryChanged."""

    call_id: int
    num_bytes: int = 0  # 0: for all of them
    wait_ms: int = 5_000
    space: int = -1


class MemoryChanged(Struct, frozen=True, kw_only=True, tag="memory_changed"):
    """Answer to ReleaseMemory and RegainMemory."""

    call_id: int
    num_bytes: int  # that this call gave back, or got
    released_bytes: int  # that the space's pages are without now


PAGES_PER_VACATE = 48  # an engine lets go of so many in about 0.35 ms, between two steps


class Vacate(Struct, frozen=True, kw_only=True, tag="vacate"):
    """Please GiveBack or Unpin those of these pages that no request uses, then say Vacated with the number."""

    number: int
    pages: bytes  # u32 each
    epochs: bytes  # u64 each


class Vacated(Struct, frozen=True, kw_only=True, tag="vacated"):
    """What was possible of Vacate has been said."""

    number: int


class CallFailed(Struct, frozen=True, kw_only=True, tag="call_failed"):
    """The call was understood and refused."""

    call_id: int
    code: str
    reason: str


ToMempool = (
    Attach
    | AttachCaller
    | NeedPages
    | GiveBack
    | Detach
    | Writing
    | Sealed
    | Unpin
    | StepLayers
    | LayersSealed
    | HandoffReady
    | KeepHandoff
    | Acquire
    | Release
    | Match
    | Delete
    | StatusCall
    | SlabsCall
    | ReleaseMemory
    | RegainMemory
    | Vacated
    | Unmapped
    | Mapped
    | LayerWordsCall
    | ToLending
    | SwapCall
)
FromMempool = (
    Attached
    | AttachRefused
    | CallerAttached
    | Detached
    | Granted
    | Shrink
    | Acquired
    | Matched
    | Deleted
    | PoolStatus
    | Slabs
    | MemoryChanged
    | Vacate
    | Unmap
    | MapSlabs
    | LayerWords
    | HostReach
    | FromLending
    | FromSwaps
    | CallFailed
)

TO_MEMPOOL: Channel[ToMempool] = Channel(b"quire.mempool/1", ToMempool)
FROM_MEMPOOL: Channel[FromMempool] = Channel(b"quire.mempool-reply/1", FromMempool)
