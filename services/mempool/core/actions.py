"""What the pool asks its shell to do, in order, and its bounds. No I/O."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.ids import Epoch, InstanceId, PageId
from shared.kv.layout import EngineDescription
from shared.kv.page import STOCK_PART
from shared.wire.mempool import FromMempool
from shared.wire.mempool_api import FromMempoolApi
from shared.wire.mempool_peer import ToReader, ToSource


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of everything that a peer could make grow."""

    capacity_bytes: int  # in host memory, of each space
    device_capacity_bytes: int = 0  # on GPUs, all ranks of an engine together; 0: what the engine found free
    granted_share: float = 0.5  # of all pages: how many may be granted to engines and not yet sealed
    # of the pages: at most so many for engines that work in the pages, cached ones too
    kept_share: float = 0.99
    # of the pages: such a stock is enough for an engine, with its longest request; no block is evicted for a larger one
    stock_share: float = 1 / STOCK_PART
    max_leases: int = 65_536
    max_handoffs: int = 65_536
    max_waiting: int = 4_096  # Acquire calls that wait for a handoff
    max_blocks_per_call: int = 65_536
    max_ttl_ms: int = 120_000
    max_wait_ms: int = 30_000
    max_spaces: int = 64
    pull_patience_ms: int = 150  # a reader that waits for nothing else waits so long for pages to copy into
    portion_bytes: int = 256 << 20  # of a copy for a reader: so many go before the rest has pages
    copy_timeout_ms: int = 5_000
    dram_bytes: int = 0  # of host memory behind the spaces of each content; 0: what is evicted is gone
    dram_for_host: bool = False  # also behind named parts of host memory, not only behind GPUs
    out_in_flight_bytes: int = (
        256 << 20
    )  # on their way out of one space; above it blocks are evicted uncopied
    out_timeout_ms: int = 500  # of a copy out: an engine may be waiting for its pages
    offer_patience_ms: int = 2_000  # so long engines have to give back what an offer is to lend
    pd_caching: str = "3"  # a PdCaching (pd_caching.py)
    transfer_mode: str = "by-request-agg"  # a TransferMode; by-layer needs the workers' word for each step
    idle_punch_ms: int = 30_000  # quiet for so long: memory of free pages goes back; 0: never
    space_idle_ms: int = (
        600_000  # a space without engines for so long loses its blocks and its memory; 0: never
    )


NO_EPOCH = Epoch(0)
NOBODY = InstanceId("")

# In every action, `space` is the number of the space that it is about.


@dataclass(frozen=True, slots=True)
class CreateMemory:
    """Make the page and table memory of a space; before any other action that needs it."""

    description: EngineDescription
    num_pages: int
    page_bytes: int
    num_ranks: int = 1  # each with page_bytes for every page
    pages_per_slab: int = 0  # on GPUs: pages of one allocation; 0: the pages of all ranks lie in one memfd
    space: int = 0
    memory_id: Epoch = NO_EPOCH
    label: str = ""  # of a space in host memory that is apart from others of its kind


@dataclass(frozen=True, slots=True)
class CreateSlabs:
    """Make one rank's pages on its GPU, unless they exist; where that fails, end the connection."""

    connection: int
    rank: int
    device: str
    num_slabs: int
    slab_bytes: int
    space: int = 0


@dataclass(frozen=True, slots=True)
class SendSlabs:
    """Answer to SlabsCall."""

    connection: int
    call_id: int
    rank: int
    first: int
    count: int
    space: int = 0


@dataclass(frozen=True, slots=True)
class WriteWords:
    """Publish page words, in this order, before any later action: (page, word)."""

    words: list[tuple[int, int]]
    space: int = 0


@dataclass(frozen=True, slots=True)
class WriteEntries:
    """Note what the index knows of these pages, before the words that say they are sealed: (page, packed ENTRY)."""

    entries: list[tuple[int, bytes]]
    space: int = 0


@dataclass(frozen=True, slots=True)
class PunchPages:
    """Give the memory of these free pages back to the operating system."""

    pages: list[PageId]
    space: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseUnits:
    """Give memory to the system that nobody maps (releases.py); answer with Mempool.on_released, always.

    `units`: of host memory, pages; on GPUs, allocations of every rank.
    `unlocks`: nothing is copied there before memory comes back: it need not stay page-locked.
    """

    units: list[int]
    space: int = 0
    unlocks: bool = False


@dataclass(frozen=True, slots=True)
class RestoreUnits:
    """Take memory from the system for these again; answer with Mempool.on_restored, always.

    Host memory that need not be page-locked (ReleaseUnits.unlocks) is so from now on, with no units too.
    """

    units: list[int]
    space: int = 0


@dataclass(frozen=True, slots=True)
class OweMemory:
    """For a successor: whether a newcomer to this space is owed what it lacks, or it was pressed for. No answer."""

    is_owed: bool
    space: int = 0


@dataclass(frozen=True, slots=True)
class EndSpace:
    """The space is over (endings.py): nobody else maps its memory, which is not kept any more. No answer."""

    space: int


@dataclass(frozen=True, slots=True)
class OfferSlabs:
    """MapSlabs to a rank, with a descriptor of each."""

    connection: int
    rank: int
    slabs: list[int]
    space: int = 0


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A copy goes layer by layer: each page begins with `num_layers` times `layer_bytes`.

    With a `step` each layer waits until every rank of `instance` has written it in that step: its layer word says so
    (shared/kv/layer_words.py).
    """

    num_layers: int
    layer_bytes: int
    instance: InstanceId = NOBODY
    step: int = 0
    traceparent: str = ""
    is_over: bool = False  # the step, already


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy whole pages, every rank's, into `targets` of `space`; answer with Mempool.on_copied, always.

    `sources`: (space, page) for each target. They are sealed and pinned until the answer, but for those of a LayerCut
    with a step, which are being written. `raw`: pages on loan may hold another content than their space's: they are
    copied byte for byte, and never cut anew. `returns`: of how many of its blocks going back from decode to prefill
    each trace is told. `readers`: traces of those who wait for it. `follows`: it is more of what that copy began,
    from no other spaces.
    """

    copy_id: int
    space: int
    targets: list[PageId]
    sources: list[tuple[int, PageId]]
    timeout_ms: int
    cut: LayerCut | None = None
    raw: bool = False
    returns: Mapping[str, int] = field(default_factory=dict)
    readers: tuple[str, ...] = ()
    follows: int = 0

    def by_source(self) -> tuple[list[tuple[int, Sequence[PageId]]], Sequence[PageId]]:
        """Source pages space by space, and the targets in that order. Cost: 50 ns a page of one space."""
        if not self.sources:
            return [], []
        spaces, pages = zip(*self.sources, strict=True)
        if spaces.count(spaces[0]) == len(spaces) == len(self.targets):
            return [(spaces[0], pages)], self.targets
        parts: defaultdict[int, list[PageId]] = defaultdict(list)
        targets: defaultdict[int, list[PageId]] = defaultdict(list)
        for (space, page), target in zip(self.sources, self.targets, strict=True):
            parts[space].append(page)
            targets[space].append(target)
        return list(parts.items()), [page for space in parts for page in targets[space]]


@dataclass(frozen=True, slots=True)
class StepOver:
    """The step that this copy follows has ended: whatever its layer words say, everything is written."""

    copy_id: int


@dataclass(frozen=True, slots=True)
class SendLayerWords:
    """Answer to LayerWordsCall of this rank: memory that is its own until its connection ends."""

    connection: int
    call_id: int
    rank: int
    instance: InstanceId
    space: int = 0


@dataclass(frozen=True, slots=True)
class AskPeer:
    """To the mempool at `address`; Mempool.on_peer_answer, or on_peer_lost when it is not reached.

    `space`: blocks for this one of ours will follow; -1: none.
    """

    address: str
    message: ToSource
    space: int = -1


@dataclass(frozen=True, slots=True)
class TellPeer:
    """Answer to a peer's call; dropped when its connection has ended.

    other_cut: a miss, and the blocks are here in a space of other contents: cut over other ranks, say.
    """

    link: int
    message: ToReader
    other_cut: bool = False


@dataclass(frozen=True, slots=True)
class PullRemote:
    """Copy whole pages, every rank's, from another host; answer with Mempool.on_remote_pulled, always.

    `sources`: pages of space `source_space` of the mempool at `address`, one for each target. `returns`: the trace of
    the request whose blocks go back from decode to prefill. `num_bytes`: of the targets.
    """

    number: int
    address: str
    space: int
    targets: list[PageId]
    source_space: int
    sources: list[PageId]
    timeout_ms: int
    returns: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """To one connection. `with_memory`: the page fd (read-write) and the table fd (read-only) go along."""

    connection: int
    message: FromMempool
    with_memory: bool = False
    space: int = 0
    reads_only: bool = False  # the page fd too


@dataclass(frozen=True, slots=True)
class KeepCaller:
    """Tell the keeper which spaces a process maps as a caller (callers.py), all of them; none: it does no more."""

    process: int
    spaces: list[int]


@dataclass(frozen=True, slots=True)
class ApiSend:
    """To one caller of the nine calls (api_spaces.py)."""

    connection: int
    message: FromMempoolApi


@dataclass(frozen=True, slots=True)
class MapFarPages:
    """Send a rank a MapFar with descriptors of these pages of a space, in the order of its places."""

    connection: int
    number: int
    places: list[int]
    space: int
    rank: int
    pages: list[PageId]


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Rule 5: it held on to memory beyond the deadline. The pool goes on when its death is proven."""

    process: int
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a connection. The pool has forgotten it already."""

    connection: int
    reason: str


Action = (
    CreateMemory
    | CreateSlabs
    | WriteWords
    | WriteEntries
    | PunchPages
    | ReleaseUnits
    | RestoreUnits
    | OweMemory
    | EndSpace
    | OfferSlabs
    | CopyPages
    | Send
    | SendSlabs
    | SendLayerWords
    | StepOver
    | ApiSend
    | MapFarPages
    | KillProcess
    | KeepCaller
    | Disconnect
    | AskPeer
    | TellPeer
    | PullRemote
)
